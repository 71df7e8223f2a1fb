"""A registered drafter, a person's decision, and an endpoint that runs it.

Started from its deployment, the run shows a form and ends its process until somebody answers. With an
answer given beforehand (`fledge approve`) it goes straight on. Killed anywhere and retried, it asks once
and records once.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from drafter.records import Record
from flows.deploy_endpoint import deploy_endpoint
from tasks.approval import (
    Shown,
    approval_of,
    ask_for_approval,
    check_approver,
    differences,
    expire_waiting,
    require_approvers,
    show_version,
)
from tasks.approval_page import approval_text
from tasks.endpoint_settings import EndpointRecord
from tasks.logs import flow_logger, quiet_user_errors
from tasks.promote_settings import PromoteSettings
from tasks.promotion import PromotionError, read_version, record_approval
from tasks.settings import Places
from tasks.version_record import Approval


class PromotionRecord(Record):
    """What a promotion came to."""

    version: str
    approval: Approval
    endpoint: EndpointRecord | None


@flow(
    name="promote-drafter",
    description="Ask a person whether a registered drafter may go into production, and deploy it if so.",
    validate_parameters=True,
)
def promote_drafter(settings: PromoteSettings = PromoteSettings()) -> Any:  # noqa: B008 - frozen
    """Ask a person whether a registered drafter may go into production, and deploy it if so.

    Ends as `Rejected` when the person says no, as `Stale` when the approver saw what no longer is, as
    `Expired` when nobody answered in time (`expire_approval`); all three leave everything as it was.
    """
    quiet_user_errors()
    require_approvers(Places().approvers)
    shown = show_version(settings)
    approval = recorded_by_this_run(shown)
    if approval is None:
        answer = settings.answer or ask(shown, settings)
        check_approver(answer.approver, Places().approvers)
        changed = differences(shown, read_version(shown.version))
        if changed:
            return stale(shown, changed)
        approval = record_approval(shown.version, approval_of(answer, shown, flow_run.id)).approval
    assert approval is not None
    if approval.outcome == "rejected":
        return Completed(
            name="Rejected",
            message=f"{approval.approver} rejected version {shown.version}: {approval.reason}",
            data=PromotionRecord(version=shown.version, approval=approval, endpoint=None),
        )
    flow_logger().info("%s approved version %s: %s", approval.approver, shown.version, approval.reason)
    endpoint = deploy(shown, settings)
    return PromotionRecord(version=shown.version, approval=approval, endpoint=endpoint)


@flow(
    name="expire-approval",
    description="Withdraw an approval form that nobody filled in in time. Scheduled by promote-drafter.",
)
def expire_approval(flow_run_id: UUID) -> bool:
    """Withdraw an approval form that nobody filled in in time."""
    quiet_user_errors()
    return expire_waiting(flow_run_id)


def recorded_by_this_run(shown: Shown) -> Approval | None:
    """The decision that this run recorded before it was killed."""
    approval = read_version(shown.version).approval
    return approval if approval is not None and approval.flow_run == str(flow_run.id) else None


def ask(shown: Shown, settings: PromoteSettings) -> Any:
    """Show the form; the process ends here until it is filled in."""
    text = approval_text(read_version(shown.version), settings.deployment, shown.expires_at)
    return ask_for_approval(shown, text, Places().approvers)


def stale(shown: Shown, changed: tuple[str, ...]) -> Any:
    """Refuse an answer to a question that has changed. Nothing is recorded."""
    error = PromotionError(
        f"the approval of version {shown.version} is stale: {'; '.join(changed)}",
        "version, measurements and champion as they were shown",
        "run promote-drafter again and decide on what is there now",
    )
    flow_logger().error("%s", error)
    return Failed(name="Stale", message=str(error), data=error)


def deploy(shown: Shown, settings: PromoteSettings) -> EndpointRecord | None:
    """Deploy the version of the approval, if this run is to deploy."""
    if settings.deployment is None:
        return None
    return deploy_endpoint(settings.deployment.model_copy(update={"version": shown.version}))


if __name__ == "__main__":
    promote_drafter()
