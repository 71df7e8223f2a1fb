"""What the registry remembers of approvals, deployments and rollbacks, in a real MLflow store."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tasks import promotion
from tasks.promotion import (
    PromotionError,
    champion,
    list_versions,
    read_version,
    record_approval,
    record_retrain_asked,
    record_rollback,
    require_approved,
    restore_champion,
    set_champion,
)
from tasks.settings import Places
from tasks.version_record import Approval, ApprovalOutcome
from tests.tasks.drafters_on_disk import REJECTED
from tests.tasks.registered_versions import register_version


def approval(flow_run: str = "run-1", outcome: ApprovalOutcome = "approved", minute: int = 0) -> Approval:
    return Approval(
        outcome=outcome,
        approver="alice",
        reason="better on code",
        at=datetime(2026, 3, 1, 12, minute, tzinfo=UTC),
        flow_run=flow_run,
        previous_champion=None,
    )


@pytest.fixture
def two_versions(places: Places, tmp_path: Path) -> None:
    register_version(places, tmp_path, "a")
    register_version(places, tmp_path, "b")


def test_a_version_reads_as_its_evaluation_measured_it(places: Places, tmp_path: Path) -> None:
    version = register_version(places, tmp_path)

    assert version.aliases == ("challenger",)
    assert (version.decision, version.num_speculative_tokens) == ("approve", 3)
    assert version.acceptance_of()["code"].acceptance_length == 1.86
    assert version.acceptance_of()["code"].lower == 1.76
    assert version.acceptance_of("champion")["code"].acceptance_length == 1.74
    assert version.acceptance_of(k=5) == {}
    assert version.speed_of()["code"].output_tokens_per_second == 72.0
    assert version.speed_of()["code"].without_drafter == 58.0
    assert version.speed_of()["general"].without_drafter is None
    assert {one.concurrency for one in version.speed} == {1, 4}
    assert version.train_domains == ("code",)
    assert version.advice is not None
    assert (version.advice.num_speculative_tokens, version.advice.speculate_up_to_concurrency) == (3, 1)
    assert [round(one.ratio or 0, 2) for one in version.advice.measured] == [1.24, 0.92]
    assert version.report == (tmp_path / "evaluation-a/report.html").as_uri()


@pytest.mark.parametrize("name", ["1", " 1 ", "challenger", "models:/fledge-drafter/1"])
def test_a_version_is_found_by_number_alias_and_uri(name: str, places: Places, tmp_path: Path) -> None:
    register_version(places, tmp_path)

    assert read_version(name).version == "1"


@pytest.mark.parametrize("name", ["7", "champion", "nonsense", ""])
def test_an_unknown_version_is_an_error_that_names_those_there_are(
    name: str, places: Places, two_versions: None
) -> None:
    with pytest.raises(PromotionError, match=r"there are: 1, 2, challenger \(2\)"):
        read_version(name)


def test_without_any_version_the_error_says_so(places: Places) -> None:
    with pytest.raises(PromotionError, match="there are: none"):
        read_version("1")


def test_only_a_version_that_gate_and_person_approved_may_be_deployed(places: Places, tmp_path: Path) -> None:
    register_version(places, tmp_path, "a")
    register_version(places, tmp_path, "b", REJECTED)

    with pytest.raises(PromotionError, match="has not been approved by anybody"):
        require_approved("1")
    record_approval.fn("1", approval("run-1", "rejected"))
    with pytest.raises(PromotionError, match="was rejected by alice at 2026-03-01 12:00 UTC"):
        require_approved("1")
    record_approval.fn("1", approval("run-2"))
    assert require_approved("1").approval == approval("run-2")
    with pytest.raises(PromotionError, match=r"did not pass the gate \(reject\): AL 1.1 is"):
        require_approved("2")


def test_the_same_run_records_its_approval_once(places: Places, tmp_path: Path) -> None:
    register_version(places, tmp_path)
    record_approval.fn("1", approval(minute=0))

    record_approval.fn("1", approval(minute=9))

    assert read_version("1").approval == approval(minute=0)


def test_the_champion_moves_and_remembers_its_predecessor(places: Places, two_versions: None) -> None:
    assert champion() is None
    set_champion.fn("1", "fledge", "fledge-v1-aaa")
    second = set_champion.fn("2", "fledge", "fledge-v2-bbb", "fledge-v1-aaa")

    assert second.aliases == ("champion",), "the challenger has become champion"
    assert second.previous_champion == "1"
    assert (second.endpoint, second.endpoint_config) == ("fledge", "fledge-v2-bbb")
    assert second.previous_endpoint_config == "fledge-v1-aaa"
    assert second.in_production_since == second.deployed_at is not None
    assert [version.champion for version in list_versions()] == ["2", "2"]


def test_deploying_the_champion_again_does_not_make_it_its_own_predecessor(
    places: Places, two_versions: None
) -> None:
    set_champion.fn("1", "fledge", "one")
    set_champion.fn("2", "fledge", "two", "one")

    again = set_champion.fn("2", "fledge", "two-larger", "two")

    assert (again.previous_champion, again.previous_endpoint_config) == ("1", "one")
    assert again.endpoint_config == "two-larger"


def test_a_rollback_gives_the_alias_back_once(places: Places, two_versions: None) -> None:
    set_champion.fn("1", "fledge", "one")
    set_champion.fn("2", "fledge", "two")

    for _ in range(2):
        restored = restore_champion.fn("2", "acceptance fell")
        assert restored is not None
        assert restored.version == "1"

    assert restored.restored_at is not None
    assert restored.in_production_since == restored.restored_at
    taken_back = read_version("2")
    assert taken_back.aliases == ()
    assert taken_back.rollback_reason == "acceptance fell"
    assert taken_back.rolled_back_at is not None


def test_a_rollback_of_the_first_champion_leaves_none(places: Places, two_versions: None) -> None:
    set_champion.fn("1", "fledge", "one")

    assert restore_champion.fn("1", "bad") is None
    assert champion() is None


def test_a_failed_shift_is_noted_and_moves_no_alias(places: Places, two_versions: None) -> None:
    set_champion.fn("1", "fledge", "one")

    version = record_rollback.fn("2", "alarm fledge-v2-errors")

    assert version.rollback_reason == "alarm fledge-v2-errors"
    assert (version.aliases, version.champion) == (("challenger",), "1")


def test_a_failed_shift_to_other_settings_is_not_held_against_the_champion(
    places: Places, two_versions: None
) -> None:
    set_champion.fn("2", "fledge", "two")

    version = record_rollback.fn("2", "alarm fledge-v2-errors")

    assert (version.rolled_back_at, version.champion) == (None, "2")


def test_a_version_deployed_again_is_no_longer_one_that_was_taken_back(
    places: Places, two_versions: None
) -> None:
    set_champion.fn("1", "fledge", "one")
    record_rollback.fn("2", "alarm")

    version = set_champion.fn("2", "fledge", "two")

    assert (version.rolled_back_at, version.rollback_reason) == (None, None)


def test_that_a_retrain_was_asked_for_is_remembered(places: Places, tmp_path: Path) -> None:
    register_version(places, tmp_path)

    record_retrain_asked.fn("1")

    assert read_version("1").retrain_asked_at is not None


def _then_die(write: str, after: int, task: Any, *arguments: str) -> None:
    """In a process of its own: SIGKILL itself right after the n-th write has reached the store."""
    real_connect = promotion.connect
    left = [after]

    def connect_and_die(places: Places) -> Any:
        client = real_connect(places)
        real = getattr(client, write)

        def then_die(*args: object, **kwargs: object) -> None:
            real(*args, **kwargs)
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(client, write, then_die)
        return client

    promotion.connect = connect_and_die  # type: ignore[assignment]
    task.fn(*arguments)


def _run_and_die(*arguments: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=_then_die, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


WRITES = [
    ("set_model_version_tag", 1),
    ("set_model_version_tag", 4),
    ("set_registered_model_alias", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("write", "after"), WRITES)
def test_killed_while_the_champion_moves_the_next_run_completes_it(
    write: str, after: int, places: Places, two_versions: None
) -> None:
    set_champion.fn("1", "fledge", "one")
    _run_and_die(write, after, set_champion, "2", "fledge", "two", "one")

    version = set_champion.fn("2", "fledge", "two", "one")

    assert version.aliases == ("champion",)
    assert (version.previous_champion, version.previous_endpoint_config) == ("1", "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "after"), [("set_model_version_tag", 1), ("set_registered_model_alias", 1)]
)
def test_killed_while_the_champion_is_restored_the_next_run_completes_it(
    write: str, after: int, places: Places, two_versions: None
) -> None:
    set_champion.fn("1", "fledge", "one")
    set_champion.fn("2", "fledge", "two")
    _run_and_die(write, after, restore_champion, "2", "bad")

    restored = restore_champion.fn("2", "bad")

    assert restored is not None
    assert (restored.version, restored.aliases) == ("1", ("champion",))
    assert read_version("2").rollback_reason == "bad"
