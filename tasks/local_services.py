"""Prefect, MLflow, a page server, and SageMaker with S3 and CloudWatch, on this machine's loopback: `fledge up`.

For development: no authentication, one user. They end when the process that started them ends, and so do
the instances of endpoints.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import yaml

from drafter import process_guard
from drafter.errors import ServerError
from tasks.local_environment import (
    HOST,
    Ports,
    announced,
    has_local_cloud,
    only_one,
    service_environment,
)
from tasks.settings import Places

DEPLOYMENTS = Path("prefect.yaml")
# Loopback requests must not take a detour through a proxy that the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# After a SIGKILL of `fledge up` the guards need a moment to end what it had started.
_PORTS_COME_FREE_S = process_guard.GRACE_S + 7
_LEAST_LIFE_S = 20.0
_END_OF_INSTANCES_S = 60
_REGISTRATION_S = 300


@dataclass
class Service:
    """A process that is kept running.

    Args:
        name: what it is called in messages and by its log file.
        command: program and arguments.
        ready_url: answers 200 when the service is ready; None when nothing can be asked.
        comes_back: it continues from what it has on disk, so it is started again when it ends by itself.
    """

    name: str
    command: list[str]
    log: Path
    ready_url: str | None = None
    comes_back: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    started_at: float = field(default=0.0, repr=False)
    environment: dict[str, str] = field(default_factory=dict, repr=False)

    def start(self, environment: dict[str, str]) -> None:
        """Start under a guard that ends it when this process is gone, killed or not."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.environment, self.started_at = environment, time.monotonic()
        guard = [sys.executable, "-I", "-S", process_guard.__file__]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*guard, *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Let the guard end the service, and wait for it."""
        if self.process is None or self.process.stdin is None:
            return
        self.process.stdin.close()
        self.process.wait()

    def keep_running(self) -> None:
        """Start the service again if it ended and can continue.

        Raises:
            ServerError: it ended and cannot, or ends again and again.
        """
        ended = self.process is not None and self.process.poll() is not None
        if ended and self.comes_back and time.monotonic() - self.started_at > _LEAST_LIFE_S:
            print(f"{self.name} ended and is started again; its log is {self.log}", file=sys.stderr)
            self.stop()
            self.start(self.environment)
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-15:]
            raise ServerError(
                f"{self.name} ended with code {self.process.returncode}; its last lines:\n"
                + "\n".join(lines),
                "it to run until fledge up is stopped",
                f"read {self.log}, and fledge doctor",
            )

    def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.ready_url is not None:
            self.raise_if_ended()
            with contextlib.suppress(OSError, urllib.error.URLError), _DIRECT.open(self.ready_url, timeout=2):
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} did not answer {self.ready_url} within {timeout_s:.0f} s",
                    "an answer",
                    f"read {self.log}",
                )
            time.sleep(0.3)


@contextlib.contextmanager
def running_services(places: Places, ports: Ports) -> Iterator[list[Service]]:
    """Start everything, register the deployments, and end everything with the block, endpoints' instances too.

    Raises:
        ServerError: one runs on this home already, a port is taken, or a service did not start.
    """
    with only_one(places):
        _require_free(_ports_used(places, ports), patient=places.services_file.exists())
        (places.home / "prefect").mkdir(parents=True, exist_ok=True)
        environment = service_environment(places, ports)
        services = _services(places, ports)
        try:
            _start_all(services, places, ports, environment)
            with announced(places, ports):
                yield services
        finally:
            for service in reversed(services):
                service.stop()
            if has_local_cloud(places):
                _end_instances(places, environment)


def _start_all(services: list[Service], places: Places, ports: Ports, environment: dict[str, str]) -> None:
    """All but the worker at once; the worker when there is something to ask and something to run."""
    *first, worker = services
    for service in first:
        service.start(environment)
    for service in first:
        service.wait_until_ready()
    if has_local_cloud(places):
        _make_bucket(places, ports)
    _register_deployments(environment, places.home / "logs" / "deploy.log")
    worker.start(environment)


def _services(places: Places, ports: Ports) -> list[Service]:
    prefect = [sys.executable, "-m", "prefect"]
    logs = places.home.resolve() / "logs"
    return [
        Service(
            "Prefect",
            [*prefect, "server", "start", "--host", HOST, "--port", str(ports.prefect)],
            logs / "prefect-server.log",
            f"http://{HOST}:{ports.prefect}/api/health",
        ),
        Service(
            "MLflow", _mlflow(places, ports), logs / "mlflow.log", f"http://{HOST}:{ports.mlflow}/health"
        ),
        Service("pages", _pages(places, ports), logs / "pages.log", f"http://{HOST}:{ports.pages}/"),
        *(_cloud_services(places, ports) if has_local_cloud(places) else ()),
        Service("worker", [*prefect, "worker", "start", "--pool", work_pool()], logs / "prefect-worker.log"),
    ]


def _mlflow(places: Places, ports: Ports) -> list[str]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(ports.mlflow)]
    command += ["--backend-store-uri", places.tracking_uri, "--workers", "1"]
    if places.artifact_location:
        command += ["--default-artifact-root", places.artifact_location]
    return command


def _pages(places: Places, ports: Ports) -> list[str]:
    command = [sys.executable, "-m", "http.server", str(ports.pages), "--bind", HOST]
    return [*command, "--directory", str(places.home.resolve())]


def _cloud_services(places: Places, ports: Ports) -> list[Service]:
    """S3 and CloudWatch by moto, which forgets when it ends; SageMaker by ours, which does not."""
    home = places.home.resolve()
    return [
        Service(
            "moto",
            [sys.executable, "-m", "moto.server", "--host", HOST, "--port", str(ports.aws)],
            home / "logs" / "moto.log",
            f"http://{HOST}:{ports.aws}/moto-api/data.json",
        ),
        Service(
            "SageMaker",
            [sys.executable, "-m", "containers.local", "serve", "--home", str(home), "--port", str(ports.sagemaker)],
            home / "logs" / "sagemaker.log",
            f"http://{HOST}:{ports.sagemaker}/_local/health",
            comes_back=True,
        ),
    ]  # fmt: skip


def _make_bucket(places: Places, ports: Ports) -> None:
    """The bucket that drafters and captures go to, as AWS would have it."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=f"http://{HOST}:{ports.aws}",
        region_name=places.region,
        aws_access_key_id="fledge-local",
        aws_secret_access_key="fledge-local",
        config=Config(proxies={}),
    )
    elsewhere = {"CreateBucketConfiguration": {"LocationConstraint": places.region}}
    client.create_bucket(Bucket=places.bucket, **(elsewhere if places.region != "us-east-1" else {}))


