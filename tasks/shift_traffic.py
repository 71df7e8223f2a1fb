"""Moving an endpoint to what a plan says, in steps that can be repeated: each first asks SageMaker what is.

SageMaker takes a failed update back in silence: the endpoint is `InService` again, on its old config. So
whoever waits compares `EndpointConfigName` with what was asked for, and says why it is another one. A config
that an update started from is never deleted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.transactions import Transaction
from pydantic import Field

from drafter.errors import FledgeError
from drafter.records import Record
from tasks.alarms import delete_alarms, sounding
from tasks.aws import Aws, AwsError, connect_aws, may_pass
from tasks.build_endpoint import EndpointPlan
from tasks.endpoint_settings import DrafterUnfit, EndpointError, EndpointRolledBack, NoCapacity, ProbeSettings
from tasks.endpoints import (
    UPDATE_TO_TAG,
    Endpoint,
    delete_and_wait,
    find_config,
    find_endpoint,
    remember_update,
    require_endpoint,
    wait_until_settled,
    write_tags,
)
from tasks.logs import flow_logger
from tasks.probe import Prober
from tasks.settings import Places

UPDATE_RUN_TAG = "fledge.update_run"
PLAN_KEY = "plan"  # under which a transaction keeps the plan that its rollback takes back
_NO_CAPACITY = ("InsufficientInstanceCapacity", "CapacityError", "nsufficient capacity")
_ROLLBACK_TIME_S = 900.0


class Standing(Record):
    """Where an endpoint stands before a deployment."""

    serves: str | None = Field(description="Config that serves; None: there is no endpoint in service.")
    ours: str | None = Field(description="Config of this deployment that it is on or moves to.")
    under_way: bool = Field(default=False, description="It moves there now.")


@task(
    name="check-endpoint",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=300,
)
def check_endpoint(endpoint_name: str, config_names: tuple[str, ...]) -> Standing:
    """Refuse an endpoint that cannot be moved now.

    Args:
        config_names: of this deployment; what leads to one of them is our own doing, and goes on.

    Raises:
        EndpointError: somebody else's update is in progress, the endpoint has failed or is being deleted, or
            its config is gone.
    """
    aws = connect_aws(Places())
    endpoint = find_endpoint(aws, endpoint_name)
    if endpoint is None:
        return Standing(serves=None, ours=None)
    names = [endpoint.config_name]
    if endpoint.busy and endpoint.status != "Creating":  # where it leads counts, not where it is
        names = [endpoint.pending_config_name or endpoint.tags.get(UPDATE_TO_TAG, "")]
    ours = next((name for name in names if name in config_names), None)
    if endpoint.status == "Failed" and ours:
        return Standing(serves=None, ours=ours)
    _require_movable(endpoint, ours)
    if endpoint.status == "InService" and find_config(aws, endpoint.config_name) is None:
        raise EndpointError(
            f"config {endpoint.config_name}, which endpoint {endpoint.name} runs, has been deleted by hand",
            "the config that serves; SageMaker updates no endpoint without it",
            f"delete the endpoint (`fledge delete {endpoint.name}`) and deploy anew",
        )
    serves = None if endpoint.status == "Creating" else endpoint.config_name
    return Standing(serves=serves, ours=ours, under_way=endpoint.busy)


def _require_movable(endpoint: Endpoint, ours: str | None) -> None:
    if endpoint.busy and ours is None:
        leads_to = f" to {endpoint.pending_config_name}" if endpoint.pending_config_name else ""
        raise EndpointError(
            f"endpoint {endpoint.name} is {endpoint.status}{leads_to}, not by this deployment",
            "an endpoint that nobody else is changing",
            "wait until it is InService (`fledge status`), then run this again",
        )
    if not endpoint.busy and endpoint.status != "InService":
        raise EndpointError(
            f"endpoint {endpoint.name} is {endpoint.status}: {endpoint.failure_reason or 'no reason is given'}",
            "an endpoint that is InService, or none of this name",
            f"delete it (`fledge delete {endpoint.name}`), or choose another endpoint_name",
        )


@task(
    name="create-model",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=300,
)
def create_model(plan: EndpointPlan) -> None:
    """Create the Model, unless it is there: its name tells its content."""
    _create(connect_aws(Places()).sagemaker.create_model, plan.create_model)


@task(
    name="create-config",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=300,
)
def create_config(plan: EndpointPlan) -> None:
    """Create the EndpointConfig, unless it is there: its name tells its content."""
    _create(connect_aws(Places()).sagemaker.create_endpoint_config, plan.create_config)


def _create(create: Callable[..., Any], request: dict[str, Any]) -> None:
    try:
        create(**request)
    except AwsError as error:
        if not error.is_existing:
            raise


@task(name="create-endpoint", cache_policy=NO_CACHE, timeout_seconds=300)
def create_endpoint(plan: EndpointPlan) -> None:
    """Create the endpoint, or find it in creation by an earlier run of this deployment."""
    aws = connect_aws(Places())
    endpoint = find_endpoint(aws, plan.endpoint_name)
    if endpoint is not None and endpoint.status == "Failed":
        delete_and_wait(aws, plan.endpoint_name)
        endpoint = None
    if endpoint is None:
        _within_quota(aws.sagemaker.create_endpoint, plan.create_endpoint)
        flow_logger().info("creating endpoint %s with %s", plan.endpoint_name, plan.config_name)


def _within_quota(ask: Callable[..., Any], request: dict[str, Any]) -> None:
    """A quota that allows no such instance is like no capacity: another type may have one.

    Raises:
        NoCapacity: the quota is used up.
    """
    try:
        ask(**request)
    except AwsError as error:
        if error.code != "ResourceLimitExceeded":
            raise
        raise NoCapacity(error.given, error.expected, error.remedy) from None


@task(name="start-update", cache_policy=NO_CACHE, timeout_seconds=300)
def start_update(plan: EndpointPlan, run_id: str) -> bool:
    """Ask SageMaker to move the endpoint; whether it has to move at all.

    An update that an earlier run of this deployment has asked for is left to go on.

    Raises:
        EndpointRolledBack: this same run has asked before, and SageMaker took it back while nobody watched.
        AwsError: SageMaker refuses the update.
    """
    aws = connect_aws(Places())
    endpoint = require_endpoint(aws, plan.endpoint_name)
    if endpoint.busy:
        flow_logger().info("endpoint %s is already %s", plan.endpoint_name, endpoint.status)
        return True
    if endpoint.config_name == plan.config_name:
        return False
    if endpoint.tags.get(UPDATE_RUN_TAG) == f"{run_id}/{plan.config_name}":
        raise rolled_back(aws, endpoint, plan, [])
    remember_update(aws, endpoint, plan.config_name, endpoint.config_name)
    _within_quota(aws.sagemaker.update_endpoint, plan.update_endpoint)
    write_tags(aws, endpoint.arn, {UPDATE_RUN_TAG: f"{run_id}/{plan.config_name}"})
    flow_logger().info(
        "moving endpoint %s from %s to %s", plan.endpoint_name, endpoint.config_name, plan.config_name
    )
    return True


@task(name="wait-for-creation", cache_policy=NO_CACHE)
def wait_for_creation(plan: EndpointPlan, deadline_s: float) -> None:
    """Wait until a new endpoint is in service; one that fails is deleted, for it blocks its name.

    Raises:
        NoCapacity: AWS has no such instance.
        EndpointError: it failed, with SageMaker's reason.
    """
    aws = connect_aws(Places())
    endpoint = wait_until_settled(aws, plan.endpoint_name, deadline_s)
    if endpoint.status == "InService" and endpoint.config_name == plan.config_name:
        return
    reason = endpoint.failure_reason or f"it is {endpoint.status}"
    failure = _failure(
        f"endpoint {plan.endpoint_name} could not be created with {plan.config_name}: {reason}"
    )
    if endpoint.status == "Failed":
        try:
            delete_and_wait(aws, plan.endpoint_name)
        except FledgeError as problem:  # the reason above is what counts
            flow_logger().warning("the failed endpoint is still there: %s", problem.given)
    raise failure


@task(name="watch-update", cache_policy=NO_CACHE)
def watch_update(
    plan: EndpointPlan,
    alarm_names: tuple[str, ...],
    prompts: tuple[str, ...],
    probing: ProbeSettings,
    deadline_s: float,
) -> None:
    """Probe both fleets while SageMaker shifts the traffic, until the update has ended as it should.

    Raises:
        NoCapacity: AWS has no such instance; the endpoint runs what it ran.
        EndpointRolledBack: SageMaker took the update back; the reason is in words.
        EndpointError: the endpoint failed, or the deadline has passed.
    """
    aws = connect_aws(Places())
    heard: dict[str, None] = {}  # an alarm may be silent again once its fleet is gone

    def listen(_: Endpoint) -> None:
        heard.update(dict.fromkeys(sounding(aws, alarm_names)))

    with Prober(aws, plan.endpoint_name, prompts, probing):
        endpoint = wait_until_settled(aws, plan.endpoint_name, deadline_s + _ROLLBACK_TIME_S, listen)
    if endpoint.status == "InService" and endpoint.config_name == plan.config_name:
        return
    if endpoint.status != "InService":
        raise _failure(f"endpoint {plan.endpoint_name} is {endpoint.status}: {endpoint.failure_reason}")
    raise rolled_back(aws, endpoint, plan, list(heard) or sounding(aws, alarm_names))


def rolled_back(aws: Aws, endpoint: Endpoint, plan: EndpointPlan, heard: list[str]) -> EndpointError:
    """The error of an update that SageMaker has taken back."""
    reasons = [text for text in (endpoint.failure_reason, "; ".join(_unique(heard))) if text]
    why = (
        ". ".join(reason.rstrip(".") for reason in reasons)
        or "SageMaker gives no reason, and no alarm sounds any more"
    )
    given = f"SageMaker took the update of {plan.endpoint_name} to {plan.served_name} ({plan.config_name}) back: {why}"
    if any(words in why for words in _NO_CAPACITY):
        return _failure(given)
    return EndpointRolledBack(
        given,
        f"the endpoint on {plan.config_name}",
        "see the reason; a worse drafter wants another one, a fleet that did not start has its log",
    )


def _unique(texts: list[str]) -> list[str]:
    """The first text of each alarm: its numbers change while it sounds."""
    return list({text.partition(":")[0]: text for text in reversed(texts)}.values())[::-1]


def _failure(given: str) -> EndpointError:
    if any(words in given for words in _NO_CAPACITY):
        return NoCapacity(
            given,
            "capacity for this instance type",
            "name further fallback_instance_types, try later, or another region",
        )
    return EndpointError(
        given, "an endpoint in service", "see the reason and the instances' logs, then deploy again"
    )


def move_back(
    aws: Aws, endpoint: Endpoint, to: str, termination_wait_s: int = 0, deadline_s: float = 3600
) -> None:
    """Move all traffic to a config that has served before, at once, and make sure of it.

    Raises:
        EndpointError: that config is gone, or the endpoint does not end on it.
    """
    if endpoint.config_name != to:
        if find_config(aws, to) is None:
            raise EndpointError(
                f"config {to}, to which {endpoint.name} should go back, has been deleted by hand",
                "the config that ran before",
                "deploy the version that you want anew; its config is made again",
            )
        remember_update(aws, endpoint, to, None)
        aws.sagemaker.update_endpoint(
            EndpointName=endpoint.name,
            EndpointConfigName=to,
            DeploymentConfig={
                "BlueGreenUpdatePolicy": {
                    "TrafficRoutingConfiguration": {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0},
                    "TerminationWaitInSeconds": termination_wait_s,
                }
            },
        )
    settled = wait_until_settled(aws, endpoint.name, deadline_s)
    if settled.status != "InService" or settled.config_name != to:
        raise EndpointError(
            f"endpoint {endpoint.name} is {settled.status} on {settled.config_name}"
            f" ({settled.failure_reason or 'no reason is given'})",
            f"the endpoint in service on {to}",
            "see the instances' logs, then roll back again",
        )


@start_update.on_rollback
@create_endpoint.on_rollback
def take_back(transaction: Transaction) -> None:
    """Undo a shift that ended well for SageMaker and badly for us; anything else SageMaker undoes itself."""
    plan = EndpointPlan.model_validate(transaction.get(PLAN_KEY))
    aws = connect_aws(Places())
    endpoint = find_endpoint(aws, plan.endpoint_name)
    if endpoint is None or endpoint.busy or endpoint.config_name != plan.config_name:
        return
    if endpoint.previous_config_name is None:
        flow_logger().warning("deleting endpoint %s: it has nothing to go back to", plan.endpoint_name)
        delete_and_wait(aws, plan.endpoint_name)
        return
    flow_logger().warning("moving %s back to %s", plan.endpoint_name, endpoint.previous_config_name)
    move_back(aws, endpoint, endpoint.previous_config_name)


@task(name="tell-outcome", cache_policy=NO_CACHE, timeout_seconds=300)
def explain_outcome(plan: EndpointPlan, problem: FledgeError) -> EndpointError:
    """The problem of a shift, with what the endpoint runs now; its alarms are not needed any more."""
    aws = connect_aws(Places())
    endpoint = find_endpoint(aws, plan.endpoint_name)
    now = f"is {endpoint.status} on {endpoint.config_name}" if endpoint else "has been deleted"
    delete_alarms(aws, [alarm["AlarmName"] for alarm in plan.alarms])
    kind = EndpointRolledBack if isinstance(problem, EndpointRolledBack) else DrafterUnfit
    return kind(f"{problem.given}. Endpoint {plan.endpoint_name} {now}", problem.expected, problem.remedy)
