"""Verbs of `python -m drafter` as processes: their lines in the flow's log, their result as a record.

A process of its own keeps torch out of the orchestrator and makes laptop, worker and training job run
the same command. The guard ends it when this process ends in any way, SIGKILL included.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import drafter.process_guard
from drafter.config import Settings
from drafter.errors import LOST_RANK, FledgeError
from drafter.files import digest_of, write_text_atomically
from drafter.records import Record
from tasks.logs import flow_logger
from tasks.settings import Places

RecordType = TypeVar("RecordType", bound=Record)

EXIT_USER_ERROR = 1
KEPT_LINES = 30
# The guard gives a verb `GRACE_S` to end; a little more for the guard itself.
STOP_TIMEOUT_S = drafter.process_guard.GRACE_S + 5

_ERROR = re.compile(
    r"^python -m drafter \w+: (?P<given>.*?)\n  expected: (?P<expected>.*?)\n  what to do: (?P<remedy>[^\n]*)",
    re.DOTALL | re.MULTILINE,
)


class JobError(FledgeError):
    """A verb refused its input. The text is the verb's own."""


class JobCrashed(FledgeError):
    """A verb ended without saying why: killed, out of memory, or a bug. Running it again may help."""


def run_verb(verb: str, settings: Settings, record: type[RecordType]) -> RecordType:
    """Run `python -m drafter VERB` to its end and return its record.

    Two runs of the same output wait for each other; the second finds the work done.

    Raises:
        JobError: the verb named a problem.
        JobCrashed: the verb was killed or failed without naming a problem.
    """
    return record.model_validate(run_verb_json(verb, settings))


def run_verb_json(verb: str, settings: Settings) -> Any:
    """As `run_verb`, for verbs whose result is plain JSON."""
    places = Places()
    settings_file = _write_settings(places, verb, settings)
    output = getattr(settings, "output", None)
    lock = Path(output) if output is not None else settings_file
    command = [str(places.python), "-m", "drafter", verb, "--settings", str(settings_file), "--json"]
    with locked(lock) as lock_file:
        return _run(verb, command, lock_file)


def _run(verb: str, command: list[str], lock_file: IO[str]) -> Any:
    logger = flow_logger()
    guard = subprocess.Popen(
        [sys.executable, drafter.process_guard.__file__, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C reaches the flow alone, which then ends the guard
        pass_fds=(lock_file.fileno(),),  # the lock outlives this process as long as the guard works
    )
    assert guard.stdout is not None
    assert guard.stderr is not None
    errors: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_follow, args=(guard.stderr, verb, errors, logger), daemon=True)
    reader.start()
    try:
        lines = deque((line.rstrip("\n") for line in guard.stdout), maxlen=KEPT_LINES)
        exit_code = guard.wait()
    except BaseException:
        _stop(guard)
        raise
    finally:
        reader.join(timeout=STOP_TIMEOUT_S)
    return _result(verb, exit_code, lines, "\n".join(errors))


def _follow(pipe: IO[str], verb: str, kept: deque[str], logger: Any) -> None:
    for line in pipe:
        line = line.rstrip()
        if line:
            kept.append(line)
            logger.info("%s: %s", verb, line)


def _stop(guard: subprocess.Popen[str]) -> None:
    """End the verb and everything it started."""
    guard.terminate()
    try:
        guard.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _result(verb: str, exit_code: int, lines: deque[str], errors: str) -> Any:
    said = list(_ERROR.finditer(errors))
    # A rank that has lost another one does not know why: that one was killed, or said it itself.
    error = next((one for one in said if LOST_RANK not in one["given"]), None)
    if not said and exit_code in (0, EXIT_USER_ERROR) and lines:
        try:
            return json.loads(lines[-1])
        except ValueError:
            pass
    if exit_code == EXIT_USER_ERROR and error is not None:
        raise JobError(error["given"], error["expected"], error["remedy"].strip())
    raise JobCrashed(
        f"`python -m drafter {verb}` ended with exit code {exit_code}; its last lines:\n{errors or '(none)'}",
        "a result as JSON on its last line, or an error that says what to do",
        "run the flow again: it continues where this stopped; if it stops at the same place, report the lines",
    )


def _write_settings(places: Places, verb: str, settings: Settings) -> Path:
    text = settings.model_dump_json(indent=2)
    path = places.home / "jobs" / f"{verb}-{digest_of(text)}.json"
    write_text_atomically(path, text)
    return path


@contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """Hold the lock file beside `path`; released when every process that inherited it has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            flow_logger().info("waiting for another run that works on %s", path.name)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
