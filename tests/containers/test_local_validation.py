"""Requests against botocore's model of SageMaker, in SageMaker's words."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.service_model import problems, validation_message

ROLE = "arn:aws:iam::123456789012:role/x"


def model(**container: Any) -> dict[str, Any]:
    return {"ModelName": "m", "ExecutionRoleArn": ROLE, "PrimaryContainer": {"Image": "i", **container}}


def config(**variant: Any) -> dict[str, Any]:
    fields = {"VariantName": "v", "ModelName": "m", "InitialInstanceCount": 1, "InstanceType": "ml.g6.xlarge"}
    return {"EndpointConfigName": "c", "ProductionVariants": [{**fields, **variant}]}


def update(**deployment: Any) -> dict[str, Any]:
    return {"EndpointName": "e", "EndpointConfigName": "c", "DeploymentConfig": deployment}


def routing(**fields: Any) -> dict[str, Any]:
    return {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": {"Type": "CANARY", "WaitIntervalInSeconds": 60, **fields}
        }
    }


def alarms(count: int) -> dict[str, Any]:
    return {"AutoRollbackConfiguration": {"Alarms": [{"AlarmName": f"a{number}"} for number in range(count)]}}


SOURCE = {"S3Uri": "s3://b/p/", "S3DataType": "S3Prefix", "CompressionType": "None"}


@pytest.mark.parametrize(
    ("operation", "request_"),
    [
        ("CreateModel", model(Environment={f"V{number}": "x" * 1024 for number in range(100)})),
        ("CreateModel", model(AdditionalModelDataSources=[{"ChannelName": "eagle", "S3DataSource": SOURCE}])),
        ("CreateEndpointConfig", config(InitialVariantWeight=1)),
        ("UpdateEndpoint", update(**routing(), **alarms(10))),
        ("AddTags", {"ResourceArn": "arn:aws:sagemaker:r:123456789012:model/m", "Tags": []}),
        ("CreateModel", {**model(), "Tags": [{"Key": "fledge.approver", "Value": "Zoë Müller 東京"}]}),
        ("ListModels", {}),
    ],
)
def test_what_sagemaker_takes_has_no_problems(operation: str, request_: dict[str, Any]) -> None:
    assert problems("sagemaker", operation, request_) == []


@pytest.mark.parametrize(
    ("operation", "request_", "path", "constraint"),
    [
        ("CreateModel", {}, "modelName", "Member must not be null"),
        (
            "CreateModel",
            {"ModelName": "a" * 64},
            "modelName",
            "Member must have length less than or equal to 63",
        ),
        (
            "CreateModel",
            {"ModelName": "a_b"},
            "modelName",
            "Member must satisfy regular expression pattern: ",
        ),
        (
            "CreateModel",
            model(Environment={f"V{number}": "" for number in range(101)}),
            "primaryContainer.environment",
            "Member must have length less than or equal to 100",
        ),
        (
            "CreateModel",
            model(Environment={"A": "x" * 1025}),
            "primaryContainer.environment",
            "Map value must satisfy constraint: [Member must have length less than or equal to 1024, ",
        ),
        (
            "CreateModel",
            model(Environment={"1A": "x"}),
            "primaryContainer.environment",
            "Map keys must satisfy constraint: [",
        ),
        (
            "CreateModel",
            model(AdditionalModelDataSources=[{"ChannelName": "c", "S3DataSource": SOURCE}] * 6),
            "primaryContainer.additionalModelDataSources",
            "Member must have length less than or equal to 5",
        ),
        (
            "CreateModel",
            model(AdditionalModelDataSources=[{"ChannelName": "a b", "S3DataSource": SOURCE}]),
            "primaryContainer.additionalModelDataSources.1.member.channelName",
            "Member must satisfy regular expression pattern: ",
        ),
        (
            "CreateEndpointConfig",
            config(InstanceType="ml.none.xlarge"),
            "productionVariants.1.member.instanceType",
            "Member must satisfy enum value set: [",
        ),
        (
            "CreateEndpointConfig",
            config(InitialInstanceCount=0),
            "productionVariants.1.member.initialInstanceCount",
            "Member must have value greater than or equal to 1",
        ),
        (
            "CreateEndpointConfig",
            config(ContainerStartupHealthCheckTimeoutInSeconds=3601),
            "productionVariants.1.member.containerStartupHealthCheckTimeoutInSeconds",
            "Member must have value less than or equal to 3600",
        ),
        (
            "UpdateEndpoint",
            update(**routing(WaitIntervalInSeconds=3601)),
            "deploymentConfig.blueGreenUpdatePolicy.trafficRoutingConfiguration.waitIntervalInSeconds",
            "Member must have value less than or equal to 3600",
        ),
        (
            "UpdateEndpoint",
            update(**alarms(11)),
            "deploymentConfig.autoRollbackConfiguration.alarms",
            "Member must have length less than or equal to 10",
        ),
        (
            "CreateEndpointConfig",
            config(InitialInstanceCount="1"),
            "productionVariants.1.member.initialInstanceCount",
            "Member must be of type integer",
        ),
        ("CreateModel", {**model(), "Modelname": "m"}, "request", "Member must be one of ["),
    ],
)
def test_each_constraint_is_named_with_its_path(
    operation: str, request_: dict[str, Any], path: str, constraint: str
) -> None:
    found = problems("sagemaker", operation, request_)
    assert len(found) == 1, found
    assert f" at '{path}' failed to satisfy constraint: {constraint}" in found[0]


def test_the_exact_words_of_sagemaker() -> None:
    found = problems("sagemaker", "CreateEndpointConfig", config(ModelName="ENTER MODEL NAME"))
    assert validation_message(found) == (
        "1 validation error detected: Value 'ENTER MODEL NAME' at 'productionVariants.1.member.modelName' "
        "failed to satisfy constraint: Member must satisfy regular expression pattern: "
        "[a-zA-Z0-9]([\\-a-zA-Z0-9]*[a-zA-Z0-9])?"
    )
    two = problems("sagemaker", "CreateEndpoint", {"EndpointName": "e e"})
    assert validation_message(two).startswith("2 validation errors detected: ")
    assert "; Value" in validation_message(two)


def test_the_values_of_an_environment_are_not_shown() -> None:
    found = problems("sagemaker", "CreateModel", model(Environment={"TOKEN": "secret" * 200}))
    assert "TOKEN" in found[0]
    assert "secret" not in found[0]


def test_another_service_is_checked_the_same_way() -> None:
    alarm = {"AlarmName": "a", "ComparisonOperator": "Above", "EvaluationPeriods": 0}
    found = problems("cloudwatch", "PutMetricAlarm", alarm)
    assert ["comparisonOperator" in found[0], "evaluationPeriods" in found[1]] == [True, True]
