"""One record per flow run under home/runs: what it made and decided, for `fledge report` and the next reader."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pydantic import Field

from drafter.errors import DataError
from drafter.records import Record, ReleaseDecision
from tasks.settings import Places


class RetrainRecord(Record):
    """What one run of `retrain-drafter` came to."""

    run_id: str = Field(description="Prefect's id of the flow run.")
    run_name: str
    started_at: datetime
    ended_at: datetime
    fingerprint: str = Field(description="Of data, target and settings.")
    trained: bool = Field(description="False: a version of the same fingerprint was found.")
    decision: ReleaseDecision
    registry_uri: str = Field(description="`models:/NAME/VERSION` in MLflow.")
    mlflow_run_id: str
    drafter: str = Field(description="Directory that vLLM loads.")
    evaluation: str = Field(description="Directory of evaluation.json.")
    report: str = Field(description="The HTML page.")
    validation_page: str = Field(description="Great Expectations' HTML page.")


def save_run(places: Places, record: RetrainRecord) -> Path:
    """Write the record of a finished run."""
    path = places.runs / f"{record.run_id}.json"
    record.save(path)
    return path


def load_run(places: Places, run: str | None = None) -> RetrainRecord:
    """The record of a run by id, id prefix or name; None: the one that ended last.

    Raises:
        DataError: no such run has finished here.
    """
    records: list[RetrainRecord] = [RetrainRecord.load(path) for path in places.runs.glob("*.json")]
    chosen = [
        record for record in records if run is None or record.run_name == run or record.run_id.startswith(run)
    ]
    if not chosen:
        known = ", ".join(sorted(record.run_name for record in records)) or "none"
        raise DataError(
            f"run {run or '(the last)'} in {places.runs}",
            f"the id or name of a finished run; there are: {known}",
            "start one with `fledge retrain`, or set FLEDGE_HOME to where it ran",
        )
    return max(chosen, key=lambda record: record.ended_at)
