"""The overhead benchmark: whose time is whose. On a real run it is tested with the flow's own tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import TaskRun

from benchmarks.pipeline_overhead import EXPECTATIONS, MLFLOW, PREFECT, WORK, divide
from drafter.errors import DataError

BEGAN_AT = datetime(2026, 1, 1, tzinfo=UTC)


def task(function: str, start_s: float, end_s: float | None) -> TaskRun:
    at = [None if s is None else BEGAN_AT + timedelta(seconds=s) for s in (start_s, end_s)]
    return TaskRun(
        flow_run_id=uuid4(), task_key=f"{function}-0a1b2c", dynamic_key="0", start_time=at[0], end_time=at[1]
    )


def test_each_second_has_one_owner() -> None:
    tasks = [
        task("prepare_dataset", 1, 9),
        task("open_run", 9.5, 11),
        task("validate_data", 11, 14),
        task("train_drafter", 14, 64),
        task("register_drafter", 65, 66),
    ]
    assert divide(BEGAN_AT, tasks) == pytest.approx({WORK: 58, EXPECTATIONS: 3, MLFLOW: 2.5, PREFECT: 2.5})


def test_a_task_nobody_owns_is_prefects() -> None:
    assert divide(BEGAN_AT, [task("something_new", 0, 2)])[PREFECT] == 2


def test_a_run_that_has_not_ended_is_refused() -> None:
    with pytest.raises(DataError, match="has no end"):
        divide(BEGAN_AT, [task("train_drafter", 0, None)])
