"""CreateEndpoint, UpdateEndpoint and the rest: check what is asked, write it down, let `Deployments` do it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from containers.local.alarms import Alarms
from containers.local.api_errors import already_exists, in_progress, limit_exceeded, not_found, validation
from containers.local.arn import resource_arn
from containers.local.deployment import Deployments, new_share
from containers.local.faults import Faults
from containers.local.fleet import FleetSpec
from containers.local.listing import one_page
from containers.local.records import IN_PROGRESS, DeploymentRecord, EndpointRecord, VariantRecord
from containers.local.resource_operations import ResourceOperations
from containers.local.rollout import plan_rollout
from containers.local.running import RunningFleets
from containers.local.store import Resource, Store

# What SageMaker takes when an endpoint config does not say.
_DOWNLOAD_TIMEOUT_S = 3600
_STARTUP_TIMEOUT_S = 480
_RETAINABLE = ("DesiredInstanceCount", "DesiredWeight", "DataCaptureConfig")


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
        variants = _retained(self._variants(record.name, config), record, request)
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
            wanted[variant.name] = _resized(
                variant, change.get("DesiredWeight"), change.get("DesiredInstanceCount")
            )
        scaling = tuple(wanted.values())
        self._require_quota("UpdateEndpointWeightsAndCapacities", record.name, scaling)
        self._deployments.begin(record.but(status="Updating", failure_reason=None, scaling=scaling))
        return {"EndpointArn": resource_arn("endpoint", record.name)}

    async def delete_endpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        record = self._existing(request["EndpointName"])
        if record.status in IN_PROGRESS or record.ending:
            raise in_progress(record.name)
        specs = tuple(variant.spec for variant in record.variants)
        self._deployments.begin(record.but(status="Deleting", ending=specs))
        return {}

    async def describe_endpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        record = self._existing(request["EndpointName"])
        stored = self._resources.find("endpoint", record.name)
        answer = {
            "EndpointName": record.name,
            "EndpointArn": resource_arn("endpoint", record.name),
            "EndpointConfigName": record.config_name,
            "EndpointStatus": record.status,
            "CreationTime": stored.created_at,
            "LastModifiedTime": stored.modified_at,
            "ProductionVariants": [self._variant_summary(record, variant) for variant in record.variants],
            "DataCaptureConfig": _capture_summary(record),
            "FailureReason": record.failure_reason and record.failure_reason[:1024],
            "LastDeploymentConfig": record.last_settings,
            "PendingDeploymentSummary": self._pending(record),
        }
        return {name: value for name, value in answer.items() if value is not None}

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
            _variant_record(
                endpoint_name, config, variant, self._resources.find("model", variant["ModelName"]).body
            )
            for variant in config.body["ProductionVariants"]
        )

    def _variant_summary(self, record: EndpointRecord, variant: VariantRecord) -> dict[str, Any]:
        """A variant that the endpoint runs, or (while Creating) will run."""
        status, since = None, self._resources.find("endpoint", record.name).modified_at
        if record.status in {"Creating", "Updating", "Deleting"} and record.deployment is None:
            status = record.status
        wanted = {other.name: other for other in record.scaling or ()}.get(variant.name, variant)
        return self._summary(variant, wanted, 1 - new_share(record), status, since)

    def _pending(self, record: EndpointRecord) -> dict[str, Any] | None:
        deployment = record.deployment
        if deployment is None:
            return None
        status = {"creating": "Creating", "baking": "Baking", "waiting_to_end": "Baking"}[deployment.stage]
        since = deployment.stage_started_at
        summaries = [
            {
                **self._summary(variant, variant, new_share(record), status, since),
                "InstanceType": variant.spec.instance_type,
            }
            for variant in deployment.variants
        ]
        return {
            "EndpointConfigName": deployment.config_name,
            "ProductionVariants": summaries,
            "StartTime": deployment.started_at,
        }

    def _summary(
        self, variant: VariantRecord, wanted: VariantRecord, share: float, status: str | None, since: float
    ) -> dict[str, Any]:
        running = self._fleets.num_in_service(variant.spec)
        image = variant.spec.image
        summary: dict[str, Any] = {
            "VariantName": variant.name,
            "DeployedImages": [
                {"SpecifiedImage": image, "ResolvedImage": image, "ResolutionTime": variant.resolved_at}
            ],
            "CurrentWeight": variant.weight * share,
            "DesiredWeight": wanted.weight,
            "CurrentInstanceCount": running,
            "DesiredInstanceCount": wanted.spec.instance_count,
        }
        if status is not None:
            summary["VariantStatus"] = [{"Status": status, "StartTime": since}]
        if variant.from_pools:
            summary["InstancePools"] = [
                {"InstanceType": variant.spec.instance_type, "CurrentInstanceCount": running}
            ]
        return summary


def _variant_record(
    endpoint_name: str, config: Resource, variant: Mapping[str, Any], model: Mapping[str, Any]
) -> VariantRecord:
    container = model["PrimaryContainer"]
    pools = sorted(variant.get("InstancePools", []), key=lambda pool: pool["Priority"])
    types = [variant["InstanceType"]] if not pools else [pool["InstanceType"] for pool in pools]
    source = container.get("ModelDataSource", {}).get("S3DataSource", {})
    spec = FleetSpec(
        fleet_id=f"{config.name}-{variant['VariantName']}-{uuid.uuid4().hex[:8]}",
        endpoint_name=endpoint_name,
        config_name=config.name,
        variant_name=variant["VariantName"],
        instance_type=types[0],
        instance_count=variant["InitialInstanceCount"],
        image=container["Image"],
        environment=container.get("Environment", {}),
        model_data=source.get("S3Uri") or container.get("ModelDataUrl"),
        additional_sources={
            extra["ChannelName"]: extra["S3DataSource"]["S3Uri"]
            for extra in container.get("AdditionalModelDataSources", [])
        },
        download_timeout_s=variant.get("ModelDataDownloadTimeoutInSeconds", _DOWNLOAD_TIMEOUT_S),
        startup_timeout_s=variant.get("ContainerStartupHealthCheckTimeoutInSeconds", _STARTUP_TIMEOUT_S),
    )
    return VariantRecord(
        spec=spec,
        weight=variant.get("InitialVariantWeight", 1.0),
        capture=config.body.get("DataCaptureConfig"),
        resolved_at=time.time(),
        other_types=tuple(types[1:]),
        from_pools=bool(pools),
    )


def _resized(variant: VariantRecord, weight: float | None, count: int | None) -> VariantRecord:
    spec = variant.spec if count is None else variant.spec.model_copy(update={"instance_count": count})
    return variant.model_copy(update={"spec": spec, "weight": variant.weight if weight is None else weight})


def _retained(
    variants: tuple[VariantRecord, ...], record: EndpointRecord, request: Mapping[str, Any]
) -> tuple[VariantRecord, ...]:
    """RetainAllVariantProperties: weights, counts and capture of the running variants, but for the excluded."""
    if not request.get("RetainAllVariantProperties"):
        return variants
    excluded = {item["VariantPropertyType"] for item in request.get("ExcludeRetainedVariantProperties", [])}
    kept = [name for name in _RETAINABLE if name not in excluded]
    present = {variant.name: variant for variant in record.variants}
    changed = []
    for variant in variants:
        old = present.get(variant.name)
        if old is not None:
            weight = old.weight if "DesiredWeight" in kept else None
            count = old.spec.instance_count if "DesiredInstanceCount" in kept else None
            variant = _resized(variant, weight, count)
            if "DataCaptureConfig" in kept:
                variant = variant.model_copy(update={"capture": old.capture})
        changed.append(variant)
    return tuple(changed)


def _require_same_names(record: EndpointRecord, variants: tuple[VariantRecord, ...]) -> None:
    old, new = (sorted(variant.name for variant in some) for some in (record.variants, variants))
    if old != new:
        raise validation(
            f"The production variant names of the new endpoint configuration {new} must be those of the "
            f"endpoint's present one {old}."
        )


def _capture_summary(record: EndpointRecord) -> dict[str, Any] | None:
    capture = record.variants[0].capture if record.variants else None
    if capture is None:
        return None
    enabled = capture.get("EnableCapture", True)
    return {
        "EnableCapture": enabled,
        "CaptureStatus": "Started" if enabled and record.status != "Creating" else "Stopped",
        "CurrentSamplingPercentage": capture["InitialSamplingPercentage"],
        "DestinationS3Uri": capture["DestinationS3Uri"],
        "KmsKeyId": capture.get("KmsKeyId", ""),
    }
