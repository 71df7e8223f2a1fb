"""A DeploymentConfig as a plan: how much traffic moves when, how long it is watched, and by which alarms.

    ALL_AT_ONCE  100 %, wait
    CANARY       CanarySize, wait, 100 %, wait
    LINEAR       LinearStepSize, wait, twice that, wait, ..., 100 %, wait

Then TerminationWaitInSeconds, in which the old fleet still stands and the alarms are still watched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_EXECUTION_S = 28_800
_MAX_CANARY_SHARE = 0.5
_LINEAR_SHARES = (0.1, 0.5)


@dataclass(frozen=True)
class TrafficStep:
    """Move `share` (0 to 1) of the traffic to the new fleet, then watch it for `wait_s`."""

    share: float
    wait_s: int


@dataclass(frozen=True)
class Rollout:
    """The plan of one update."""

    steps: tuple[TrafficStep, ...]
    termination_wait_s: int
    max_execution_s: int
    alarms: tuple[str, ...]

    @property
    def total_wait_s(self) -> int:
        return self.termination_wait_s + sum(step.wait_s for step in self.steps)


def plan_rollout(settings: Mapping[str, Any] | None, instance_count: int) -> Rollout:
    """Read a DeploymentConfig; None is all at once, unwatched, as UpdateEndpoint without one.

    Args:
        settings: DeploymentConfig of the request.
        instance_count: instances of the new fleet, which sizes in INSTANCE_COUNT are a share of.

    Raises:
        ValueError: sizes or time limits that SageMaker refuses; the message is in its terms.
    """
    settings = settings or {}
    blue_green, rolling = settings.get("BlueGreenUpdatePolicy"), settings.get("RollingUpdatePolicy")
    if blue_green and rolling:
        raise ValueError("Specify either BlueGreenUpdatePolicy or RollingUpdatePolicy, not both.")
    policy: Mapping[str, Any] = blue_green or rolling or {}
    if rolling:
        steps = _rolling_steps(rolling, instance_count)
    else:
        steps = _traffic_steps(policy.get("TrafficRoutingConfiguration"), instance_count)
    alarms = settings.get("AutoRollbackConfiguration", {}).get("Alarms", ())
    rollout = Rollout(
        steps,
        int(policy.get("TerminationWaitInSeconds", 0)),
        int(policy.get("MaximumExecutionTimeoutInSeconds", DEFAULT_MAX_EXECUTION_S)),
        tuple(alarm["AlarmName"] for alarm in alarms if "AlarmName" in alarm),
    )
    if rollout.total_wait_s >= rollout.max_execution_s:
        raise ValueError(
            f"MaximumExecutionTimeoutInSeconds ({rollout.max_execution_s}) must be larger than the total "
            f"waiting time of the deployment ({rollout.total_wait_s})."
        )
    return rollout


def _traffic_steps(routing: Mapping[str, Any] | None, instance_count: int) -> tuple[TrafficStep, ...]:
    if routing is None:
        return (TrafficStep(1.0, 0),)
    wait_s, kind = int(routing["WaitIntervalInSeconds"]), routing["Type"]
    sizes = {"CANARY": "CanarySize", "LINEAR": "LinearStepSize"}
    for name in sizes.values():
        if (name == sizes.get(kind)) != (name in routing):
            rule = "is required" if name == sizes.get(kind) else "is not allowed"
            raise ValueError(f"{name} {rule} when the traffic routing type is {kind}.")
    if kind == "ALL_AT_ONCE":
        return (TrafficStep(1.0, wait_s),)
    share = _share(routing[sizes[kind]], sizes[kind], instance_count)
    if kind == "CANARY":
        _require_share("CanarySize", share, 0.0, _MAX_CANARY_SHARE)
        return TrafficStep(share, wait_s), TrafficStep(1.0, wait_s)
    _require_share("LinearStepSize", share, *_LINEAR_SHARES)
    return _equal_steps(share, wait_s)


def _rolling_steps(policy: Mapping[str, Any], instance_count: int) -> tuple[TrafficStep, ...]:
    """A batch of new instances takes its share of the traffic, then the next."""
    size = policy["MaximumBatchSize"]
    share = _share(size, "MaximumBatchSize", instance_count)
    _require_share("MaximumBatchSize", share, 0.05, 0.5)
    return _equal_steps(share, int(policy["WaitIntervalInSeconds"]))


def _equal_steps(share: float, wait_s: int) -> tuple[TrafficStep, ...]:
    count = math.ceil(1 / share - 1e-9)
    return tuple(TrafficStep(min(1.0, share * number), wait_s) for number in range(1, count + 1))


def _share(size: Mapping[str, Any], name: str, instance_count: int) -> float:
    if size["Type"] == "CAPACITY_PERCENT":
        if not 1 <= size["Value"] <= 100:
            raise ValueError(f"{name} in CAPACITY_PERCENT must be between 1 and 100, not {size['Value']}.")
        return float(size["Value"]) / 100
    if not 1 <= size["Value"] <= instance_count:
        raise ValueError(
            f"{name} of {size['Value']} instances must be between 1 and the fleet's {instance_count} instances."
        )
    return float(size["Value"]) / instance_count


def _require_share(name: str, share: float, smallest: float, largest: float) -> None:
    if not smallest <= share <= largest:
        raise ValueError(
            f"{name} must be between {smallest:.0%} and {largest:.0%} of the variant's total instance count, "
            f"not {share:.0%}."
        )
