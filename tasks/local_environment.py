"""What processes are told: Prefect, MLflow, and the cloud of `fledge up` or AWS.

Between SageMaker on this machine and in AWS the only difference is in these variables: boto3 reads the
addresses, and no call knows which one it is speaking to.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from drafter.errors import ServerError
from drafter.records import Record
from tasks.settings import Places

HOST = "127.0.0.1"
LOCAL_ROLE = "arn:aws:iam::123456789012:role/fledge-local"
# Answered by moto's server; SageMaker and its runtime are ours (containers/local).
_SERVED_BY_MOTO = ("S3", "CLOUDWATCH", "APPLICATION_AUTO_SCALING", "STS", "IAM")
# Somebody's own AWS account must not be mixed with the local one.
_NAMES_OF_AN_ACCOUNT = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class Ports:
    """Where each service of `fledge up` listens, on 127.0.0.1.

    Args:
        aws: moto's server, which answers for S3, CloudWatch, Application Auto Scaling, STS and IAM.
        sagemaker: SageMaker on this machine.
    """

    prefect: int
    mlflow: int
    pages: int
    aws: int
    sagemaker: int


class RunningServices(Record):
    """`HOME/services.json`: what `fledge up` started, for verbs in other terminals."""

    pid: int
    started_at: datetime
    cloud: bool = Field(description="False: up was told to leave endpoints to AWS (FLEDGE_CLOUD=aws).")
    ports: Ports
    environment: dict[str, str] = Field(description="What a process needs to speak to these services.")


def set_environment_defaults(places: Places) -> None:
    """Apply `environment_defaults` to this process, before Prefect is imported: it reads them once."""
    (places.home / "prefect").mkdir(parents=True, exist_ok=True)  # Prefect would not make the folders above
    for name, value in environment_defaults(places).items():
        os.environ.setdefault(name, value)


def environment_defaults(places: Places) -> dict[str, str]:
    """What Prefect, MLflow and Great Expectations are told unless the environment says otherwise."""
    home = places.home.resolve()
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "prefect" / "storage"),
        # Without a server up, Prefect starts one for the run: 9 s when idle, more on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # A stop signal to the process group ends that server too; 5 retries, its default, wait over a minute.
        "PREFECT_CLIENT_MAX_RETRIES": "2",
        # A crash of the server must not leak a concurrency slot.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # three files, in the middle of a log
        "GX_ANALYTICS_ENABLED": "false",
        # Seven idle consumers of jobs that nobody submits: 1.4 GB.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # Objects above 1 MB wait in files, not in memory, for whoever asks moto for them.
        "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**20),
    }


def service_environment(places: Places, ports: Ports) -> dict[str, str]:
    """What servers, worker and the flows that it starts read."""
    given = dict(os.environ)
    ours = {
        **pipeline_environment(places, ports),
        "FLEDGE_HOME": str(places.home.resolve()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    if has_local_cloud(places):
        ours |= cloud_environment(places, ports)
        for name in _NAMES_OF_AN_ACCOUNT:
            given.pop(name, None)
    return {**environment_defaults(places), **given, **ours}


def has_local_cloud(places: Places) -> bool:
    """Whether `fledge up` brings SageMaker, S3 and CloudWatch along."""
    return places.cloud != "aws"


def pipeline_environment(places: Places, ports: Ports) -> dict[str, str]:
    """Addresses of Prefect, of MLflow's pages and of the reports; loopback is never behind a proxy."""
    prefect = f"http://{HOST}:{ports.prefect}/api"
    direct = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), HOST)))
    return {
        "PREFECT_API_URL": prefect,
        "PREFECT_SERVER_UI_API_URL": prefect,  # else a page on another port calls 4200
        "FLEDGE_PAGES_URL": f"http://{HOST}:{ports.pages}",
        "FLEDGE_MLFLOW_UI_URL": f"http://{HOST}:{ports.mlflow}",
        "FLEDGE_APPROVERS": ",".join(places.approvers or (_local_user(),)),
        "no_proxy": direct,
        "NO_PROXY": direct,
    }


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return str(os.getuid())


