"""Waiting for what must happen, for as long as a busy machine with cold disks may need.

How long is never what a test is about: who waits here fails late, or at once when a process has ended.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0
PATIENCE_MS = 1000 * PATIENCE_S  # as Playwright takes it


def wait_until(
    condition: Callable[[], Any],
    process: subprocess.Popen[Any] | None = None,
    timeout_s: float = PATIENCE_S,
    interval_s: float = 0.05,
    told: Callable[[], object] = lambda: "",
) -> None:
    """Poll until something holds.

    Args:
        condition: what has to hold.
        process: who makes it hold; when it has ended before, nobody will.
        told: what to say about the state of things when it does not happen.

    Raises:
        AssertionError: it did not happen in time, or the process ended.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            stderr = process.stderr.read() if process.stderr else b""
            raise AssertionError(f"the process ended with {process.returncode}: {stderr!r} {told()}")
        if time.monotonic() > deadline:
            if process is not None:
                process.kill()
            raise AssertionError(f"did not happen in {timeout_s:.0f} s {told()}")
        time.sleep(interval_s)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
