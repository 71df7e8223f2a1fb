"""A vLLM server on this machine for as long as a `with` block lasts. No torch here.

    with VllmServer(target, ServerSettings(), log_path=Path("server.log")) as server:
        httpx.post(f"{server.url}/v1/completions", ...)

The server lives in another Python environment (its web stack and Prefect's exclude each other), in its own
process group, and ends when the block ends, the process is killed, or the machine loses interest in it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from drafter.config import ServerSettings
from drafter.errors import ServerError
from drafter.machine import openmp_library
from drafter.process_guard import GRACE_S
from drafter.records import BatchSizeSchedule

logger = logging.getLogger(__name__)

LOG_LINES_IN_ERROR = 30
_HOST = "127.0.0.1"
_POLL_S = 0.25
_TELL_EVERY_S = 15.0
_FEW_CORES = 8
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")

# Loopback requests must not take a detour through a proxy that the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def speculative_config(
    model: str,
    num_speculative_tokens: int,
    kind: Literal["peagle", "eagle3"] = "peagle",
    schedule: BatchSizeSchedule = (),
) -> dict[str, Any]:
    """vLLM's speculative config for an exported drafter.

    `peagle` guesses all K tokens in one forward pass of the drafter, `eagle3` one after the other.
    Both run the same checkpoint format (vLLM calls both "eagle3").

    Args:
        model: the drafter's directory, as the server sees it.
        schedule: K by batch size; empty: always K.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}; speculation needs at least 1")
    config: dict[str, Any] = {
        "model": model,
        "method": "eagle3",
        "num_speculative_tokens": num_speculative_tokens,
    }
    if kind == "peagle":
        config["parallel_drafting"] = True
    if schedule:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return config


def speculative_arguments(
    drafter: Path,
    num_speculative_tokens: int,
    kind: Literal["peagle", "eagle3"] = "peagle",
    schedule: BatchSizeSchedule = (),
) -> tuple[str, ...]:
    """Command-line arguments that make the server draft with an exported drafter on this machine."""
    config = speculative_config(str(drafter.absolute()), num_speculative_tokens, kind, schedule)
    return ("--speculative-config", json.dumps(config))


def last_lines(path: Path, count: int = LOG_LINES_IN_ERROR) -> str:
    """The end of a log, for an error message; empty when there is no log."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


@dataclass(frozen=True)
class Share:
    """What of this machine a server may compute on: it is number `index` of `count` that run at the same time."""

    index: int = 0
    count: int = 1

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What keeps such servers out of each other's way; nothing for a single one.

        On GPUs each gets one of its own, in order. On a CPU each has its number of threads and the system finds
        them cores: bound to cores, they would wait for whatever else runs on just those.

        Raises:
            ServerError: fewer GPUs than servers.
        """
        if self.count == 1:
            return {}
        gpus = _visible_gpus(environment)
        if gpus and len(gpus) < self.count:
            raise ServerError(
                f"{self.count} servers side by side, and {len(gpus)} GPU(s)",
                "a GPU for each server",
                f"set num_servers to at most {len(gpus)}",
            )
        if gpus:
            return {_VISIBLE_GPUS: gpus[self.index]}
        num_threads = max(1, len(os.sched_getaffinity(0)) // self.count)
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads)}


