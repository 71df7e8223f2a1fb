"""The log of the flow run, or an ordinary one where no flow runs; user errors without tracebacks."""

from __future__ import annotations

import logging
from typing import Any

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from drafter.errors import FledgeError

_PREFECT_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


def flow_logger() -> Any:
    """Prefect's logger of the current run; outside of one, the module's own."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("fledge")


class _WithoutTraceback(logging.Filter):
    """An error that says what to do needs no stack: the text alone reaches the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FledgeError):
            record.msg, record.args = "%s", (str(error),)
            record.exc_info = record.exc_text = None
        return True


def quiet_user_errors() -> None:
    """Make Prefect log a FledgeError as its text. Safe to call again."""
    for name in _PREFECT_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _WithoutTraceback) for known in logger.filters):
            logger.addFilter(_WithoutTraceback())