def _end_instances(places: Places, environment: dict[str, str]) -> None:
    """End what SageMaker left running when it was killed rather than stopped."""
    home = str(places.home.resolve())
    command = [sys.executable, "-m", "containers.local", "stop", "--home", home]
    log = places.home / "logs" / "sagemaker.log"
    with open(log, "a", encoding="utf-8") as handle:
        code = _run_within(command, environment, handle, _END_OF_INSTANCES_S)
    if code:
        print(f"instances of endpoints may still run: see {log}", file=sys.stderr)


def work_pool() -> str:
    """Name of the pool that the deployments of prefect.yaml run on."""
    deployments = yaml.safe_load(DEPLOYMENTS.read_text(encoding="utf-8"))["deployments"]
    return str(deployments[0]["work_pool"]["name"])


def _register_deployments(environment: dict[str, str], log: Path) -> None:
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    for command in (
        [*prefect, "work-pool", "create", work_pool(), "--type", "process", "--overwrite"],
        [*prefect, "deploy", "--all"],
    ):
        with open(log, "a", encoding="utf-8") as handle:
            before = handle.tell()
            code = _run_within(command, environment, handle, _REGISTRATION_S)
        if code:
            said = log.read_bytes()[before:].decode(errors="replace").strip()
            raise ServerError(
                f"`{' '.join(command[2:])}` failed:\n{said[-1500:]}",
                f"the deployments of {DEPLOYMENTS} to be registered",
                f"correct {DEPLOYMENTS}; the whole output is in {log}",
            )


def _run_within(command: list[str], environment: dict[str, str], log: TextIO, limit_s: float) -> int:
    """Run to the end, into a log, and return the exit code."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        log.write(f"\nended after {limit_s:.0f} s\n")
        return 124
    return done.returncode


def _ports_used(places: Places, ports: Ports) -> tuple[int, ...]:
    always = (ports.prefect, ports.mlflow, ports.pages)
    return (*always, ports.aws, ports.sagemaker) if has_local_cloud(places) else always


def _require_free(ports: tuple[int, ...], patient: bool) -> None:
    """Raise ServerError when a port is taken; `patient`: first wait for the remains of a killed `fledge up`."""
    deadline = time.monotonic() + (_PORTS_COME_FREE_S if patient else 0)
    while taken := [port for port in ports if not _is_free(port)]:
        if time.monotonic() > deadline:
            raise ServerError(
                f"port {taken[0]} on {HOST} is in use",
                "a free port",
                "stop what listens there, or choose another (fledge up --help)",
            )
        time.sleep(0.3)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
