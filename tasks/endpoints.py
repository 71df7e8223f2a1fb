"""Endpoints as SageMaker describes them, and what Fledge writes on them.

What must survive a kill stands in an endpoint's tags: where an update leads, and what a rollback goes back
to. Tags are written before the update starts; which of them counts follows from the config that serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.aws import Aws, AwsError, connect_aws
from tasks.build_endpoint import MODEL_TAG, SERVED_NAME_TAG, VERSION_TAG
from tasks.catalogue import read_catalogue
from tasks.endpoint_settings import EndpointError, EndpointRecord
from tasks.logs import flow_logger
from tasks.settings import Places

POLL_S = 2.0
TELL_EVERY_S = 30.0
PREVIOUS_TAG = "fledge.previous_config"
UPDATE_TO_TAG = "fledge.update_to"
UPDATE_FROM_TAG = "fledge.update_from"
BUSY = {"Creating", "Updating", "SystemUpdating", "RollingBack"}


@dataclass(frozen=True)
class Endpoint:
    """An endpoint as SageMaker describes it, and its tags."""

    name: str
    arn: str
    status: str
    config_name: str
    pending_config_name: str | None
    failure_reason: str | None
    tags: dict[str, str]
    description: dict[str, Any]

    @property
    def busy(self) -> bool:
        return self.status in BUSY

    @property
    def previous_config_name(self) -> str | None:
        """The config that ran before the present one; None: nobody knows of one."""
        if self.tags.get(UPDATE_TO_TAG) == self.config_name:
            return self.tags.get(UPDATE_FROM_TAG) or None
        return self.tags.get(PREVIOUS_TAG) or None


def find_endpoint(aws: Aws, name: str) -> Endpoint | None:
    """The endpoint of this name, or None."""
    try:
        description = aws.sagemaker.describe_endpoint(EndpointName=name)
        tags = read_tags(aws, description["EndpointArn"])
    except AwsError as error:
        if error.is_not_found:  # also when it vanished between the two
            return None
        raise
    pending = description.get("PendingDeploymentSummary") or {}
    return Endpoint(
        name=name,
        arn=description["EndpointArn"],
        status=description["EndpointStatus"],
        config_name=description.get("EndpointConfigName", ""),
        pending_config_name=pending.get("EndpointConfigName"),
        failure_reason=description.get("FailureReason"),
        tags=tags,
        description=description,
    )


def require_endpoint(aws: Aws, name: str) -> Endpoint:
    """The endpoint of this name.

    Raises:
        EndpointError: there is none.
    """
    endpoint = find_endpoint(aws, name)
    if endpoint is None:
        raise EndpointError(
            f"there is no endpoint {name!r} in {aws.region}",
            "an endpoint that exists",
            "see `fledge status` for those that do, or deploy one with `fledge deploy`",
        )
    return endpoint


def read_tags(aws: Aws, arn: str) -> dict[str, str]:
    """The tags of a resource."""
    return {
        tag["Key"]: tag["Value"]
        for page in aws.sagemaker.pages("list_tags", ResourceArn=arn)
        for tag in page["Tags"]
    }


def write_tags(aws: Aws, arn: str, tags: dict[str, str]) -> None:
    """Set tags of a resource; others stay."""
    aws.sagemaker.add_tags(
        ResourceArn=arn, Tags=[{"Key": key, "Value": value} for key, value in tags.items()]
    )


def list_endpoints() -> list[EndpointRecord]:
    """Every endpoint that Fledge has made, newest first."""
    aws = connect_aws(Places())
    names = [
        endpoint["EndpointName"]
        for page in aws.sagemaker.pages("list_endpoints", SortBy="CreationTime", SortOrder="Descending")
        for endpoint in page["Endpoints"]
    ]
    found = (find_endpoint(aws, name) for name in names)
    return [record_of(aws, one) for one in found if one is not None and VERSION_TAG in one.tags]


def describe_endpoint(name: str) -> EndpointRecord:
    """One endpoint.

    Raises:
        EndpointError: there is none of this name.
    """
    aws = connect_aws(Places())
    return record_of(aws, require_endpoint(aws, name))


def find_config(aws: Aws, name: str) -> dict[str, Any] | None:
    """A config as SageMaker describes it; None: it has been deleted."""
    try:
        return dict(aws.sagemaker.describe_endpoint_config(EndpointConfigName=name))
    except AwsError as error:
        if error.is_not_found:
            return None
        raise


def record_of(aws: Aws, endpoint: Endpoint) -> EndpointRecord:
    """What a person is told of an endpoint. Version and model are those of the config that serves."""
    config = find_config(aws, endpoint.config_name) if endpoint.config_name else None
    tags = read_tags(aws, config["EndpointConfigArn"]) if config else {}
    variant = config["ProductionVariants"][0] if config else {}
    running = (endpoint.description.get("ProductionVariants") or [{}])[0]
    count = running.get("CurrentInstanceCount", variant.get("InitialInstanceCount"))
    entry = read_catalogue().get(tags.get(MODEL_TAG, ""))
    price = entry.usd_per_hour(variant.get("InstanceType"), aws.region) if entry else None
    return EndpointRecord(
        endpoint_name=endpoint.name,
        status=endpoint.status,
        config_name=endpoint.config_name,
        previous_config_name=endpoint.previous_config_name,
        version=tags.get(VERSION_TAG),
        served_name=tags.get(SERVED_NAME_TAG),
        model=tags.get(MODEL_TAG),
        instance_type=variant.get("InstanceType"),
        instance_count=count,
        created_at=endpoint.description["CreationTime"].isoformat(),
        failure_reason=endpoint.failure_reason,
        pending_config_name=endpoint.pending_config_name,
        progress=progress_of(endpoint) if endpoint.busy else None,
        usd_per_hour=price * count if price is not None and count else None,
    )


def remember_update(aws: Aws, endpoint: Endpoint, to: str, back_to: str | None) -> None:
    """Write down where an update leads and what a rollback would go back to, before the update starts."""
    write_tags(
        aws,
        endpoint.arn,
        {
            PREVIOUS_TAG: endpoint.previous_config_name or "",
            UPDATE_FROM_TAG: back_to or "",
            UPDATE_TO_TAG: to,
        },
    )


def wait_until_settled(
    aws: Aws, endpoint_name: str, deadline_s: float, look: Callable[[Endpoint], None] = lambda endpoint: None
) -> Endpoint:
    """Wait until SageMaker is done with the endpoint, telling of each change.

    Args:
        look: called with each description.

    Raises:
        EndpointError: it took longer than the deadline, or the endpoint has vanished.
    """
    started = told_at = time.monotonic()
    told = ""
    while True:
        endpoint = require_endpoint(aws, endpoint_name)
        look(endpoint)
        if not endpoint.busy:
            return endpoint
        elapsed_s = time.monotonic() - started
        now = progress_of(endpoint)
        if now != told or time.monotonic() - told_at > TELL_EVERY_S:
            flow_logger().info("endpoint %s after %.0f s: %s", endpoint_name, elapsed_s, now)
            told, told_at = now, time.monotonic()
        if elapsed_s > deadline_s:
            raise EndpointError(
                f"endpoint {endpoint_name} is still {now} after {elapsed_s:.0f} s",
                f"an end within {deadline_s:.0f} s",
                "see `fledge status` and the instances' logs; running this again goes on waiting",
            )
        time.sleep(POLL_S)


def progress_of(endpoint: Endpoint) -> str:
    """`Updating to fledge-v2-1234abcd: Baking (10% of the traffic)`, as far as SageMaker says."""
    words = endpoint.status
    pending = endpoint.description.get("PendingDeploymentSummary") or {}
    if endpoint.pending_config_name:
        words += f" to {endpoint.pending_config_name}"
    for variant in pending.get("ProductionVariants", []):
        for status in variant.get("VariantStatus", []):
            words += f": {status['Status']}"
            if message := status.get("StatusMessage"):
                words += f" ({message})"
    return words


def delete_and_wait(aws: Aws, endpoint_name: str, deadline_s: float = 900) -> None:
    """Delete an endpoint and wait until its name is free; one that is being changed, as soon as that is over."""
    deadline = time.monotonic() + deadline_s
    while (endpoint := find_endpoint(aws, endpoint_name)) is not None:
        if endpoint.status != "Deleting":
            _ask_to_delete(aws, endpoint_name)
        if time.monotonic() > deadline:
            raise EndpointError(
                f"endpoint {endpoint_name} is still {endpoint.status} after {deadline_s:.0f} s",
                "it to be gone",
                "wait, and run this again",
            )
        time.sleep(POLL_S)


def _ask_to_delete(aws: Aws, endpoint_name: str) -> None:
    try:
        aws.sagemaker.delete_endpoint(EndpointName=endpoint_name)
    except AwsError as error:
        if not (error.is_not_found or "in-progress" in error.message):
            raise
