"""An error that says what to do is logged as its text."""

from __future__ import annotations

import logging
import sys

from drafter.errors import DataError
from tasks.logs import quiet_user_errors


def logged(error: Exception) -> logging.LogRecord:
    """The record of an error as Prefect's engine logs it, after the logger's filters."""
    quiet_user_errors()
    try:
        raise error
    except Exception:
        record = logging.LogRecord(
            "prefect.task_runs", logging.ERROR, __file__, 1, "failed: %r", (error,), sys.exc_info()
        )
    assert logging.getLogger("prefect.task_runs").filter(record)
    return record


def test_a_user_error_is_logged_without_traceback() -> None:
    record = logged(DataError("line 3", "JSON", "correct it"))

    assert record.getMessage() == "line 3\n  expected: JSON\n  what to do: correct it"
    assert record.exc_info is None


def test_a_bug_keeps_its_traceback() -> None:
    assert logged(KeyError("bug")).exc_info is not None
