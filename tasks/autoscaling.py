"""Application Auto Scaling of an endpoint's variant: registered anew with each deployment, or taken away."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.aws import Aws, connect_aws, may_pass
from tasks.build_rollout import VARIANT
from tasks.endpoint_settings import AutoscalingSettings
from tasks.settings import Places

_DIMENSION = "sagemaker:variant:DesiredInstanceCount"
_POLICY = "fledge-invocations"


@task(
    name="set-autoscaling",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=may_pass,
    timeout_seconds=300,
)
def set_autoscaling(endpoint_name: str, settings: AutoscalingSettings | None) -> None:
    """Scale as the settings say; without settings, not at all."""
    aws = connect_aws(Places())
    if settings is None:
        remove_autoscaling(aws, endpoint_name)
        return
    target = _target(endpoint_name)
    aws.autoscaling.register_scalable_target(
        **target, MinCapacity=settings.min_instances, MaxCapacity=settings.max_instances
    )
    aws.autoscaling.put_scaling_policy(**target, **_policy(settings))


def remove_autoscaling(aws: Aws, endpoint_name: str) -> None:
    """Take the scaling away, if there is any."""
    target = _target(endpoint_name)
    found = aws.autoscaling.describe_scalable_targets(
        ServiceNamespace=target["ServiceNamespace"],
        ResourceIds=[target["ResourceId"]],
        ScalableDimension=target["ScalableDimension"],
    )
    if found["ScalableTargets"]:
        aws.autoscaling.deregister_scalable_target(**target)


def _target(endpoint_name: str) -> dict[str, str]:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint_name}/variant/{VARIANT}",
        "ScalableDimension": _DIMENSION,
    }


def _policy(settings: AutoscalingSettings) -> dict[str, Any]:
    return {
        "PolicyName": _POLICY,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": settings.invocations_per_instance,
            "PredefinedMetricSpecification": {
                "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
            },
            "ScaleInCooldown": settings.scale_in_cooldown_s,
            "ScaleOutCooldown": settings.scale_out_cooldown_s,
        },
    }