def _visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Numbers or names of the NVIDIA GPUs that a process may use."""
    if _VISIBLE_GPUS in environment:
        return [name for name in environment[_VISIBLE_GPUS].split(",") if name]
    return [str(number) for number in range(len(list(_NVIDIA_GPUS.glob("*"))))]


def vllm_environment(
    settings: ServerSettings, base: Mapping[str, str] | None = None, share: Share | None = None
) -> dict[str, str]:
    """Environment variables for any process of the vLLM environment: offline, silent to outsiders, fast on CPU.

    Args:
        base: what to start from; None takes this process's environment.
        share: None: the whole machine.

    Raises:
        ServerError: the machine cannot be shared like that.
    """
    environment = dict(os.environ if base is None else base)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"):
        environment.pop(name, None)  # they belong to our environment, not to vLLM's
    environment.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        PYTHONSAFEPATH="1",  # `-m` must not find our own packages in the working directory
        PYTHONUNBUFFERED="1",
        VLLM_CPU_KVCACHE_SPACE=str(math.ceil(settings.kv_cache_gb)),  # vLLM reads whole GiB only
    )
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.update((share or Share()).variables(environment))
    if (cores := _cores_to_compute_on()) is not None:
        binding = environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        if binding == cores:
            environment["OMP_NUM_THREADS"] = str(cores.count(",") + 1)
        if binding in (cores, "nobind"):
            # One worker on all cores has no cores of its own to be bound to: see fledge_vllm/quick_start.py.
            environment["FLEDGE_VLLM_FORK"] = "1"
            environment.setdefault("KMP_BLOCKTIME", "5")  # ms; vLLM's own value
    for name in [name for name in environment if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
        environment.pop(name)  # everything these processes talk to is on this machine
    preload = [str(path) for path in _preloads(settings.python)]
    if preload and "LD_PRELOAD" not in environment:
        environment["LD_PRELOAD"] = ":".join(preload)
    return environment


def _cores_to_compute_on() -> str | None:
    """All cores, on a machine with few: vLLM leaves one to its scheduler, which costs a third on two cores.

    Measured on two idle cores, 96 requests at once: 624 tokens/s with both, 381 with vLLM's own choice. It
    works the other way when other programs keep the cores busy (c=1: 16 against 30 tokens/s), because the
    threads wait for each other; set VLLM_CPU_OMP_THREADS_BIND=auto there.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores)) if len(cores) <= _FEW_CORES else None


def _preloads(python: Path) -> Iterator[Path]:
    """Libraries that vLLM asks for on CPU: tcmalloc where present, and Intel's OpenMP from its own environment."""
    prefix = python.absolute().parent.parent
    places = [*prefix.glob("lib/python3*/site-packages/vllm/libs"), Path("/usr/lib/x86_64-linux-gnu")]
    tcmalloc = [path for place in places for path in sorted(place.glob("libtcmalloc_minimal*.so*"))]
    yield from tcmalloc[:1]
    if (openmp := openmp_library(prefix)) is not None:
        yield openmp


def require_vllm_environment(settings: ServerSettings) -> Path:
    """Absolute path of the interpreter that has vLLM.

    Raises:
        ServerError: there is no such interpreter, or vLLM is not installed beside it.
    """
    python = (
        settings.python.absolute()
    )  # not resolved: a venv's python is a link, and the link is what counts
    remedy = "run `make setup`, or set server.python to the interpreter of an environment that has vLLM"
    if not os.access(python, os.X_OK):
        raise ServerError(f"no Python interpreter at {python}", "the vLLM environment's interpreter", remedy)
    prefix = python.parent.parent
    is_virtual = (prefix / "pyvenv.cfg").exists()
    if is_virtual and not list(prefix.glob("lib*/python3*/site-packages/vllm/__init__.py")):
        raise ServerError(f"the environment {prefix} has no vLLM", "vllm or vllm-cpu installed there", remedy)
    return python


def _require_compiler() -> None:
    """See that vLLM finds what it compiles with; on GPUs it brings its own.

    Raises:
        ServerError: there is no C++ compiler.
    """
    wanted = os.environ.get("CXX") or "g++"
    if not _visible_gpus(os.environ) and shutil.which(wanted) is None:
        raise ServerError(
            f"no C++ compiler: {wanted} is not on PATH",
            "one, because server.compile is set",
            "install g++, set CXX to another compiler, or leave server.compile off",
        )


