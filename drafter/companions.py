"""The other ranks of a training on one machine: processes that the first rank starts, and that end with it.

torchrun does this for any number of machines. Its meeting point listens on all of a machine's interfaces, and what
ends a rank it reports in words of its own. Here ranks meet in a file and talk over loopback, and signals, exit codes
and output are those of the one command that was given.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from drafter.config import TrainSettings
from drafter.errors import FledgeError
from drafter.process_guard import end_with_parent

_RANK = "FLEDGE_RANK"
_MEETING = "FLEDGE_RANKS_MEET_IN"
# Until a companion that has nothing left to do has ended.
_PATIENCE_S = 30.0


def own_rank() -> int:
    """This process's rank; 0 unless a first rank started it as its companion."""
    return int(os.environ.get(_RANK, "0"))


@contextmanager
def companions(settings: TrainSettings) -> Iterator[tuple[Path, Callable[[], None]]]:
    """On the first rank, the others run while the block does; on the others there is nothing to start.

    Yields:
        The file in which the ranks meet; and what to call while waiting for the others: it raises FledgeError when
        one of them has ended.
    """
    if own_rank():
        yield Path(os.environ[_MEETING]), lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="fledge-ranks-") as directory:
        meeting = Path(directory) / "meeting"
        (settings_file := Path(directory) / "settings.json").write_text(settings.model_dump_json())
        processes = [_start(rank, settings_file, meeting) for rank in range(1, settings.num_ranks)]
        try:
            yield meeting, partial(_raise_if_ended, processes)
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_S)
        finally:  # what they have learned, the first rank has too
            for process in processes:
                process.kill()
                process.wait()


def _start(rank: int, settings_file: Path, meeting: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "drafter", "train", "--settings", str(settings_file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, _RANK: str(rank), _MEETING: str(meeting)},
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )


def _raise_if_ended(processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(processes, start=1):
        if process.poll() is not None:
            raise FledgeError(
                f"rank {rank} of {len(processes) + 1} ended with exit code {process.returncode} before it began",
                "every rank to join",
                "see above what it said; with num_ranks 1 the training continues in one process",
            )
