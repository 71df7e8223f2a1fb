"""CreateEndpoint, UpdateEndpoint and the rest: check what is asked, write it down, let `Deployments` do it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from containers.local.alarms import Alarms
from containers.local.api_errors import already_exists, in_progress, limit_exceeded, not_found, validation
from containers.local.arn import resource_arn
from containers.local.deployment import Deployments
from containers.local.endpoint_description import describe_endpoint
from containers.local.faults import Faults
from containers.local.listing import one_page
from containers.local.records import IN_PROGRESS, DeploymentRecord, EndpointRecord, VariantRecord
from containers.local.resource_operations import ResourceOperations
from containers.local.rollout import plan_rollout
from containers.local.running import RunningFleets
from containers.local.store import Resource, Store
from containers.local.variants import resized, retained, variant_record


class EndpointOperations:
    """The operations on endpoints.

    Args:
        resources: finds configs and models, keeps tags.
        deployments: brings about what is asked.
        fleets: tells how many instances are in service.
        alarms: knows which alarms exist.
        faults: quotas that are used up on order.
    """

    def __init__(
        self,
        store: Store,
        resources: ResourceOperations,
        deployments: Deployments,
        fleets: RunningFleets,
        alarms: Alarms,
        faults: Faults,
    ) -> None:
        self._store = store
        self._resources = resources
        self._deployments = deployments
        self._fleets = fleets
        self._alarms = alarms
        self._faults = faults

    async def create_endpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["EndpointName"]
        if self._deployments.record(name) is not None:
            raise already_exists("endpoint", name)
        config = self._resources.find("endpoint-config", request["EndpointConfigName"])
        variants = self._variants(name, config)
        arn = resource_arn("endpoint", name)
        tags = request.get("Tags", [])
        self._resources.check_tags(arn, tags)
        settings = request.get("DeploymentConfig")
        await self._check_settings(settings, variants)
        self._require_quota("CreateEndpoint", name, variants)
        if self._deployments.record(name) is not None:  # somebody else was faster while alarms were looked up
            raise already_exists("endpoint", name)
        self._resources.put_tags(arn, tags)
        record = EndpointRecord(
            name=name, config_name=config.name, status="Creating", variants=variants, last_settings=settings
        )
        self._deployments.begin(record)
        return {"EndpointArn": arn}

    async def update_endpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        record = self._at_rest(request["EndpointName"])
        config = self._resources.find("endpoint-config", request["EndpointConfigName"])
        self._resources.find("endpoint-config", record.config_name)  # SageMaker needs the present one too
        variants = retained(self._variants(record.name, config), record, request)
        _require_same_names(record, variants)
        settings = request.get("DeploymentConfig")
        if settings is None and request.get("RetainDeploymentConfig"):
            settings = record.last_settings
        await self._check_settings(settings, variants)
        self._require_quota("UpdateEndpoint", record.name, variants)
        now = time.time()
        deployment = DeploymentRecord(
            config_name=config.name,
            variants=variants,
            settings=settings,
            started_at=now,
            stage_started_at=now,
        )
        record = self._at_rest(record.name)  # once more: looking up alarms took a moment
        self._deployments.begin(record.but(status="Updating", failure_reason=None, deployment=deployment))
        return {"EndpointArn": resource_arn("endpoint", record.name)}

    async def update_endpoint_weights_and_capacities(self, request: dict[str, Any]) -> dict[str, Any]:
        record = self._at_rest(request["EndpointName"])
        wanted = {variant.name: variant for variant in record.variants}
        for change in request["DesiredWeightsAndCapacities"]:
            variant = wanted.get(change["VariantName"])
            if variant is None:
                arn = resource_arn("endpoint", record.name)
                raise validation(f'Could not find variant "{change["VariantName"]}" of endpoint "{arn}".')
            if "ServerlessUpdateConfig" in change:
                raise validation("ServerlessUpdateConfig is not supported by the SageMaker of this machine.")
            wanted[variant.name] = resized(
                variant, change.get("DesiredWeight"), change.get("DesiredInstanceCount")
            )
        scaling = tuple(wanted.values())
        self._require_quota("UpdateEndpointWeightsAndCapacities", record.name, scaling)
        self._deployments.begin(record.but(status="Updating", failure_reason=None, scaling=scaling))
        return {"EndpointArn": resource_arn("endpoint", record.name)}

    async def delete_endpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        record = self._existing(request["EndpointName"])
        if record.status in IN_PROGRESS:
            raise in_progress(record.name)
        specs = {spec.fleet_id: spec for spec in record.ending}
        specs |= {variant.spec.fleet_id: variant.spec for variant in record.variants}
        self._deployments.begin(record.but(status="Deleting", ending=tuple(specs.values())))
        return {}

    async def describe_endpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        record = self._existing(request["EndpointName"])
        stored = self._resources.find("endpoint", record.name)
        return describe_endpoint(record, stored, self._fleets)

    async def list_endpoints(self, request: dict[str, Any]) -> dict[str, Any]:
        page, token = one_page(self._store.all("endpoint"), request)
        summaries = [
            {
                "EndpointName": item.name,
                "EndpointArn": resource_arn("endpoint", item.name),
                "CreationTime": item.created_at,
                "LastModifiedTime": item.modified_at,
                "EndpointStatus": item.body["status"],
            }
            for item in page
        ]
        return {"Endpoints": summaries, **({"NextToken": token} if token else {})}

    def _existing(self, name: str) -> EndpointRecord:
        record = self._deployments.record(name)
        if record is None:
            raise not_found("endpoint", name)
        return record

    def _at_rest(self, name: str) -> EndpointRecord:
        """An endpoint that may be changed.

        Raises:
            ApiError: there is none, something is under way, or it failed and can only be deleted.
        """
        record = self._existing(name)
        if record.status in IN_PROGRESS:
            raise in_progress(name)
        if record.status == "Failed":
            arn = resource_arn("endpoint", name)
            raise validation(f'Cannot update failed endpoint "{arn}": it can only be deleted.')
        return record

    async def _check_settings(
        self, settings: Mapping[str, Any] | None, variants: tuple[VariantRecord, ...]
    ) -> None:
        count = sum(variant.spec.instance_count for variant in variants)
        try:
            rollout = plan_rollout(settings, count)
        except ValueError as error:
            raise validation(str(error)) from None
        missing = await self._alarms.missing(rollout.alarms)
        if missing:
            raise validation(
                f"Could not find CloudWatch alarms of AutoRollbackConfiguration: {', '.join(missing)}."
            )

    def _require_quota(self, operation: str, name: str, variants: tuple[VariantRecord, ...]) -> None:
        config_name = variants[0].spec.config_name
        if self._faults.take("quota", name, config_name, operation) is not None:
            raise limit_exceeded(f"{variants[0].spec.instance_type} for endpoint usage")

    def _variants(self, endpoint_name: str, config: Resource) -> tuple[VariantRecord, ...]:
        return tuple(
            variant_record(
                endpoint_name, config, variant, self._resources.find("model", variant["ModelName"]).body
            )
            for variant in config.body["ProductionVariants"]
        )


def _require_same_names(record: EndpointRecord, variants: tuple[VariantRecord, ...]) -> None:
    old, new = (sorted(variant.name for variant in some) for some in (record.variants, variants))
    if old != new:
        raise validation(
            f"The production variant names of the new endpoint configuration {new} must be those of the "
            f"endpoint's present one {old}."
        )
