"""A registered drafter version behind an endpoint: created, or moved to without dropping a request.

    python flows/deploy_endpoint.py       deploys the version that is approved, with the defaults

Killed at any moment and started again, it goes on from what SageMaker says. What can be refused is refused
before anything is created. A shift that ends badly ends on what ran before: SageMaker's alarms take it back
while it lasts, the transaction below when the new fleet then fails its first chats.
"""

from __future__ import annotations

from prefect import flow
from prefect.runtime import flow_run
from prefect.transactions import transaction

from drafter.errors import FledgeError
from tasks.alarms import put_alarms, retire_alarms
from tasks.autoscaling import set_autoscaling
from tasks.build_endpoint import EndpointPlan
from tasks.endpoint_settings import (
    DeploySettings,
    DrafterUnfit,
    EndpointRecord,
    EndpointRolledBack,
    NoCapacity,
)
from tasks.endpoints import describe_endpoint
from tasks.find_drafters import fetch_drafter
from tasks.logs import flow_logger, quiet_user_errors
from tasks.plan_deployment import Deployment, plan_deployment, resolve_version
from tasks.probe import SmokeResult, smoke_test
from tasks.promotion import record_rollback, require_approved, set_champion
from tasks.shift_traffic import (
    PLAN_KEY,
    Standing,
    check_endpoint,
    create_config,
    create_endpoint,
    create_model,
    explain_outcome,
    start_update,
    wait_for_creation,
    watch_update,
)
from tasks.upload_drafter import upload_drafter, upload_target


@flow(
    name="deploy-endpoint",
    description="Deploy an approved drafter version with its target, blue/green, and take it back if it is worse.",
    validate_parameters=True,
)
def deploy_endpoint(settings: DeploySettings = DeploySettings()) -> EndpointRecord:  # noqa: B008 - frozen
    """Deploy an approved drafter version with its target, blue/green, and take it back if it is worse."""
    quiet_user_errors()
    version = require_approved(resolve_version(settings.version))
    registered = fetch_drafter(version.version)
    deployment = plan_deployment(settings, version, registered, flow_run.id)
    standing = check_endpoint(settings.endpoint_name, deployment.config_names)
    upload_drafter(deployment.drafter)
    if deployment.target is not None:
        upload_target(deployment.target)

    plan, smoke = place(settings, deployment, standing)

    set_autoscaling(settings.endpoint_name, settings.autoscaling)
    endpoint = describe_endpoint(settings.endpoint_name)
    set_champion(version.version, plan.endpoint_name, plan.config_name, endpoint.previous_config_name)
    retire_alarms(endpoint.previous_config_name)
    return endpoint.model_copy(
        update={"latency_ms": smoke.latency_ms, "acceptance_length": smoke.acceptance_length}
    )


def place(
    settings: DeploySettings, deployment: Deployment, standing: Standing
) -> tuple[EndpointPlan, SmokeResult]:
    """Put the version on the first instance type that AWS has."""
    *others, last = deployment.plans_from(standing.ours)
    for plan in others:
        try:
            return plan, shift(settings, deployment, plan, standing)
        except NoCapacity as problem:
            flow_logger().warning("%s; trying the next instance type", problem.given)
    return last, shift(settings, deployment, last, standing)


def shift(
    settings: DeploySettings, deployment: Deployment, plan: EndpointPlan, standing: Standing
) -> SmokeResult:
    """Create the endpoint or move it, and let the new fleet show itself; a bad end is written on the version."""
    create_model(plan)
    create_config(plan)
    alarms = () if standing.serves is None else put_alarms(plan, settings.alarms.own, standing.under_way)
    try:
        with transaction() as window:
            window.set(PLAN_KEY, plan.model_dump(mode="json"))
            if standing.serves is None:
                create_endpoint(plan)
                wait_for_creation(plan, deployment.creation_deadline_s)
            elif start_update(plan, str(flow_run.root_flow_run_id)):
                watch_update(
                    plan, alarms, deployment.prompts.prompts, settings.probe, settings.rollout.max_execution_s
                )
            return smoke_test(plan, deployment.prompts, settings.probe)
    except (EndpointRolledBack, DrafterUnfit) as problem:
        raise written_down(plan, problem) from None


def written_down(plan: EndpointPlan, problem: FledgeError) -> FledgeError:
    """The problem with what the endpoint runs now, kept on the version. Aliases stay as they are."""
    outcome = explain_outcome(plan, problem)
    record_rollback(plan.version, outcome.given)
    return outcome


if __name__ == "__main__":
    deploy_endpoint()