def _choose_port(wanted: int | None) -> int:
    """The port asked for, if it is free, or any free one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, wanted or 0))
        except OSError as error:
            raise ServerError(
                f"port {wanted} on {_HOST} is in use ({error.strerror})",
                "a free port for the vLLM server",
                "stop the process that listens there, or leave server.port empty to take any free port",
            ) from None
        return int(probe.getsockname()[1])


class VllmServer:
    """Starts vLLM's OpenAI-compatible server on entering, ends its whole process group on leaving.

    Args:
        target: directory of the model that answers.
        settings: how to start it.
        log_path: file that takes the server's output; replaced when it exists.
        extra_args: further command-line arguments of vLLM, e.g. from `speculative_arguments`.
        served_names: names the model answers to, the first one being what answers carry; default "target".
        share: with other servers beside it, its share of the machine.
    """

    def __init__(
        self,
        target: Path,
        settings: ServerSettings,
        log_path: Path,
        extra_args: Sequence[str] = (),
        served_names: Sequence[str] = (),
        share: Share | None = None,
    ) -> None:
        self.target = target.absolute()
        self.settings = settings
        self.log_path = log_path.absolute()
        self.extra_args = tuple(extra_args)
        self.served_names = tuple(served_names) or ("target",)
        self.share = share
        self.start_s = 0.0
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash and without `/v1`."""
        return f"http://{_HOST}:{self.port}"

    @property
    def model(self) -> str:
        """Name to ask for in a request."""
        return self.served_names[0]

    def command(self, python: Path) -> tuple[str, ...]:
        """The command line, without the guard."""
        settings = self.settings
        arguments = [
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.target),
            "--served-model-name", *self.served_names,
            "--host", _HOST,
            "--port", str(self.port),
            "--dtype", settings.dtype,
            "--max-num-seqs", str(settings.max_num_seqs),
            # Sampling parameters come from the request alone, not from the model's generation_config.json.
            "--generation-config", "vllm",
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if not settings.compile:
            arguments.append("--enforce-eager")
        if settings.max_model_len_tokens is not None:
            arguments += ["--max-model-len", str(settings.max_model_len_tokens)]
        return (*arguments, *self.extra_args)

    def start(self) -> Self:
        """Start without waiting; `wait_until_ready` is the other half. For overlapping a start with other work.

        Raises:
            ServerError: no vLLM environment, no compiler where one is needed, the port is in use, or the machine
                cannot be shared like that.
        """
        assert self._process is None, "already started"
        python = require_vllm_environment(self.settings)
        if self.settings.compile:
            _require_compiler()
        environment = vllm_environment(self.settings, share=self.share)
        self.port = _choose_port(self.settings.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-I", "-S", str(Path(__file__).with_name("process_guard.py"))]
        self._started = time.monotonic()
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                [*guard, *self.command(python)],
                stdin=subprocess.PIPE,  # held open as long as we live, see process_guard.py
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log_path.parent,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is ours to handle, not the server's
            )
        logger.info("starting vLLM on port %d, log in %s", self.port, self.log_path)
        return self

    def wait_until_ready(self) -> Self:
        """Wait until the server answers /health.

        Raises:
            ServerError: it died, or took longer than `start_timeout_s`; it is stopped then.
        """
        told_at = self._started
        try:
            while not self._answers_health():
                self.raise_if_dead()
                if time.monotonic() - told_at > _TELL_EVERY_S:
                    told_at = time.monotonic()
                    logger.info("vLLM is still starting (%.0f s)", told_at - self._started)
                if time.monotonic() - self._started > self.settings.start_timeout_s:
                    raise ServerError(
                        f"vLLM did not answer within {self.settings.start_timeout_s:.0f} s; the end of "
                        f"{self.log_path}:\n{last_lines(self.log_path)}",
                        "a server that is ready in time (20-30 s for a small model on an idle machine)",
                        "raise server.start_timeout_s, or free the machine's cores and memory",
                    )
                time.sleep(_POLL_S)
        except BaseException:  # Ctrl-C too: nobody else would stop it
            self.stop()
            raise
        self.start_s = time.monotonic() - self._started
        logger.info("vLLM is ready after %.0f s", self.start_s)
        return self

    def _answers_health(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def raise_if_dead(self) -> None:
        """Turn a dead server into an error that shows the end of its log.

        Raises:
            ServerError: the server's process has ended.
        """
        if self.alive():
            return
        code = self._process.returncode if self._process is not None else None
        raise ServerError(
            f"the vLLM server has ended (exit code {code}); the end of {self.log_path}:\n{last_lines(self.log_path)}",
            "a server that runs until it is stopped",
            "read the log above; out of memory (code 137) calls for a smaller server.kv_cache_gb or max_num_seqs",
        )

    def stop(self) -> None:
        """End the server and its children. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=GRACE_S + 10)
        except subprocess.TimeoutExpired:  # the guard is stuck; its child has a death signal set
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start().wait_until_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
