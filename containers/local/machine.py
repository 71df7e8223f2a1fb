"""What the instances of the local SageMaker share: folders, ports, memory, and the Python that has vLLM."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import boto3
import psutil
from botocore.config import Config

from containers.local.instance import end_strays, read_instances

HOST = "127.0.0.1"
DEFAULT_INSTANCE_MEMORY_GB = 4.5
# Left to everything else on the machine when nobody says how much instances may take, GiB.
_LEFT_TO_OTHERS_GB = 2.0
_GIB = 2**30
_S3_CONFIG = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "max_attempts": 3})


class InsufficientCapacity(Exception):
    """This machine has no memory left for another instance. The message is SageMaker's, and the numbers."""


class Machine:
    """Hands out memory, ports and folders, and takes them back.

    Args:
        home: folder of the local SageMaker; `fleets/` and `logs/` are made in it.
        memory_gb: memory that all instances together may take, GiB; None: what the machine has, less 2 GiB,
            and never more than is free when an instance starts.
        instance_memory_gb: what one instance is counted with, GiB. One with SmolLM2 and 1 GiB of KV cache
            measured 3.7.
        vllm_python: interpreter of the environment that has vLLM; None reads FLEDGE_VLLM_PYTHON.
    """

    def __init__(
        self,
        home: Path,
        memory_gb: float | None = None,
        instance_memory_gb: float = DEFAULT_INSTANCE_MEMORY_GB,
        vllm_python: Path | None = None,
    ) -> None:
        self.home = home.absolute()
        self.instance_memory_gb = instance_memory_gb
        self._watches_free_memory = memory_gb is None
        self.memory_gb = _total_memory_gb() - _LEFT_TO_OTHERS_GB if memory_gb is None else memory_gb
        self.vllm_python = vllm_python or _python_from_environment()
        self._reserved: set[str] = set()
        self._ports: set[int] = set()
        self._lock = threading.Lock()
        self._s3: Any = None

    @property
    def reserved_gb(self) -> float:
        """Memory counted for the instances that exist, GiB."""
        return len(self._reserved) * self.instance_memory_gb

    def fleet_folder(self, fleet_id: str) -> Path:
        """Where a fleet keeps its downloads and the records of its instances."""
        return self.home / "fleets" / fleet_id

    def log_path(self, endpoint_name: str, config_name: str, instance_id: str) -> Path:
        """Where a person finds what an instance's server said."""
        return self.home / "logs" / endpoint_name / f"{config_name}-{instance_id}.log"

    def reserve(self, instance_id: str) -> None:
        """Count an instance's memory.

        Raises:
            InsufficientCapacity: it does not fit beside the others.
        """
        with self._lock:
            if instance_id in self._reserved:
                return
            needed = self.reserved_gb + self.instance_memory_gb
            if needed > self.memory_gb:
                raise insufficient_capacity(
                    f"{needed:.1f} GiB needed for {len(self._reserved) + 1} instances of "
                    f"{self.instance_memory_gb:.1f}, {self.memory_gb:.1f} GiB allowed"
                )
            if self._watches_free_memory and (free := _free_memory_gb()) < self.instance_memory_gb:
                raise insufficient_capacity(f"{self.instance_memory_gb:.1f} GiB needed, {free:.1f} GiB free")
            self._reserved.add(instance_id)

    def take_over(self, instance_id: str, port: int) -> None:
        """Count an instance that runs already; it has its memory, so nothing can be refused."""
        with self._lock:
            self._reserved.add(instance_id)
            self._ports.add(port)

    def release(self, instance_id: str, port: int | None) -> None:
        """Give an instance's memory and port back. Safe to call twice."""
        with self._lock:
            self._reserved.discard(instance_id)
            if port is not None:
                self._ports.discard(port)

    def free_port(self) -> int:
        """A port that nobody listens on and no other instance was given."""
        with self._lock:
            while True:
                with socket.socket() as probe:
                    probe.bind((HOST, 0))
                    port = int(probe.getsockname()[1])
                if port not in self._ports:
                    self._ports.add(port)
                    return port

    @property
    def s3(self) -> Any:
        """S3 client, by the environment (AWS_ENDPOINT_URL_S3); made when first needed."""
        with self._lock:
            if self._s3 is None:
                self._s3 = boto3.client("s3", config=_S3_CONFIG)
            return self._s3


def end_instances(home: Path) -> int:
    """End every instance process that the files of a local SageMaker name, its server running or not.

    Returns:
        How many instances still had a process.
    """
    ended = 0
    for folder in sorted(home.absolute().glob("fleets/*/instances")):
        for instance in read_instances(folder):
            ended += instance.has_processes()
            instance.end_now()
            instance.record_path.unlink(missing_ok=True)
        ended += end_strays(folder)
    return ended


def insufficient_capacity(detail: str) -> InsufficientCapacity:
    """SageMaker's words, and what is known here."""
    return InsufficientCapacity(
        "Unable to provision requested ML compute capacity due to InsufficientInstanceCapacity error. Please retry "
        f"using a different ML instance type or after some time. (On this machine: {detail}.)"
    )


def _python_from_environment() -> Path:
    return Path(os.environ.get("FLEDGE_VLLM_PYTHON") or ".venv-vllm/bin/python").absolute()


def _total_memory_gb() -> float:
    return min(psutil.virtual_memory().total / _GIB, _control_group_limit_gb())


def _free_memory_gb() -> float:
    return float(psutil.virtual_memory().available / _GIB)


def _control_group_limit_gb() -> float:
    """What a container's control group allows, GiB; infinite where there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text) / _GIB
    return float("inf")
