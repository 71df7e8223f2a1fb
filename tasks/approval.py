"""Asking a person, through Prefect: what was shown, what was answered, and whether it still holds.

A suspended run has no process: it starts again from the top. What was shown is therefore kept beside the
run in Prefect's database, and so is the answer. Killed and retried at any point, the run asks no second
time: Prefect forgets on a retry that it has asked, this does not.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect import suspend_flow_run, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.input import RunInput
from prefect.input.actions import create_flow_run_input, read_flow_run_input
from prefect.input.run_input import keyset_from_base_key
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled
from pydantic import Field, create_model

from drafter.records import Record, ServingAdvice
from tasks.logs import flow_logger
from tasks.promote_settings import ApprovalAnswer, PromoteSettings
from tasks.promotion import PromotionError, read_version, record_approval, require_gate_passed
from tasks.settings import Places
from tasks.version_record import Approval, VersionRecord

PROMOTE_FLOW = "promote-drafter"
EXPIRE_DEPLOYMENT = "expire-approval/expire-approval"
_QUESTION = "approval"
_SHOWN_KEY = "fledge-shown"
# Where Prefect puts the answer to a suspension of that name.
_ANSWER_KEY = keyset_from_base_key(f"suspended-{_QUESTION}")["response"]


class Shown(Record):
    """What the approver saw, and what must still be so when the answer comes."""

    version: str
    drafter_digest: str
    evaluation_digest: str
    decision: str
    num_speculative_tokens: int | None
    advice: ServingAdvice | None = None
    champion: str | None
    expires_at: datetime


class WaitingRun(Record):
    """A flow run whose form is open."""

    flow_run_id: UUID
    name: str
    shown: Shown
    deploys: bool = Field(description="Whether it deploys the version once it is approved.")


def show_version(settings: PromoteSettings) -> Shown:
    """What this run asks about: decided once, when it first starts, and kept with the run.

    Raises:
        PromotionError: unknown version, or one that the gate did not approve.
    """
    kept = read_flow_run_input(_SHOWN_KEY)
    if kept is not None:
        return Shown.model_validate(kept)
    version = require_gate_passed(read_version(settings.version))
    shown = Shown(
        version=version.version,
        drafter_digest=version.drafter_digest,
        evaluation_digest=version.evaluation_digest,
        decision=version.decision,
        num_speculative_tokens=version.num_speculative_tokens,
        advice=version.advice,
        champion=version.champion,
        expires_at=datetime.now(UTC) + timedelta(seconds=settings.expires_after_s),
    )
    create_flow_run_input(_SHOWN_KEY, shown.model_dump(mode="json"))
    return shown


def ask_for_approval(shown: Shown, text: str, approvers: tuple[str, ...]) -> ApprovalAnswer:
    """The answer to the form; without one yet, open the form and end this process until it comes.

    Raises:
        PromotionError: nobody may approve, or this run has no deployment that could start it again.
    """
    require_approvers(approvers)
    given = read_flow_run_input(_ANSWER_KEY)
    if given is not None:
        return ApprovalAnswer.model_validate(given)
    _require_deployment()
    _schedule_expiry(shown)
    form = approval_form(approvers).with_initial_data(description=text)
    answer = suspend_flow_run(wait_for_input=form, key=_QUESTION)
    return ApprovalAnswer.model_validate(answer.model_dump())


def approval_form(approvers: tuple[str, ...]) -> type[RunInput]:
    """`ApprovalAnswer` as a form. Prefect refuses a name that is not listed; the run goes on waiting."""
    fields: dict[str, Any] = {}
    for name, field in ApprovalAnswer.model_fields.items():
        extra: dict[str, Any] | None = {"enum": list(approvers)} if name == "approver" else None
        shown = Field(title=name.capitalize(), description=field.description, json_schema_extra=extra)
        shown.metadata = [*field.metadata]
        fields[name] = (field.annotation, shown)
    return create_model("Approval", __base__=RunInput, **fields)


def require_approvers(approvers: tuple[str, ...]) -> None:
    """Raise a PromotionError when nobody may approve."""
    if not approvers:
        raise PromotionError(
            "FLEDGE_APPROVERS is empty: nobody may approve a drafter",
            "the names of those who may",
            "set it where flows run (the worker's environment), e.g. FLEDGE_APPROVERS=alice,bob",
        )


def check_approver(approver: str, approvers: tuple[str, ...]) -> None:
    """Raise a PromotionError unless the approver is on the list."""
    require_approvers(approvers)
    if approver not in approvers:
        raise PromotionError(
            f"approver {approver!r}",
            f"one of FLEDGE_APPROVERS: {', '.join(approvers)}",
            "let one of them decide, or add the name to FLEDGE_APPROVERS where flows run",
        )


def differences(shown: Shown, now: VersionRecord) -> tuple[str, ...]:
    """What is no longer as the approver saw it, in words. Empty: the approval holds."""
    labels = {
        "champion": "the champion",
        "drafter_digest": "the drafter's digest",
        "evaluation_digest": "the evaluation's digest",
        "decision": "the gate's decision",
        "num_speculative_tokens": "the chosen K",
        "advice": "the advice how to serve it",
    }
    return tuple(
        f"{label} was {_said(before)} when the form was shown and is {_said(after)} now"
        for field, label in labels.items()
        if (before := getattr(shown, field)) != (after := getattr(now, field))
    )


def _said(value: object) -> object:
    return value.sentence if isinstance(value, ServingAdvice) else value or "none"


def approval_of(answer: ApprovalAnswer, shown: Shown, flow_run_id: str) -> Approval:
    """The answer as it is recorded on the version."""
    return Approval(
        outcome="approved" if answer.decision == "approve" else "rejected",
        approver=answer.approver,
        reason=answer.reason,
        at=datetime.now(UTC),
        flow_run=flow_run_id,
        previous_champion=shown.champion,
    )


@task(name="expire-approval", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=10, timeout_seconds=300)
def expire_waiting(flow_run_id: UUID) -> bool:
    """End a run whose form nobody filled in in time as `Expired`. False: it was not waiting any more."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
        if run.state is None or run.state.is_final() or _is_answered(client, flow_run_id):
            return False
        if not run.state.is_paused():
            raise RuntimeError(f"run {run.name} is {run.state.name}, about to ask: tried again")
        shown = _shown(client, run)
        message = f"nobody decided on version {shown.version} by {shown.expires_at:%Y-%m-%d %H:%M} UTC"
        client.set_flow_run_state(flow_run_id, Cancelled(name="Expired", message=message))
    if read_version(shown.version).approval is None:
        expired = Approval(
            outcome="expired",
            approver="",
            reason=message,
            at=datetime.now(UTC),
            flow_run=str(flow_run_id),
            previous_champion=shown.champion,
        )
        record_approval(shown.version, expired)
    return True


