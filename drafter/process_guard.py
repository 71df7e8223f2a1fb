"""Keep a server no longer than the process that asked for it. Run as a script, standard library only.

    python process_guard.py COMMAND [ARGUMENT...]      with a pipe as standard input

The parent holds the other end of that pipe and never writes to it. The kernel closes it when the parent
ends in any way, SIGKILL included; the guard then ends the command's whole process group. (A death signal
set on the command itself would not do: the kernel sends it when the *thread* that forked ends, and it
does not reach the command's own children.)
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 8.0
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child, before exec: it gets this signal should somebody SIGKILL its parent. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False when nothing of it is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_group(command: subprocess.Popen[bytes]) -> None:
    """SIGTERM, up to `GRACE_S` seconds for a clean end, then SIGKILL to whatever is left of the group."""
    if _signal_group(command.pid, signal.SIGTERM):
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            command.poll()  # reaps the leader, which would otherwise count as alive
            if not _signal_group(command.pid, 0):
                break
            time.sleep(_POLL_S)
        _signal_group(command.pid, signal.SIGKILL)
    command.wait()


def main(arguments: list[str]) -> int:
    """Run the command until it ends or standard input closes; return its exit code."""
    stop_asked = False

    def ask_to_stop(number: int, frame: object) -> None:
        nonlocal stop_asked
        stop_asked = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    command = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    while command.poll() is None and not stop_asked:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and os.read(sys.stdin.fileno(), 1) == b"":
            break
    end_group(command)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
