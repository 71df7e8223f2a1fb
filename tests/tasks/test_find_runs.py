"""A finished run is found by any of its names."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from drafter.errors import DataError
from drafter.records import EvaluationReport, ReleaseDecision
from tasks.find_runs import find_run, list_runs
from tasks.run_records import RetrainRecord, save_run
from tasks.settings import Places


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(home=tmp_path)
    # The newer run's MLflow id begins with the older one's version number.
    add_run(places, hour=1, name="old-owl", version="5", mlflow_run_id="aaaaaa11")
    add_run(places, hour=2, name="new-newt", version="6", mlflow_run_id="5bbbbb22")
    return places


def add_run(places: Places, hour: int, name: str, version: str, mlflow_run_id: str) -> None:
    evaluation = places.stages / f"evaluation-{name}"
    EvaluationReport(
        path=str(evaluation),
        digest=name,
        target_fingerprint="t",
        dataset_digest="d",
        drafters={},
        cells=(),
        prompts=(),
        acceptance=(),
        greedy_identical_share={},
        train_domains=(),
        machine="m",
        versions={},
        elapsed_s=1,
    ).save(evaluation / "evaluation.json")
    at = datetime(2026, 1, 1, hour, tzinfo=UTC)
    record = RetrainRecord(
        run_id=f"id-of-{name}",
        run_name=name,
        started_at=at,
        ended_at=at,
        fingerprint="f",
        trained=True,
        decision=ReleaseDecision(outcome="approve", reasons=()),
        registry_uri=f"models:/fledge-drafter/{version}",
        mlflow_run_id=mlflow_run_id,
        drafter="d",
        evaluation=str(evaluation),
        report="r",
        validation_page="v",
    )
    save_run(places, record)


def test_no_name_is_the_last_run(places: Places) -> None:
    assert find_run(places, None).record.run_name == "new-newt"
    assert [record.run_name for record in list_runs(places)] == ["new-newt", "old-owl"]


@pytest.mark.parametrize(
    "name", ["old-owl", "5", "models:/fledge-drafter/5", "aaaaaa11", "aaaaaa", "id-of-old"]
)
def test_a_run_is_found_by_any_of_its_names(places: Places, name: str) -> None:
    found = find_run(places, name)
    assert found.record.run_name == "old-owl"
    assert found.evaluation.digest == "old-owl"


def test_a_run_is_found_by_its_evaluation_directory(places: Places) -> None:
    assert find_run(places, str(places.stages / "evaluation-old-owl")).record.run_name == "old-owl"


def test_an_unknown_run_is_named_with_those_that_there_are(places: Places) -> None:
    with pytest.raises(DataError, match="new-newt, old-owl"):
        find_run(places, "7")
