"""Registration in a real MLflow store: exactly once, whatever was killed in between."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from drafter.errors import CheckpointError
from drafter.provenance import read_provenance
from drafter.records import ReleaseDecision
from tasks import register_drafter as registration
from tasks.find_drafters import find_by_fingerprint, find_champion, version_of_alias
from tasks.register_drafter import Candidate, register_drafter
from tasks.settings import Places
from tasks.track_runs import connect, experiment_id
from tests.tasks.drafters_on_disk import APPROVED, REJECTED, evaluation_of, export_drafter


def candidate(
    places: Places,
    tmp_path: Path,
    name: str = "a",
    decision: ReleaseDecision = APPROVED,
    attempt: str = "first",
    target: str = "target0",
) -> Candidate:
    """A measured drafter whose weights and fingerprint are those of its name."""
    client = connect(places)
    run = client.create_run(experiment_id(client, places))
    directory = tmp_path / f"drafter-{name}-{attempt}"
    if not directory.exists():
        export_drafter(directory, target, weight=float(ord(name)))
    drafter = read_provenance(directory).drafter
    return Candidate(
        drafter=drafter,
        fingerprint=f"fingerprint-{name}",
        attempt=attempt,
        run_id=run.info.run_id,
        evaluation=evaluation_of(drafter, tmp_path / "evaluation"),
        decision=decision,
    )


def versions(places: Places) -> list[str]:
    found = connect(places).search_model_versions(f"name = '{places.model_name}'")
    return sorted(str(version.version) for version in found)


def alias(places: Places, name: str) -> str | None:
    version = version_of_alias(connect(places), places, name)  # type: ignore[arg-type]
    return version and str(version.version)


def test_an_approved_drafter_becomes_challenger_with_its_tags(places: Places, tmp_path: Path) -> None:
    registered = register_drafter.fn(candidate(places, tmp_path))

    version = version_of_alias(connect(places), places, "challenger")
    assert version is not None
    assert registered.uri == f"models:/{places.model_name}/{version.version}"
    assert version.tags["fledge.decision"] == "approve"
    assert version.tags["fledge.reasons"] == "AL 2.0 is above 1.5"
    assert version.tags["fledge.target_fingerprint"] == "target0"
    assert version.tags["fledge.drafter_digest"] == registered.drafter.digest


@pytest.mark.parametrize("outcome", ["reject", "not_enough_evidence"])
def test_a_drafter_that_was_not_approved_is_registered_without_alias(
    outcome: str, places: Places, tmp_path: Path
) -> None:
    decision = REJECTED.model_copy(update={"outcome": outcome})

    register_drafter.fn(candidate(places, tmp_path, decision=decision))

    assert versions(places) == ["1"]
    assert alias(places, "challenger") is None


def test_the_same_drafter_is_registered_once(places: Places, tmp_path: Path) -> None:
    first = register_drafter.fn(candidate(places, tmp_path))
    second = register_drafter.fn(candidate(places, tmp_path))

    assert first == second
    assert versions(places) == ["1"]


def test_force_registers_another_version_which_is_then_the_one_found(places: Places, tmp_path: Path) -> None:
    register_drafter.fn(candidate(places, tmp_path))
    forced = register_drafter.fn(candidate(places, tmp_path, attempt="run-2"))

    assert versions(places) == ["1", "2"]
    found = find_by_fingerprint.fn("fingerprint-a")
    assert found is not None
    assert (found.version, found.attempt) == (forced.version, "run-2")


STEPS = (
    "create_logged_model",
    "log_model_artifacts",
    "finalize_logged_model",
    "create_registered_model",
    "create_model_version",
    "set_model_version_tag",
    "set_registered_model_alias",
)


def _register_and_die_after(step: str, of: Candidate) -> None:
    """In a process of its own: SIGKILL itself right after one step has reached the store."""
    real_connect = registration.connect

    def connect_and_die(places: Places) -> object:
        client = real_connect(places)
        real = getattr(client, step)

        def then_die(*args: object, **kwargs: object) -> None:
            real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(client, step, then_die)
        return client

    registration.connect = connect_and_die  # type: ignore[assignment]
    register_drafter.fn(of)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_killed_after_any_step_the_next_run_finishes_with_one_version(
    step: str, places: Places, tmp_path: Path
) -> None:
    of = candidate(places, tmp_path)
    process = multiprocessing.get_context("fork").Process(target=_register_and_die_after, args=(step, of))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL

    register_drafter.fn(of)

    client = connect(places)
    assert versions(places) == ["1"]
    assert len(client.search_logged_models([experiment_id(client, places)])) == 1
    assert alias(places, "challenger") == "1"
    found = find_by_fingerprint.fn("fingerprint-a")
    assert found is not None
    assert found.drafter.digest == of.drafter.digest


def test_a_drafter_is_fetched_from_the_registry_as_it_was(places: Places, tmp_path: Path) -> None:
    of = candidate(places, tmp_path)
    register_drafter.fn(of)

    found = find_by_fingerprint.fn("fingerprint-a")

    assert found is not None
    for name in ("config.json", "model.safetensors", "provenance.json"):
        assert (Path(found.drafter.path) / name).read_bytes() == (Path(of.drafter.path) / name).read_bytes()
    assert find_by_fingerprint.fn("fingerprint-b") is None


def test_a_changed_artifact_is_refused(places: Places, tmp_path: Path) -> None:
    register_drafter.fn(candidate(places, tmp_path))
    (stored,) = (places.home / "mlflow-artifacts").rglob("config.json")
    stored.write_text("{}")

    with pytest.raises(CheckpointError, match="sha256 differs"):
        find_by_fingerprint.fn("fingerprint-a")


def test_an_older_run_that_ends_late_does_not_take_the_alias_back(places: Places, tmp_path: Path) -> None:
    register_drafter.fn(candidate(places, tmp_path, "a"))
    register_drafter.fn(candidate(places, tmp_path, "b"))

    register_drafter.fn(candidate(places, tmp_path, "a"))

    assert alias(places, "challenger") == "2"


def test_a_challenger_that_no_longer_passes_loses_the_alias(places: Places, tmp_path: Path) -> None:
    register_drafter.fn(candidate(places, tmp_path))

    register_drafter.fn(candidate(places, tmp_path, decision=REJECTED))

    assert alias(places, "challenger") is None


def test_without_a_champion_there_is_none_and_with_one_it_is_fetched(places: Places, tmp_path: Path) -> None:
    assert find_champion.fn("target0") is None
    registered = register_drafter.fn(candidate(places, tmp_path))
    connect(places).set_registered_model_alias(places.model_name, "champion", registered.version)

    champion = find_champion.fn("target0")

    assert champion is not None
    assert champion.drafter.digest == registered.drafter.digest


def test_a_champion_of_another_target_is_refused(places: Places, tmp_path: Path) -> None:
    registered = register_drafter.fn(candidate(places, tmp_path, target="target1"))
    connect(places).set_registered_model_alias(places.model_name, "champion", registered.version)

    with pytest.raises(CheckpointError, match="trained on target target1"):
        find_champion.fn("target0")