def find_waiting(version: str) -> WaitingRun | None:
    """The newest run of promote-drafter whose form asks about this version."""
    number = read_version(version).version
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[PROMOTE_FLOW])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Suspended"]))
            ),
            sort=FlowRunSort.START_TIME_DESC,
        )
        waiting = [_waiting(client, run) for run in runs]
    return next((run for run in waiting if run.shown.version == number), None)


def approve_waiting(version: str, answer: ApprovalAnswer) -> WaitingRun | None:
    """Fill in the form of the run that waits for a decision on this version. None: no run waits.

    Raises:
        PromotionError: not on the list of approvers, or Prefect refused the answer.
    """
    check_approver(answer.approver, Places().approvers)
    waiting = find_waiting(version)
    if waiting is None:
        return None
    with get_client(sync_client=True) as client:
        response = client.resume_flow_run(waiting.flow_run_id, run_input=answer.model_dump(mode="json"))
    # A refused form is no HTTP error: the status is in the body.
    if response.status != SetStateStatus.ACCEPT:
        raise PromotionError(
            f"Prefect did not take the answer for run {waiting.name}: {getattr(response.details, 'reason', '')}",
            "a form that is complete, of a run that still waits",
            "look at the run in Prefect's pages; if it does not wait any more, run promote-drafter again",
        )
    return waiting


def _waiting(client: SyncPrefectClient, run: FlowRun) -> WaitingRun:
    settings = PromoteSettings.model_validate((run.parameters or {}).get("settings", {}))
    return WaitingRun(
        flow_run_id=run.id,
        name=run.name,
        shown=_shown(client, run),
        deploys=settings.deployment is not None,
    )


def _shown(client: SyncPrefectClient, run: FlowRun) -> Shown:
    return Shown.model_validate_json(client.read_flow_run_input(run.id, _SHOWN_KEY))


def _is_answered(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    try:
        client.read_flow_run_input(flow_run_id, _ANSWER_KEY)
    except PrefectHTTPStatusError as error:
        if error.response.status_code == 404:
            return False
        raise
    return True


def _require_deployment() -> None:
    if deployment.id is None:
        raise PromotionError(
            "this run was not started from a deployment: nothing could start it again once it is answered",
            "a run of the deployment promote-drafter, or an answer given beforehand",
            "run promote-drafter from Prefect's pages (`fledge up`), or `fledge approve VERSION --as NAME "
            "--reason ...`",
        )


def _schedule_expiry(shown: Shown) -> None:
    """Have the form withdrawn in time; asked for again, it is the same run."""
    run_id = flow_run.id
    try:
        run_deployment(
            EXPIRE_DEPLOYMENT,
            parameters={"flow_run_id": run_id},
            scheduled_time=shown.expires_at,
            idempotency_key=f"expire-{run_id}",
            timeout=0,
            as_subflow=False,
        )
    except ObjectNotFound:
        raise PromotionError(
            f"the deployment {EXPIRE_DEPLOYMENT} is not registered, so the form would wait for ever",
            "the deployments of prefect.yaml",
            "run `prefect deploy --all`, or `fledge up`, which does so",
        ) from None
    flow_logger().info("the form waits until %s UTC", f"{shown.expires_at:%Y-%m-%d %H:%M}")
