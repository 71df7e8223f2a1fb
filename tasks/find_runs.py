"""A finished run by any of its names, with what it measured and how long each task took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from drafter.records import EvaluationReport
from tasks.run_records import RetrainRecord, load_run
from tasks.settings import Places

if TYPE_CHECKING:
    from prefect.client.schemas.objects import TaskRun

SHORTEST_PREFIX = 6


@dataclass(frozen=True)
class FinishedRun:
    """What a run came to, and the evaluation behind its decision."""

    record: RetrainRecord
    evaluation: EvaluationReport


def find_run(places: Places, run: str | None) -> FinishedRun:
    """A run by Prefect's or MLflow's run id (or its beginning), name, registered version, or directory.

    Raises:
        DataError: no such run has finished here.
    """
    record = load_run(places, _run_id(places, run) if run else None)
    return FinishedRun(record, EvaluationReport.load(Path(record.evaluation) / "evaluation.json"))


def list_runs(places: Places) -> list[RetrainRecord]:
    """All finished runs, newest first."""
    records: list[RetrainRecord] = [RetrainRecord.load(path) for path in places.runs.glob("*.json")]
    return sorted(records, key=lambda record: record.ended_at, reverse=True)


def read_task_runs(flow_run_id: str) -> list[TaskRun]:
    """The tasks of a flow run, in the order in which they started. Asks Prefect's API."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import TaskRunSort

    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
    with get_client(sync_client=True) as client:
        return client.read_task_runs(flow_run_filter=chosen, sort=TaskRunSort.EXPECTED_START_TIME_ASC)


def _run_id(places: Places, run: str) -> str:
    """Prefect's id of the newest run that `run` names otherwise; else `run` itself. A whole name wins."""
    records = list_runs(places)
    for record in records:
        version = record.registry_uri.rpartition("/")[2]
        if run in (record.registry_uri, version) or Path(run).resolve() == Path(record.evaluation).resolve():
            return record.run_id
    for record in records:
        if len(run) >= SHORTEST_PREFIX and record.mlflow_run_id.startswith(run):
            return record.run_id
    return run
