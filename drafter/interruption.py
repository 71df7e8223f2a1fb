"""Signals that ask a long stage to stop, held back until it stands at a point where it can go on later."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignals:
    """While the context lasts, SIGTERM and Ctrl-C are remembered instead of ending the process.

    A second Ctrl-C does not wait. Outside the main thread, where Python allows no handlers, nothing is
    ever asked.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop(self) -> None:
        """Do now what was asked for.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM, with the exit code that shells expect (143).
        """
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self.asked == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number)
