"""Which fleets answer for an endpoint, and with what weight: read off its record, at every stage of an update."""

from __future__ import annotations

from typing import Any

from containers.local.fleet_spec import FleetSpec
from containers.local.records import EndpointRecord
from containers.local.rollout import plan_rollout


def new_share(record: EndpointRecord) -> float:
    """Share of an endpoint's traffic, 0 to 1, that the fleets of its deployment take now."""
    deployment = record.deployment
    if deployment is None or deployment.num_steps_done == 0:
        return 0.0
    steps = plan_rollout(deployment.settings, deployment.instance_count).steps
    return steps[deployment.num_steps_done - 1].share


def weighted_fleets(record: EndpointRecord) -> list[tuple[FleetSpec, float, dict[str, Any] | None]]:
    """The fleets that answer for an endpoint, with their weights and data capture.

    A fleet that stands by with weight 0 is listed: the router turns to it when nobody else can answer.
    """
    if record.status in {"Creating", "Deleting", "Failed"}:
        return []
    share = new_share(record)
    fleets = [(variant, variant.weight * (1 - share)) for variant in record.variants]
    if record.deployment is not None and record.deployment.num_steps_done:
        fleets += [(variant, variant.weight * share) for variant in record.deployment.variants]
    return [(variant.spec, weight, variant.capture) for variant, weight in fleets]
