"""What is known of an endpoint, as it is stored: its variants, and the deployment under way, if any.

Records hold no processes. From a record alone a restarted server finds the fleets again and goes on.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from containers.local.fleet_spec import FleetSpec

# Where a deployment stands. Once decided it leaves the record: a success becomes the endpoint's variants, a
# failure its FailureReason, and the fleets that lost are `ending`.
Stage = Literal["creating", "baking", "waiting_to_end"]

# EndpointStatus in which SageMaker takes no further change.
IN_PROGRESS = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})


class Record(BaseModel):
    """Frozen and strict: a changed record is a new record, stored whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class VariantRecord(Record):
    """One production variant as it runs, or is meant to run.

    Args:
        spec: its fleet.
        weight: its share of the traffic, relative to the other variants' weights.
        capture: DataCaptureConfig of the endpoint config that it came from.
        resolved_at: when its image was looked up, seconds since the epoch.
        other_types: instance types to turn to, in this order, where there is no capacity.
        from_pools: the config named InstancePools in place of an InstanceType.
    """

    spec: FleetSpec
    weight: float
    capture: dict[str, Any] | None = None
    resolved_at: float
    other_types: tuple[str, ...] = ()
    from_pools: bool = False

    @property
    def name(self) -> str:
        return self.spec.variant_name

    def on_next_type(self) -> VariantRecord | None:
        """The same variant on the next instance type of its pools; None when there is none."""
        if not self.other_types:
            return None
        spec = self.spec.model_copy(update={"instance_type": self.other_types[0]})
        return self.model_copy(update={"spec": spec, "other_types": self.other_types[1:]})


class DeploymentRecord(Record):
    """An update under way: what runs besides the endpoint's own variants.

    Args:
        config_name: the endpoint config that is being deployed.
        variants: its fleets.
        settings: DeploymentConfig of the request; None: all at once, unwatched.
        started_at: seconds since the epoch.
        stage: what it is doing, since `stage_started_at`.
        num_steps_done: traffic steps taken; the last one taken is what bakes.
    """

    config_name: str
    variants: tuple[VariantRecord, ...]
    settings: dict[str, Any] | None
    started_at: float
    stage: Stage = "creating"
    stage_started_at: float
    num_steps_done: int = 0

    @property
    def instance_count(self) -> int:
        return sum(variant.spec.instance_count for variant in self.variants)


class EndpointRecord(Record):
    """One endpoint.

    Args:
        status: SageMaker's EndpointStatus.
        variants: what serves; during a deployment the old fleets.
        failure_reason: why the last change did not happen.
        deployment: the update under way.
        scaling: variants as UpdateEndpointWeightsAndCapacities wants them, until they are.
        ending: fleets to drain and end; what comes after is in service.
        last_settings: LastDeploymentConfig.
    """

    name: str
    config_name: str
    status: str
    variants: tuple[VariantRecord, ...]
    failure_reason: str | None = None
    deployment: DeploymentRecord | None = None
    scaling: tuple[VariantRecord, ...] | None = None
    ending: tuple[FleetSpec, ...] = ()
    last_settings: dict[str, Any] | None = None

    def but(self, **changes: Any) -> EndpointRecord:
        """This record with some fields changed."""
        return self.model_copy(update=changes)
