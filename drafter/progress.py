"""How far a long stage is: a bar on a terminal, a line every ten seconds elsewhere (logs, Prefect, CI)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LINE_INTERVAL_S = 10.0


class Progress(Protocol):
    """What a stage tells its reader."""

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""

    def note(self, text: str) -> None:
        """Replace the short remark behind the numbers (`loss 2.31`)."""


class _Lines:
    """Plain lines on stderr, at most one per interval, and one at the end."""

    def __init__(self, total: int, description: str, unit: str) -> None:
        self.total, self.description, self.unit = total, description, unit
        self.done, self.remark = 0, ""
        self.started_at = self.printed_at = time.monotonic()

    def advance(self, count: int = 1) -> None:
        self.done += count
        if time.monotonic() - self.printed_at >= LINE_INTERVAL_S:
            self.print_line()

    def note(self, text: str) -> None:
        self.remark = text

    def print_line(self) -> None:
        self.printed_at = time.monotonic()
        elapsed_s = self.printed_at - self.started_at
        rate = self.done / max(elapsed_s, 1e-9)
        done = (
            f"{self.done}/{self.total} {self.unit} ({self.done / self.total:.0%})"
            if self.total
            else f"{self.done} {self.unit}"
        )
        remark = f" {self.remark}" if self.remark else ""
        print(
            f"{self.description}: {done}, {rate:.1f} {self.unit}/s, {elapsed_s:.0f} s{remark}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def track(total: int, description: str, unit: str) -> Iterator[Progress]:
    """Show the progress of `total` units of work until the block ends.

    Args:
        total: units of the whole; 0 when unknown.
        description: what is being done ("extracting").
        unit: what is counted, in the plural ("conversations").
    """
    if sys.stderr.isatty():
        with _bar(total, description, unit) as bar:
            yield bar
        return
    lines = _Lines(total, description, unit)
    try:
        yield lines
    finally:
        lines.print_line()


@contextmanager
def _bar(total: int, description: str, unit: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(description, total=total or None, remark="")

        class Bar:
            def advance(self, count: int = 1) -> None:
                display.advance(task, count)

            def note(self, text: str) -> None:
                display.update(task, remark=text)

        yield Bar()
