"""Scaling of a variant, against moto's Application Auto Scaling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from tasks.autoscaling import set_autoscaling
from tasks.endpoint_settings import AutoscalingSettings


@pytest.fixture
def autoscaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Application Auto Scaling, with an endpoint that it may scale."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("SAGEMAKER", "APPLICATION_AUTO_SCALING"):
        monkeypatch.delenv(f"AWS_ENDPOINT_URL_{name}", raising=False)
    with mock_aws():
        sagemaker = boto3.client("sagemaker", region_name="us-east-1")
        role = "arn:aws:iam::123456789012:role/fledge"
        sagemaker.create_model(ModelName="m", ExecutionRoleArn=role, PrimaryContainer={"Image": "i"})
        variant = {
            "VariantName": "AllTraffic",
            "ModelName": "m",
            "InitialInstanceCount": 1,
            "InstanceType": "ml.m5.large",
            "InitialVariantWeight": 1.0,
        }
        sagemaker.create_endpoint_config(EndpointConfigName="c", ProductionVariants=[variant])
        sagemaker.create_endpoint(EndpointName="birds", EndpointConfigName="c")
        yield boto3.client("application-autoscaling", region_name="us-east-1")


def targets(autoscaling: Any) -> list[tuple[str, int, int]]:
    found = autoscaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    return [(one["ResourceId"], one["MinCapacity"], one["MaxCapacity"]) for one in found]


def test_the_variant_scales_as_the_settings_say_and_a_repetition_changes_nothing(autoscaling: Any) -> None:
    settings = AutoscalingSettings(min_instances=1, max_instances=3, invocations_per_instance=40)
    for _ in range(2):
        set_autoscaling.fn("birds", settings)
        assert targets(autoscaling) == [("endpoint/birds/variant/AllTraffic", 1, 3)]
        (policy,) = autoscaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
        configuration = policy["TargetTrackingScalingPolicyConfiguration"]
        assert configuration["TargetValue"] == 40
        assert configuration["PredefinedMetricSpecification"] == {
            "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
        }


def test_without_settings_it_is_taken_away_if_it_is_there(autoscaling: Any) -> None:
    set_autoscaling.fn("birds", None)
    set_autoscaling.fn("birds", AutoscalingSettings())
    set_autoscaling.fn("birds", None)
    assert targets(autoscaling) == []


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValueError, match="min_instances must not exceed max_instances"):
        AutoscalingSettings(min_instances=3, max_instances=2)
