"""Delete an endpoint, and everything in SageMaker and CloudWatch that deployments to it have made."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.alarms import alarms_of_configs, delete_alarms
from tasks.autoscaling import remove_autoscaling
from tasks.aws import Aws, connect_aws, may_pass
from tasks.endpoint_settings import EndpointError
from tasks.endpoints import BUSY, delete_and_wait, find_endpoint
from tasks.settings import Places


@task(
    name="delete-endpoint",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=1800,
)
def delete_everything(endpoint_name: str) -> tuple[str, ...]:
    """Delete an endpoint with its scaling, alarms, configs and models; returns what was deleted.

    S3 objects and registry stay. Run again, it deletes what an interrupted run has left.

    Raises:
        EndpointError: an update is in progress.
    """
    aws = connect_aws(Places())
    endpoint = find_endpoint(aws, endpoint_name)
    if endpoint is not None and endpoint.status in BUSY - {"Creating"}:
        raise EndpointError(
            f"endpoint {endpoint_name} is {endpoint.status}",
            "an endpoint that nobody is changing",
            "wait until it is InService (`fledge status`), then delete it",
        )
    deleted: list[str] = []
    remove_autoscaling(aws, endpoint_name)
    if endpoint is not None:
        delete_and_wait(aws, endpoint_name)
        deleted.append(f"endpoint {endpoint_name}")
    configs = _own_names(aws, "list_endpoint_configs", "EndpointConfigs", "EndpointConfigName", endpoint_name)
    delete_alarms(aws, alarms_of_configs(aws, configs))
    for name in configs:
        aws.sagemaker.delete_endpoint_config(EndpointConfigName=name)
        deleted.append(f"config {name}")
    for name in _own_names(aws, "list_models", "Models", "ModelName", endpoint_name):
        aws.sagemaker.delete_model(ModelName=name)
        deleted.append(f"model {name}")
    return tuple(deleted)


def _own_names(aws: Aws, operation: str, members: str, key: str, endpoint_name: str) -> list[str]:
    """Names of configs or models that deployments to this endpoint have made."""
    prefix = f"{endpoint_name}-v"
    return [
        member[key]
        for page in aws.sagemaker.pages(operation, NameContains=prefix)
        for member in page[members]
        if member[key].startswith(prefix) and _is_ours(member[key][len(prefix) :])
    ]


def _is_ours(rest: str) -> bool:
    """`7-1234abcd`: a version and a digest; another endpoint's name may begin like ours."""
    version, _, digest = rest.partition("-")
    return version.isdecimal() and len(digest) == 8
