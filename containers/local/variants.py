"""From an endpoint config's production variants to what is to run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from containers.local.fleet_spec import FleetSpec
from containers.local.records import EndpointRecord, VariantRecord
from containers.local.store import Resource

# What SageMaker takes when an endpoint config does not say.
_DOWNLOAD_TIMEOUT_S = 3600
_STARTUP_TIMEOUT_S = 480
_RETAINABLE = ("DesiredInstanceCount", "DesiredWeight", "DataCaptureConfig")


def variant_record(
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


def resized(variant: VariantRecord, weight: float | None, count: int | None) -> VariantRecord:
    spec = variant.spec if count is None else variant.spec.model_copy(update={"instance_count": count})
    return variant.model_copy(update={"spec": spec, "weight": variant.weight if weight is None else weight})


def retained(
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
            variant = resized(variant, weight, count)
            if "DataCaptureConfig" in kept:
                variant = variant.model_copy(update={"capture": old.capture})
        changed.append(variant)
    return tuple(changed)
