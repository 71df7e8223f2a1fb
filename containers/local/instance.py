"""One instance: a real vLLM process in a process group of its own that outlives the server that started it.

A record beside it (pid and when that process started) lets a server started later take it over, and lets anybody
end it. The process holds nothing of the server's, so a SIGKILL of the server does not reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import httpx
import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from drafter.config import ServerSettings
from drafter.serving import vllm_environment

PING_TIMEOUT_S = 2.0  # SageMaker's
# From SIGTERM to SIGKILL. A server whose requests were drained has nothing left to save.
END_GRACE_S = 3.0
_POLL_S = 0.1
_NOT_FOR_CONTAINERS = ("AWS_", "FLEDGE_", "MLFLOW_", "PREFECT_", "SM_VLLM_")

State = Literal["starting", "in_service", "unhealthy", "draining", "ended"]


class InstanceRecord(BaseModel):
    """What is needed to find an instance's process again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance_id: str
    pid: int  # also the number of its process group and session
    process_identity: str
    port: int
    log_path: Path
    started_at: datetime
    was_in_service: bool = False


class Instance:
    """A serving process and what the router knows of it. `start` makes one; the constructor takes one over.

    Args:
        record: names the process.
        record_path: where the record is kept.
    """

    def __init__(self, record: InstanceRecord, record_path: Path) -> None:
        self.record = record
        self.record_path = record_path
        self.state: State = "in_service" if record.was_in_service else "starting"
        self.in_flight = 0
        self.failed_pings = 0
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        instance_id: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log_path: Path,
        record_path: Path,
    ) -> Instance:
        """Start the process without waiting for it, its output going to `log_path`.

        Raises:
            OSError: the program cannot be run.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        record_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=record_path.parent,
                env=dict(environment),
                start_new_session=True,
            )
        record = InstanceRecord(
            instance_id=instance_id,
            pid=process.pid,
            process_identity=_process_identity(process.pid) or "",
            port=port,
            log_path=log_path,
            started_at=datetime.now(UTC),
        )
        instance = cls(record, record_path)
        instance._process = process
        try:
            instance._save()
        except OSError:
            instance.end_now()  # nobody would find it again
            raise
        return instance

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"http://127.0.0.1:{self.record.port}"

    def is_alive(self) -> bool:
        """Whether the process that was started still runs: the same one, not another with its number."""
        if self._process is not None:
            return self._process.poll() is None
        identity = _process_identity(self.record.pid)
        return identity is not None and identity == self.record.process_identity

    async def ping(self, client: httpx.AsyncClient) -> bool:
        """Whether the container says that it is healthy: `GET /ping` is 200 within 2 s."""
        try:
            answer = await client.get(f"{self.url}/ping", timeout=PING_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def put_in_service(self) -> None:
        """Requests may come. Remembered, so that whoever takes the process over routes to it at once."""
        self.state, self.failed_pings = "in_service", 0
        if not self.record.was_in_service:
            self.record = self.record.model_copy(update={"was_in_service": True})
            self._save()

    def take_out_of_service(self) -> None:
        """No further requests until it answers a ping again."""
        if self.state == "in_service":
            self.state = "unhealthy"

    async def end(self) -> None:
        """End the process and everything that it started: SIGTERM, 3 s, SIGKILL. Safe to call twice."""
        self.state = "ended"
        await asyncio.to_thread(self.end_now)
        self.record_path.unlink(missing_ok=True)

    def end_now(self) -> None:
        """The blocking part of `end`."""
        for number, wait_s in ((signal.SIGTERM, END_GRACE_S), (signal.SIGKILL, 2.0)):
            if not self.has_processes():
                break
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.record.pid, number)
            deadline = time.monotonic() + wait_s
            while self.has_processes() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if self._process is not None:
            self._process.poll()  # reaps it

    def has_processes(self) -> bool:
        """Whether anything of the process group is left. A killed server leaves its engine behind, for example."""
        if self._process is not None:
            self._process.poll()
        if (leader := _process_identity(self.record.pid)) is not None:
            return (
                leader == self.record.process_identity
            )  # else the number, and the group, is another's by now
        return any(_is_in_group(pid, self.record.pid) for pid in psutil.pids())

    def _save(self) -> None:
        temporary = self.record_path.with_suffix(".partial")
        temporary.write_text(self.record.model_dump_json(indent=1), encoding="utf-8")
        os.replace(temporary, self.record_path)


def read_instances(folder: Path) -> Iterator[Instance]:
    """The instances whose records lie in a folder. A record that cannot be read counts for nothing."""
    for path in sorted(folder.glob("*.json")):
        try:
            record = InstanceRecord.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue
        yield Instance(record, path)


def end_strays(folder: Path, known: Iterable[Instance] = ()) -> int:
    """End processes of instances of a folder that no record names: their server was killed before it wrote one.

    They are known by their working directory, which is that folder.

    Returns:
        How many processes were ended.
    """
    groups = {instance.record.pid for instance in known}
    strays = [pid for pid in psutil.pids() if _works_in(pid, folder) and not _is_in_any(pid, groups)]
    for pid in strays:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(strays)


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return psutil.Process(pid).cwd() == str(folder)
    except (psutil.Error, OSError):
        return False


def _is_in_any(pid: int, groups: set[int]) -> bool:
    return any(_is_in_group(pid, group) for group in groups)


def instance_environment(model_environment: Mapping[str, str], vllm_python: Path) -> dict[str, str]:
    """Environment of an instance's process: this machine's, as vLLM needs it on a CPU, then the Model's own.

    Credentials and addresses of the services around are left out: a container has none of them either. Threads
    that wait do so without burning a core, because a neighbour wants it: a second fleet, or a test.
    """
    base = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_CONTAINERS)}
    base.update(KMP_BLOCKTIME="0", OMP_WAIT_POLICY="PASSIVE")
    base["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment = vllm_environment(ServerSettings(python=vllm_python), base)
    return {**environment, **model_environment}


def _process_identity(pid: int) -> str | None:
    """Something that no other process with this number shares; None when there is none, or only its remains.

    On Linux the boot and the tick that it started at: unlike a time of day these do not move with the clock.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            state, *fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if state in "ZX" else f"{boot}:{fields[18]}"
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _is_in_group(pid: int, group: int) -> bool:
    """Whether a process that still runs is of this process group."""
    try:
        return os.getpgid(pid) == group and _process_identity(pid) is not None
    except (ProcessLookupError, PermissionError):
        return False
