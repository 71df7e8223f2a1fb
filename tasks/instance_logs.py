"""The logs of an endpoint's instances on this machine."""

from __future__ import annotations

from pathlib import Path

from drafter.records import Record
from tasks.endpoint_settings import EndpointError
from tasks.settings import Places

_HEALTH_CHECK = '"GET /ping HTTP'


class InstanceLog(Record):
    """The end of one instance's log."""

    path: str
    lines: tuple[str, ...]


def log_directory(places: Places, endpoint_name: str) -> Path:
    """Where SageMaker of this machine keeps what an endpoint's instances print."""
    return places.home.resolve() / "sagemaker" / "logs" / endpoint_name


def read_logs(places: Places, endpoint_name: str, lines: int) -> list[InstanceLog]:
    """The last lines of each instance, the one that spoke last at the end.

    Raises:
        EndpointError: no instance of that endpoint has run here.
    """
    directory = log_directory(places, endpoint_name)
    files = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise EndpointError(
            f"no log below {directory}",
            "an endpoint whose instances ran on this machine",
            f"see `fledge status`; in AWS: aws logs tail --follow /aws/sagemaker/Endpoints/{endpoint_name}",
        )
    return [InstanceLog(path=str(path), lines=tuple(_last_lines(path, lines))) for path in files]


def _last_lines(path: Path, count: int, block_bytes: int = 1024 * 1024) -> list[str]:
    """The end of a file that may be long, without the health checks that fill it."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - block_bytes))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if _HEALTH_CHECK not in line][-count:]
