"""DescribeEndpoint: what SageMaker tells of an endpoint, at rest and during an update."""

from __future__ import annotations

from typing import Any

from containers.local.arn import resource_arn
from containers.local.records import EndpointRecord, VariantRecord
from containers.local.running import RunningFleets
from containers.local.shares import new_share
from containers.local.store import Resource

_MAX_REASON = 1024  # characters of FailureReason
_VARIANT_STATUS = {"creating": "Creating", "baking": "Baking", "waiting_to_end": "Baking"}


def describe_endpoint(record: EndpointRecord, stored: Resource, fleets: RunningFleets) -> dict[str, Any]:
    """The answer, without the members that do not apply.

    Args:
        record: the endpoint.
        stored: the same as the store has it, with its times.
        fleets: tells how many instances are in service.
    """
    answer = {
        "EndpointName": record.name,
        "EndpointArn": resource_arn("endpoint", record.name),
        "EndpointConfigName": record.config_name,
        "EndpointStatus": record.status,
        "CreationTime": stored.created_at,
        "LastModifiedTime": stored.modified_at,
        "ProductionVariants": _present(record, stored, fleets),
        "DataCaptureConfig": _capture_summary(record),
        "FailureReason": record.failure_reason and record.failure_reason[:_MAX_REASON],
        "LastDeploymentConfig": record.last_settings,
        "PendingDeploymentSummary": _pending(record, fleets),
    }
    return {name: value for name, value in answer.items() if value is not None}


def _present(record: EndpointRecord, stored: Resource, fleets: RunningFleets) -> list[dict[str, Any]]:
    """The variants that the endpoint runs, or (while Creating) will run."""
    status = None
    if record.status in {"Creating", "Updating", "Deleting"} and record.deployment is None:
        status = {"Status": record.status, "StartTime": stored.modified_at}
    wanted = {variant.name: variant for variant in record.scaling or ()}
    share = 1 - new_share(record)
    return [
        _summary(variant, wanted.get(variant.name, variant), share, status, fleets)
        for variant in record.variants
    ]


def _pending(record: EndpointRecord, fleets: RunningFleets) -> dict[str, Any] | None:
    deployment = record.deployment
    if deployment is None:
        return None
    status = {"Status": _VARIANT_STATUS[deployment.stage], "StartTime": deployment.stage_started_at}
    summaries = [
        {
            **_summary(variant, variant, new_share(record), status, fleets),
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
    variant: VariantRecord,
    wanted: VariantRecord,
    share: float,
    status: dict[str, Any] | None,
    fleets: RunningFleets,
) -> dict[str, Any]:
    """One variant: what it is, and what it is on its way to."""
    running, image = fleets.num_in_service(variant.spec), variant.spec.image
    resolved = {"SpecifiedImage": image, "ResolvedImage": image, "ResolutionTime": variant.resolved_at}
    summary: dict[str, Any] = {
        "VariantName": variant.name,
        "DeployedImages": [resolved],
        "CurrentWeight": variant.weight * share,
        "DesiredWeight": wanted.weight,
        "CurrentInstanceCount": running,
        "DesiredInstanceCount": wanted.spec.instance_count,
    }
    if status is not None:
        summary["VariantStatus"] = [status]
    if variant.from_pools:
        pool = {"InstanceType": variant.spec.instance_type, "CurrentInstanceCount": running}
        summary["InstancePools"] = [pool]
    return summary


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
