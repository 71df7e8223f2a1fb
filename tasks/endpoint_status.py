"""What runs behind each endpoint: fleets, drafter versions, shares of the traffic, and what they cost. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import Field

from drafter.records import Record
from tasks.aws import Aws, AwsError
from tasks.build_endpoint import MODEL_TAG, SERVED_NAME_TAG, VERSION_TAG
from tasks.catalogue import read_catalogue
from tasks.endpoint_settings import EndpointError

TRAFFIC_WINDOW_S = 120


class FleetStatus(Record):
    """The instances of one endpoint config."""

    config_name: str
    state: str = Field(description="`serving`, or what SageMaker says of a fleet on its way in.")
    version: str | None = Field(description="Registered drafter version; None: not deployed by Fledge.")
    served_name: str | None
    model: str | None = Field(description="Catalogue entry of the target.")
    instance_type: str | None
    instance_count: int | None
    requests: int = Field(
        description=f"Requests of the last {TRAFFIC_WINDOW_S} s, as CloudWatch counts them."
    )
    share_of_traffic: float | None = Field(description="Of these requests; None: there were none.")
    usd_per_hour: float | None = Field(description="Of all its instances; None: no price is known.")


class EndpointStatus(Record):
    """An endpoint with all its fleets."""

    endpoint_name: str
    status: str = Field(description="SageMaker's EndpointStatus.")
    config_name: str
    created_at: datetime
    modified_at: datetime
    failure_reason: str | None
    fleets: tuple[FleetStatus, ...]
    usd_per_hour: float | None = Field(description="Of all fleets; None: a price is not known.")


def list_statuses(aws: Aws) -> list[EndpointStatus]:
    """Every endpoint of this account and region, by name."""
    names = [
        endpoint["EndpointName"]
        for page in aws.sagemaker.pages("list_endpoints")
        for endpoint in page["Endpoints"]
    ]
    found = (find_status(aws, name) for name in sorted(names))
    return [status for status in found if status is not None]


def read_status(aws: Aws, endpoint_name: str) -> EndpointStatus:
    """One endpoint.

    Raises:
        EndpointError: there is none of that name.
    """
    status = find_status(aws, endpoint_name)
    if status is None:
        known = ", ".join(one.endpoint_name for one in list_statuses(aws)) or "none"
        raise EndpointError(
            f"there is no endpoint {endpoint_name!r} in {aws.region}",
            f"one of: {known}",
            "deploy one (`fledge deploy`), or name another",
        )
    return status


def find_status(aws: Aws, endpoint_name: str) -> EndpointStatus | None:
    """One endpoint; None: there is none of that name."""
    try:
        described = aws.sagemaker.describe_endpoint(EndpointName=endpoint_name)
    except AwsError as error:
        if error.is_not_found:
            return None
        raise
    fleets = tuple(_fleets(aws, described))
    prices = [fleet.usd_per_hour for fleet in fleets]
    return EndpointStatus(
        endpoint_name=endpoint_name,
        status=described["EndpointStatus"],
        config_name=described["EndpointConfigName"],
        created_at=described["CreationTime"],
        modified_at=described["LastModifiedTime"],
        failure_reason=described.get("FailureReason"),
        fleets=fleets,
        usd_per_hour=None if None in prices else sum(price for price in prices if price is not None),
    )


def _fleets(aws: Aws, described: Mapping[str, Any]) -> list[FleetStatus]:
    """The fleet that serves, and the one that an update brings up."""
    pending = described.get("PendingDeploymentSummary") or {}
    summaries = [
        (described["EndpointConfigName"], "serving", described.get("ProductionVariants") or []),
        (pending.get("EndpointConfigName"), "starting", pending.get("ProductionVariants") or []),
    ]
    known = [(config, state, variants) for config, state, variants in summaries if config]
    requests = {
        config: _requests(aws, described["EndpointName"], config, variants) for config, _, variants in known
    }
    total = sum(requests.values())
    return [
        _fleet(aws, config, _state(variants, state), variants, requests[config], total)
        for config, state, variants in known
    ]


def _fleet(
    aws: Aws, config_name: str, state: str, variants: list[dict[str, Any]], requests: int, total: int
) -> FleetStatus:
    config, tags = _config_and_tags(aws, config_name)
    of_config = (config.get("ProductionVariants") or [{}])[0]
    instance_type = of_config.get("InstanceType")
    running = [one.get("CurrentInstanceCount") for one in variants if "CurrentInstanceCount" in one]
    count = running[0] if running else of_config.get("InitialInstanceCount")
    model = tags.get(MODEL_TAG)
    entry = read_catalogue().get(model or "")
    price = entry.usd_per_hour(instance_type, aws.region) if entry is not None else None
    return FleetStatus(
        config_name=config_name,
        state=state,
        version=tags.get(VERSION_TAG),
        served_name=tags.get(SERVED_NAME_TAG),
        model=model,
        instance_type=instance_type,
        instance_count=count,
        requests=requests,
        share_of_traffic=requests / total if total else None,
        usd_per_hour=None if price is None or count is None else price * count,
    )


def _config_and_tags(aws: Aws, config_name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A config as it was made; empty when somebody has deleted it under a running endpoint."""
    try:
        config = aws.sagemaker.describe_endpoint_config(EndpointConfigName=config_name)
    except AwsError as error:
        if error.is_not_found:
            return {}, {}
        raise
    pages = aws.sagemaker.pages("list_tags", ResourceArn=config["EndpointConfigArn"])
    return config, {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}


def _state(variants: list[dict[str, Any]], otherwise: str) -> str:
    """What SageMaker says last of a fleet's variants (`Baking`, `ActivatingTraffic`)."""
    said = [one["Status"] for variant in variants for one in variant.get("VariantStatus", [])]
    return str(said[-1]).lower() if said else otherwise


def _requests(aws: Aws, endpoint_name: str, config_name: str, variants: list[dict[str, Any]]) -> int:
    """Requests of a fleet in the last two minutes. Weights say what was asked for; this is what came."""
    now = datetime.now(UTC)
    dimensions = {"EndpointName": endpoint_name, "EndpointConfigName": config_name}
    counts = [
        aws.cloudwatch.get_metric_statistics(
            Namespace="AWS/SageMaker",
            MetricName="Invocations",
            Dimensions=[
                {"Name": name, "Value": value}
                for name, value in {**dimensions, "VariantName": variant["VariantName"]}.items()
            ],
            StartTime=now - timedelta(seconds=TRAFFIC_WINDOW_S),
            EndTime=now,
            Period=60,
            Statistics=["Sum"],
        )["Datapoints"]
        for variant in variants
    ]
    return round(sum(point["Sum"] for points in counts for point in points))