def cloud_environment(places: Places, ports: Ports) -> dict[str, str]:
    """What turns boto3 to SageMaker, S3 and CloudWatch on this machine."""
    sagemaker, moto = f"http://{HOST}:{ports.sagemaker}", f"http://{HOST}:{ports.aws}"
    return {
        "AWS_ENDPOINT_URL_SAGEMAKER": sagemaker,
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": sagemaker,
        **{f"AWS_ENDPOINT_URL_{service}": moto for service in _SERVED_BY_MOTO},
        "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": "fledge-local",
        "AWS_SECRET_ACCESS_KEY": "fledge-local",
        "AWS_REGION": places.region,
        "AWS_DEFAULT_REGION": places.region,
        "FLEDGE_BUCKET": places.bucket,
        "FLEDGE_EXECUTION_ROLE_ARN": LOCAL_ROLE,
    }


def use_services(say: bool = True) -> Places:
    """Turn this process to what `fledge up` runs on this home, if it runs. Before boto3 and Prefect are imported.

    Args:
        say: tell on stderr which cloud the verb speaks to.

    Returns:
        The places as they are then.

    Raises:
        ServerError: FLEDGE_CLOUD=local, and nothing runs on this home.
    """
    places = Places()
    services = find_services(places)
    if services is None and places.cloud == "local":
        raise ServerError(
            f"no `fledge up` runs on {places.home}",
            "one, since FLEDGE_CLOUD is local",
            "start `fledge up` in another terminal, or set FLEDGE_CLOUD=aws for AWS",
        )
    local = services is not None and services.cloud and places.cloud != "aws"
    if services is not None:
        _apply(services, with_cloud=local)
    if say:
        print("on this machine (fledge up)" if local else f"on AWS, {places.region}", file=sys.stderr)
    return Places()


def _apply(services: RunningServices, with_cloud: bool) -> None:
    """What the services were told wins over this terminal's environment: they decide together or not at all."""
    of_the_cloud = cloud_environment(Places(), services.ports).keys()
    for name, value in services.environment.items():
        if with_cloud or name not in of_the_cloud:
            os.environ[name] = value
    for name in _NAMES_OF_AN_ACCOUNT if with_cloud else ():
        os.environ.pop(name, None)


def find_services(places: Places) -> RunningServices | None:
    """What `fledge up` runs on this home; None when it does not run, however it ended."""
    if not places.services_file.exists() or not _is_held(places):
        return None
    return RunningServices.load(places.services_file)


@contextmanager
def announced(places: Places, ports: Ports) -> Iterator[None]:
    """Write services.json for as long as the block runs."""
    environment = pipeline_environment(places, ports)
    if has_local_cloud(places):
        environment |= cloud_environment(places, ports)
    RunningServices(
        pid=os.getpid(),
        started_at=datetime.now(UTC),
        cloud=has_local_cloud(places),
        ports=ports,
        environment=environment,
    ).save(places.services_file)
    try:
        yield
    finally:
        places.services_file.unlink(missing_ok=True)


@contextmanager
def only_one(places: Places) -> Iterator[None]:
    """Hold the home for one `fledge up`. The kernel lets go of it when the process ends, SIGKILL included.

    Raises:
        ServerError: another one holds it.
    """
    places.home.mkdir(parents=True, exist_ok=True)
    with open(_lock_file(places), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(
                f"`fledge up` already runs on {places.home}",
                "one at a time for each home",
                "use that one, stop it with Ctrl-C, or set FLEDGE_HOME to another directory",
            ) from None
        yield


def _is_held(places: Places) -> bool:
    """Whether a living process holds the home; a pid in a file could be anybody's by now."""
    try:
        with open(_lock_file(places)) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _lock_file(places: Places) -> Path:
    return places.home / "services.lock"
