"""Approving a drafter with Prefect's server, a worker with one slot, and a real registry."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.promote_drafter import promote_drafter
from tasks.approval import approve_waiting
from tasks.promote_settings import ApprovalAnswer, PromoteSettings
from tasks.promotion import PromotionError, champion, read_version, require_approved, set_champion
from tasks.settings import Places
from tasks.version_record import VersionRecord
from tests.flows.approval_installation import ApprovalInstallation, approval_installation, kill
from tests.flows.conftest import free_port
from tests.flows.prefect_server import flows_on
from tests.tasks.drafters_on_disk import REJECTED
from tests.tasks.registered_versions import register_version
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApprovalInstallation]:
    home = tmp_path_factory.mktemp("approvals")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("FLEDGE_HOME", str(home))
        patch.setenv("FLEDGE_APPROVERS", "alice,bob")
        with approval_installation(home, free_port()) as installation:
            yield installation


@pytest.fixture
def version(prefect: ApprovalInstallation, tmp_path: Path, request: pytest.FixtureRequest) -> VersionRecord:
    """A version of this test's own, which the gate has approved."""
    name = chr(ord("A") + sum(map(ord, request.node.name)) % 50)
    return register_version(Places(), tmp_path, name)


def test_the_form_waits_without_a_process_refuses_what_is_wrong_and_records_what_is_right(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    first = prefect.promote(version.version)
    text = prefect.wait_for_form(first)
    second = prefect.promote(version.version)
    prefect.wait_for_form(second)  # the worker's only slot is free, or this would never come

    assert "| code | 1.86 (1.76 to 1.96) | 1.74 (1.64 to 1.84) |" in text
    assert "| code | 72.0 | 67.0 | 58.0 |" in text
    assert "AL 2.0 is above 1.5" in text
    assert version.report is not None
    assert f"[Report]({version.report})" in text
    assert "nothing is deployed" in text
    for wrong in ({"approver": "mallory"}, {"reason": ""}, {"reason": "  "}, {"decision": "perhaps"}):
        assert prefect.answer(first, **wrong)["status"] == "REJECT"
        assert prefect.run(first)["state"]["name"] == "Suspended"

    assert prefect.answer(first)["status"] == "ACCEPT"

    assert prefect.wait_for_end(first)["name"] == "Completed"
    approval = require_approved(version.version).approval
    assert approval is not None
    assert (approval.approver, approval.reason, approval.flow_run) == ("alice", "better on code", first)
    assert (datetime.now(UTC) - approval.at).total_seconds() < PATIENCE_S


def test_a_rejection_has_its_own_state_and_changes_nothing(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    run = prefect.promote(version.version)
    prefect.wait_for_form(run)

    prefect.answer(run, decision="reject", approver="bob", reason="too slow on general questions")

    state = prefect.wait_for_end(run)
    assert (state["type"], state["name"]) == ("COMPLETED", "Rejected")
    assert "bob rejected" in state["message"]
    after = read_version(version.version)
    assert (after.aliases, after.champion) == (version.aliases, version.champion)
    with pytest.raises(PromotionError, match="was rejected by bob"):
        require_approved(version.version)


def test_an_answer_to_a_question_that_has_changed_is_refused(
    prefect: ApprovalInstallation, version: VersionRecord, tmp_path: Path
) -> None:
    run = prefect.promote(version.version)
    prefect.wait_for_form(run)
    other = register_version(Places(), tmp_path, "z")
    set_champion.fn(other.version, "fledge", "config")

    prefect.answer(run)

    state = prefect.wait_for_end(run)
    assert (state["type"], state["name"]) == ("FAILED", "Stale")
    assert f"the champion was {version.champion or 'none'} when the form was shown" in state["message"]
    assert f"is {other.version} now" in state["message"]
    assert read_version(version.version).approval is None
    now = champion()
    assert now is not None
    assert now.version == other.version


def test_a_form_that_nobody_fills_in_is_withdrawn(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    run = prefect.promote(version.version, expires_after_s=10)
    prefect.wait_for_form(run)

    state = prefect.wait_for_end(run)

    assert (state["type"], state["name"]) == ("CANCELLED", "Expired")
    assert f"nobody decided on version {version.version}" in state["message"]
    assert prefect.answer(run)["status"] != "ACCEPT"
    wait_until(lambda: read_version(version.version).approval is not None)
    after = read_version(version.version)
    assert after.approval is not None
    assert after.approval.outcome == "expired"
    assert (after.aliases, after.champion) == (version.aliases, version.champion)


def test_killed_after_the_answer_the_retried_run_asks_no_second_time(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    run = prefect.promote(version.version)
    prefect.wait_for_form(run)
    prefect.answer(run)
    prefect.wait_until(run, lambda state: state["name"] == "Running")
    for process in prefect.processes():
        kill(process)
    state = prefect.wait_for_end(run)
    assert state["type"] == "CRASHED", state
    assert read_version(version.version).approval is None, "killed too late for this test"

    _retry(prefect, run)
    state = prefect.wait_for_end(run)
    if "infrastructure exited" in (state["message"] or ""):
        # The worker reports a crash some seconds after the runner has: it crashed the run just retried.
        _retry(prefect, run)
        state = prefect.wait_for_end(run)

    assert state["name"] == "Completed"
    assert prefect.states(run).count("Suspended") == 1
    approval = require_approved(version.version).approval
    assert approval is not None
    assert approval.flow_run == run


def test_run_again_after_it_has_recorded_it_records_nothing_new(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    run = prefect.promote(version.version)
    prefect.wait_for_form(run)
    prefect.answer(run)
    prefect.wait_for_end(run)
    before = require_approved(version.version).approval

    _retry(prefect, run)

    assert prefect.wait_for_end(run)["name"] == "Completed"
    assert prefect.states(run).count("Suspended") == 1
    assert require_approved(version.version).approval == before


def test_a_version_that_is_unknown_or_failed_the_gate_is_refused_before_anybody_is_asked(
    prefect: ApprovalInstallation, tmp_path: Path
) -> None:
    bad = register_version(Places(), tmp_path, "y", REJECTED)
    unknown, rejected = prefect.promote("777"), prefect.promote(bad.version)

    state = prefect.wait_for_end(unknown)
    assert state["type"] == "FAILED"
    assert "version '777' of fledge-drafter" in state["message"]
    state = prefect.wait_for_end(rejected)
    assert state["type"] == "FAILED"
    assert "did not pass the gate (reject): AL 1.1 is below 1.5" in state["message"]
    assert "Suspended" not in prefect.states(unknown) + prefect.states(rejected)


def test_an_answer_from_a_terminal_fills_in_the_waiting_form(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    run = prefect.promote(version.version)
    prefect.wait_for_form(run)

    with flows_on(prefect.url):
        with pytest.raises(PromotionError, match=r"approver 'mallory'\n.*alice, bob"):
            approve_waiting(version.version, _answer(approver="mallory"))
        assert prefect.run(run)["state"]["name"] == "Suspended"
        waiting = approve_waiting(version.version, _answer(reason="from a terminal"))

    assert waiting is not None
    assert str(waiting.flow_run_id) == run
    assert prefect.wait_for_end(run)["name"] == "Completed"
    approval = require_approved(version.version).approval
    assert approval is not None
    assert approval.reason == "from a terminal"


def test_without_a_waiting_form_the_same_flow_runs_with_the_answer_given_beforehand(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    with flows_on(prefect.url):
        assert approve_waiting(version.version, _answer()) is None
        no = promote_drafter(
            PromoteSettings(version=version.version, answer=_answer(decision="reject", reason="not now"))
        )
        yes = promote_drafter(PromoteSettings(version=version.version, answer=_answer(reason="now")))
        with pytest.raises(PromotionError, match="approver 'mallory'"):
            promote_drafter(PromoteSettings(version=version.version, answer=_answer(approver="mallory")))

    assert (no.approval.outcome, no.approval.reason) == ("rejected", "not now")
    assert require_approved(version.version).approval == yes.approval
    assert prefect.run(no.approval.flow_run)["state"]["name"] == "Rejected"
    assert prefect.run(yes.approval.flow_run)["state"]["name"] == "Completed"


def test_nobody_on_the_list_is_said_before_anybody_is_asked(
    prefect: ApprovalInstallation, version: VersionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_APPROVERS", "")

    with (
        flows_on(prefect.url),
        pytest.raises(PromotionError, match="nobody may approve a drafter"),
    ):
        promote_drafter(PromoteSettings(version=version.version))


def test_without_a_deployment_the_form_is_refused_because_nothing_could_resume_it(
    prefect: ApprovalInstallation, version: VersionRecord
) -> None:
    with (
        flows_on(prefect.url),
        pytest.raises(PromotionError, match="not started from a deployment"),
    ):
        promote_drafter(PromoteSettings(version=version.version))


def _answer(**values: str) -> ApprovalAnswer:
    return ApprovalAnswer.model_validate(
        {"decision": "approve", "approver": "alice", "reason": "better on code", **values}
    )


def _retry(prefect: ApprovalInstallation, run: str) -> None:
    """What `prefect flow-run retry` does."""
    state = {"type": "SCHEDULED", "name": "AwaitingRetry"}
    answer = prefect.api.post(f"/flow_runs/{run}/set_state", json={"state": state, "force": False}).json()
    assert answer["status"] == "ACCEPT", answer
