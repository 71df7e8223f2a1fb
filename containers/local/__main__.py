"""`python -m containers.local`: start and stop the SageMaker of this machine."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import boto3
import uvicorn
from botocore.config import Config

from containers.local.app import LocalSageMaker
from containers.local.arn import region
from containers.local.faults import FAULTS_VARIABLE, Faults
from containers.local.fleet import Fleet
from containers.local.machine import DEFAULT_INSTANCE_MEMORY_GB, Machine, end_instances
from drafter.errors import FledgeError, ServerError

HOST = "127.0.0.1"
DEFAULT_PORT = 4281
# A client that uses an idle connection again in the moment that the server closes it sees a failed request.
KEEP_ALIVE_S = 600
_SHUTDOWN_S = 2
_SERVER_ENDS_WITHIN_S = 20.0

_ABOUT = f"""\
SageMaker on this machine: answers SageMaker's API and runtime on {HOST}, and runs each instance of an endpoint
as a vLLM process. For development and tests; containers/local/README.md says what it is not.

`fledge up` starts it. By hand, with moto's server (S3, CloudWatch) on port 4282:

  export AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local AWS_REGION=us-east-1
  export AWS_ENDPOINT_URL_S3=http://{HOST}:4282 AWS_ENDPOINT_URL_CLOUDWATCH=http://{HOST}:4282
  python -m containers.local serve --home .fledge

and for whoever calls it, boto3 or the aws command:

  export AWS_ENDPOINT_URL_SAGEMAKER=http://{HOST}:{DEFAULT_PORT}
  export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME=http://{HOST}:{DEFAULT_PORT}
"""

_AFTERWARDS = f"""\
while it runs:
  curl -s {HOST}:{DEFAULT_PORT}/_local/instances      processes, ports, logs
  curl -s {HOST}:{DEFAULT_PORT}/_local/faults -d '{{"kind": "capacity", "times": 1}}'
                                                  the next launch finds no capacity
                                                  (also quota, throttling, ping_failure, slow_start, latency)
environment:
  FLEDGE_VLLM_PYTHON   Python that has vLLM (default .venv-vllm/bin/python)
  {FAULTS_VARIABLE}  failures to order from the start, a JSON list of what /_local/faults takes
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; a problem that the user can fix is told without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except FledgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; the instances end too, and come back at the next start."""
    require_local_endpoints(os.environ)
    folder = options.home / "sagemaker"
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "botocore"):  # a line for each ping, each credential looked up
        logging.getLogger(chatty).setLevel(logging.WARNING)
    faults = Faults.from_environment()
    with _only_server(folder):
        machine = Machine(folder, options.memory_gb, options.instance_memory_gb)
        local = LocalSageMaker(
            folder=folder,
            cloudwatch=_client("cloudwatch"),
            s3=_client("s3"),
            new_fleet=lambda spec: Fleet(spec, machine, faults),
            faults=faults,
        )
        uvicorn.run(
            local.app(),
            host=HOST,
            port=options.port,
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    return 0


def stop(options: argparse.Namespace) -> int:
    """End the server, if one runs, and every instance, whether or not a server looks after it."""
    folder = options.home / "sagemaker"
    _end_server(folder)
    ended = end_instances(folder)
    print(f"{ended} instances ended that no server looked after", file=sys.stderr)
    return 0


def require_local_endpoints(environment: Mapping[str, str]) -> None:
    """Refuse to start where boto3 would speak to AWS: alarms would be set there, captures written there.

    Raises:
        FledgeError: S3 or CloudWatch has no address in the environment.
    """
    for service in ("S3", "CLOUDWATCH"):
        name = f"AWS_ENDPOINT_URL_{service}"
        if not (environment.get(name) or environment.get("AWS_ENDPOINT_URL")):
            raise FledgeError(
                f"{name} is not set",
                f"the address of moto's server, such as http://{HOST}:4282",
                f"start everything with `fledge up`, or `export {name}=...` (python -m containers.local --help)",
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m containers.local",
        description=_ABOUT,
        epilog=_AFTERWARDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    server = verbs.add_parser("serve", help="answer the API and run endpoints until stopped")
    server.add_argument("--port", type=int, default=DEFAULT_PORT, help="port on 127.0.0.1 (%(default)s)")
    server.add_argument(
        "--memory-gb",
        type=float,
        help="GiB that all instances together may take (what the machine has, less a reserve)",
    )
    server.add_argument(
        "--instance-memory-gb",
        type=float,
        default=DEFAULT_INSTANCE_MEMORY_GB,
        help="GiB that one instance counts with (%(default)s)",
    )
    server.set_defaults(run=serve)
    ender = verbs.add_parser("stop", help="end the server, and instances that a killed one left running")
    ender.set_defaults(run=stop)
    for verb in (server, ender):
        verb.add_argument(
            "--home",
            type=Path,
            default=Path(os.environ.get("FLEDGE_HOME", ".fledge")),
            help="Fledge's directory; state and logs are in its sagemaker/ (%(default)s)",
        )
    return parser


def _only_server(folder: Path) -> IO[str]:
    """Hold the folder's lock: two servers would start everything twice. The kernel lets go of it on any end."""
    lock = _locked(folder)
    if lock is None:
        raise ServerError(
            f"another local SageMaker runs on {folder}",
            "one server for each folder",
            "use that one, stop it (python -m containers.local stop), or choose another folder with --home",
        )
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _locked(folder: Path) -> IO[str] | None:
    """The folder's lock, held until closed; None while a server holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "server.lock", "a+", encoding="utf-8")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _end_server(folder: Path) -> None:
    """SIGTERM to the server of a folder, and wait for its end.

    Raises:
        ServerError: it does not end.
    """
    asked, deadline = False, time.monotonic() + _SERVER_ENDS_WITHIN_S
    while (lock := _locked(folder)) is None:
        if not asked:
            os.kill(int((folder / "server.lock").read_text(encoding="utf-8")), signal.SIGTERM)
            asked = True
        if time.monotonic() > deadline:
            raise ServerError(
                f"the local SageMaker on {folder} has not ended within {_SERVER_ENDS_WITHIN_S:.0f} s",
                "it to end on SIGTERM",
                "look at its output; SIGKILL is safe, the next start adopts its instances",
            )
        time.sleep(0.1)
    lock.close()


def _client(service: str) -> Any:
    config = Config(connect_timeout=3, read_timeout=10, retries={"mode": "standard", "max_attempts": 2})
    return boto3.client(service, region_name=region(), config=config)


if __name__ == "__main__":
    sys.exit(main())
