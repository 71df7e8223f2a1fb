"""The API by hand, through boto3: what is kept, what is listed, and what is refused with which words."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.validate import ParamValidator

from tasks.service_model import service_model
from tests.containers.control_plane import ROLE, ROOT, VARIANT, ControlPlane, canary, refusal
from tests.waiting import PATIENCE_S, is_alive

pytestmark = pytest.mark.slow

pytestmark = pytest.mark.slow

ARN = "arn:aws:sagemaker:us-east-1:123456789012"
EAGLE = {"S3Uri": "s3://fledge/drafters/v1/", "S3DataType": "S3Prefix", "CompressionType": "None"}


@pytest.fixture(scope="module")
def plane(moto: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A started server with endpoint `shared` in service on config `shared-v1`."""
    plane = ControlPlane(tmp_path_factory.mktemp("home"), moto)
    plane.start()
    try:
        plane.create_endpoint("shared", plane.create_config("shared-v1"))
        yield plane
    finally:
        plane.close()


@pytest.fixture
def name() -> str:
    """A name that nothing has yet."""
    return f"n-{uuid.uuid4().hex[:8]}"


def model(name: str, **container: Any) -> dict[str, Any]:
    return {
        "ModelName": name,
        "ExecutionRoleArn": ROLE,
        "PrimaryContainer": {"Image": "vllm:0.32.0", "Environment": {"SM_VLLM_MODEL": "m"}, **container},
    }


def config(name: str, **variant: Any) -> dict[str, Any]:
    fields = {
        "VariantName": VARIANT,
        "ModelName": "shared-v1",
        "InitialInstanceCount": 1,
        "InstanceType": "ml.g7e.2xlarge",
    }
    return {"EndpointConfigName": name, "ProductionVariants": [{**fields, **variant}]}


def test_a_model_is_described_as_it_was_made(plane: ControlPlane, name: str) -> None:
    channel = {"ChannelName": "eagle", "S3DataSource": EAGLE}
    request = model(name, AdditionalModelDataSources=[channel])
    made = plane.sagemaker.create_model(**request, Tags=[{"Key": "fledge.version", "Value": "1"}])
    assert made["ModelArn"] == f"{ARN}:model/{name}"
    found = plane.sagemaker.describe_model(ModelName=name)
    assert found["PrimaryContainer"] == request["PrimaryContainer"]
    assert found["ExecutionRoleArn"] == ROLE
    assert found["EnableNetworkIsolation"] is False
    assert abs(found["CreationTime"] - datetime.now(UTC)) < timedelta(minutes=1)
    assert "Tags" not in found
    assert plane.sagemaker.list_tags(ResourceArn=made["ModelArn"])["Tags"] == [
        {"Key": "fledge.version", "Value": "1"}
    ]


def test_a_config_is_described_as_it_was_made(plane: ControlPlane, name: str) -> None:
    capture = {
        "EnableCapture": True,
        "InitialSamplingPercentage": 20,
        "DestinationS3Uri": "s3://fledge/captures",
        "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
    }
    request = {**config(name, InitialVariantWeight=1.0), "DataCaptureConfig": capture}
    plane.sagemaker.create_endpoint_config(**request)
    found = plane.sagemaker.describe_endpoint_config(EndpointConfigName=name)
    assert found["EndpointConfigArn"] == f"{ARN}:endpoint-config/{name}"
    assert found["ProductionVariants"] == request["ProductionVariants"]
    assert found["DataCaptureConfig"] == capture


def test_an_endpoint_in_service_says_what_it_runs(plane: ControlPlane) -> None:
    found = plane.describe("shared")
    assert found["EndpointArn"] == f"{ARN}:endpoint/shared"
    assert found["EndpointConfigName"] == "shared-v1"
    [variant] = found["ProductionVariants"]
    assert variant["VariantName"] == VARIANT
    assert (variant["CurrentWeight"], variant["DesiredWeight"]) == (1.0, 1.0)
    assert (variant["CurrentInstanceCount"], variant["DesiredInstanceCount"]) == (1, 1)
    assert variant["DeployedImages"][0]["SpecifiedImage"] == "vllm:0.32.0-gpu-py312"
    assert plane.answered_by("shared") == "shared-v1"
    [row] = [row for row in plane.instances() if row["endpoint_name"] == "shared"]
    assert row["state"] == "in_service"


def test_names_cannot_be_used_twice(plane: ControlPlane) -> None:
    sagemaker = plane.sagemaker
    assert refusal(sagemaker.create_model, **model("shared-v1")) == (
        "ValidationException",
        f'Cannot create already existing model "{ARN}:model/shared-v1".',
    )
    assert refusal(sagemaker.create_endpoint_config, **config("shared-v1")) == (
        "ValidationException",
        f'Cannot create already existing endpoint configuration "{ARN}:endpoint-config/shared-v1".',
    )
    assert refusal(sagemaker.create_endpoint, EndpointName="shared", EndpointConfigName="shared-v1") == (
        "ValidationException",
        f'Cannot create already existing endpoint "{ARN}:endpoint/shared".',
    )


def test_what_does_not_exist_is_not_found(plane: ControlPlane) -> None:
    sagemaker = plane.sagemaker
    no_model = ("ValidationException", f'Could not find model "{ARN}:model/none".')
    no_config = (
        "ValidationException",
        f'Could not find endpoint configuration "{ARN}:endpoint-config/none".',
    )
    no_endpoint = ("ValidationException", f'Could not find endpoint "{ARN}:endpoint/none".')
    assert refusal(sagemaker.describe_model, ModelName="none") == no_model
    assert refusal(sagemaker.delete_model, ModelName="none") == no_model
    assert refusal(sagemaker.create_endpoint_config, **config("x", ModelName="none")) == no_model
    assert refusal(sagemaker.describe_endpoint_config, EndpointConfigName="none") == no_config
    assert refusal(sagemaker.delete_endpoint_config, EndpointConfigName="none") == no_config
    assert refusal(sagemaker.create_endpoint, EndpointName="x", EndpointConfigName="none") == no_config
    assert refusal(sagemaker.update_endpoint, EndpointName="shared", EndpointConfigName="none") == no_config
    assert (
        refusal(sagemaker.update_endpoint, EndpointName="none", EndpointConfigName="shared-v1") == no_endpoint
    )
    assert refusal(sagemaker.delete_endpoint, EndpointName="none") == no_endpoint
    code, message = refusal(sagemaker.list_tags, ResourceArn=f"{ARN}:model/none")
    assert code == "ValidationException"
    assert "none" in message


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (
            {"ChannelName": "eagle", "S3DataSource": {**EAGLE, "S3Uri": "s3://fledge/v1"}},
            "must end with '/'",
        ),
        (
            {"ChannelName": "eagle", "S3DataSource": {**EAGLE, "S3DataType": "S3Object"}},
            "must not end with '/'",
        ),
        (
            {"ChannelName": "eagle", "S3DataSource": {**EAGLE, "CompressionType": "Zip"}},
            "Member must satisfy enum value set: [None, Gzip]",
        ),
    ],
)
def test_model_data_that_sagemaker_would_refuse(
    plane: ControlPlane, name: str, container: dict[str, Any], words: str
) -> None:
    request = model(name, AdditionalModelDataSources=[container])
    code, message = refusal(plane.sagemaker.create_model, **request)
    assert code == "ValidationException"
    assert words in message
    assert refusal(plane.sagemaker.describe_model, ModelName=name)[1].startswith("Could not find model")


def test_a_channel_name_twice_is_refused(plane: ControlPlane, name: str) -> None:
    channel = {"ChannelName": "eagle", "S3DataSource": EAGLE}
    request = model(name, AdditionalModelDataSources=[channel, channel])
    assert "unique" in refusal(plane.sagemaker.create_model, **request)[1]


def test_the_form_of_a_request_is_checked_before_anything_is_kept(plane: ControlPlane, name: str) -> None:
    code, message = refusal(plane.sagemaker.create_model, **model(name, Environment={"A": "x" * 1025}))
    assert code == "ValidationException"
    assert message.startswith("1 validation error detected: ")
    code, message = refusal(
        plane.sagemaker.create_endpoint_config, **config(name, InstanceType="ml.g99.xlarge")
    )
    assert "Member must satisfy enum value set: [" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (canary(percent=51), "CanarySize must be between"),
        (
            canary(percent=20, wait_s=300, MaximumExecutionTimeoutInSeconds=600),
            "must be larger than the total",
        ),
        (canary(alarms=("no-such-alarm",)), "no-such-alarm"),
        (
            {
                "BlueGreenUpdatePolicy": {
                    "TrafficRoutingConfiguration": {"Type": "CANARY", "WaitIntervalInSeconds": 1}
                }
            },
            "CanarySize is required",
        ),
        (
            {
                "BlueGreenUpdatePolicy": {
                    "TrafficRoutingConfiguration": {
                        "Type": "LINEAR",
                        "WaitIntervalInSeconds": 1,
                        "LinearStepSize": {"Type": "CAPACITY_PERCENT", "Value": 9},
                    }
                }
            },
            "LinearStepSize must be between 10% and 50%",
        ),
        (canary(MaximumExecutionTimeoutInSeconds=599), "greater than or equal to 600"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_and_nothing_starts(
    plane: ControlPlane, settings: dict[str, Any], words: str
) -> None:
    code, message = refusal(
        plane.sagemaker.update_endpoint,
        EndpointName="shared",
        EndpointConfigName="shared-v1",
        DeploymentConfig=settings,
    )
    assert code == "ValidationException"
    assert words in message
    assert plane.describe("shared")["EndpointStatus"] == "InService"


def test_variant_names_must_stay(plane: ControlPlane, name: str) -> None:
    plane.sagemaker.create_endpoint_config(**config(name, VariantName="Another"))
    code, message = refusal(plane.sagemaker.update_endpoint, EndpointName="shared", EndpointConfigName=name)
    assert code == "ValidationException"
    assert "Another" in message


def test_an_update_needs_the_present_config_too(plane: ControlPlane, name: str) -> None:
    """As SageMaker: a config in use can be deleted by hand, and then stands in the way of every update."""
    present, wanted = f"{name}-a", f"{name}-b"
    plane.create_endpoint(name, plane.create_config(present))
    plane.create_config(wanted)
    plane.sagemaker.delete_endpoint_config(EndpointConfigName=present)
    assert plane.answered_by(name) == present
    _, message = refusal(plane.sagemaker.update_endpoint, EndpointName=name, EndpointConfigName=wanted)
    assert message == f'Could not find endpoint configuration "{ARN}:endpoint-config/{present}".'
    plane.sagemaker.delete_endpoint(EndpointName=name)


def test_tags_are_added_replaced_and_deleted(plane: ControlPlane, name: str) -> None:
    sagemaker, arn = plane.sagemaker, f"{ARN}:model/{name}"
    sagemaker.create_model(**model(name))
    sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}])
    answer = sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "3"}])
    assert answer["Tags"] == [{"Key": "a", "Value": "3"}, {"Key": "b", "Value": "2"}]
    sagemaker.delete_tags(ResourceArn=arn, TagKeys=["a"])
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "b", "Value": "2"}]
    assert "reserved" in refusal(sagemaker.add_tags, ResourceArn=arn, Tags=[{"Key": "aws:x", "Value": ""}])[1]
    many = [{"Key": f"k{number}", "Value": ""} for number in range(50)]
    assert refusal(sagemaker.add_tags, ResourceArn=arn, Tags=many)[0] == "ResourceLimitExceeded"
    sagemaker.delete_model(ModelName=name)
    sagemaker.create_model(**model(name))
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == []


def test_lists_are_filtered_sorted_and_paged(plane: ControlPlane, name: str) -> None:
    sagemaker = plane.sagemaker
    made = [f"{name}-{number:02d}" for number in range(25)]
    for each in made:
        sagemaker.create_model(**model(each))
    pages = list(
        sagemaker.get_paginator("list_models").paginate(
            NameContains=name, SortBy="Name", SortOrder="Ascending", PaginationConfig={"PageSize": 10}
        )
    )
    assert [len(page["Models"]) for page in pages] == [10, 10, 5]
    assert [item["ModelName"] for page in pages for item in page["Models"]] == made
    newest = sagemaker.list_models(NameContains=name)["Models"]
    assert [item["ModelName"] for item in newest] == made[:-11:-1]
    cut = sagemaker.describe_model(ModelName=made[3])["CreationTime"]
    older = sagemaker.list_models(NameContains=name, CreationTimeBefore=cut)["Models"]
    assert {item["ModelName"] for item in older} <= set(made[:4])
    assert refusal(sagemaker.list_models, NextToken="!")[0] == "ValidationException"


def test_a_page_does_not_shift_when_something_is_deleted(plane: ControlPlane, name: str) -> None:
    sagemaker = plane.sagemaker
    for number in range(4):
        sagemaker.create_model(**model(f"{name}-{number}"))
    order = {"NameContains": name, "SortBy": "Name", "SortOrder": "Ascending"}
    first = sagemaker.list_models(**order, MaxResults=2)
    sagemaker.delete_model(ModelName=f"{name}-0")
    second = sagemaker.list_models(**order, NextToken=first["NextToken"])
    assert [item["ModelName"] for item in second["Models"]] == [f"{name}-2", f"{name}-3"]
    assert "NextToken" not in second


def test_endpoints_are_listed_by_status(plane: ControlPlane) -> None:
    in_service = plane.sagemaker.list_endpoints(StatusEquals="InService", NameContains="SHARED")["Endpoints"]
    assert [item["EndpointName"] for item in in_service] == ["shared"]
    assert plane.sagemaker.list_endpoints(StatusEquals="Failed", NameContains="shared")["Endpoints"] == []


def test_faults_strike_as_often_as_ordered(plane: ControlPlane, name: str) -> None:
    sagemaker = plane.sagemaker
    plane.order_fault(kind="throttling", operation="List*", times=1)
    assert refusal(sagemaker.list_models) == ("ThrottlingException", "Rate exceeded")
    sagemaker.list_models()
    plane.order_fault(kind="quota", times=1)
    code, message = refusal(sagemaker.create_endpoint, EndpointName=name, EndpointConfigName="shared-v1")
    assert code == "ResourceLimitExceeded"
    assert "'ml.g7e.2xlarge for endpoint usage'" in message
    assert refusal(sagemaker.describe_endpoint, EndpointName=name)[0] == "ValidationException"
    assert httpx.get(f"{plane.url}/_local/faults", trust_env=False, timeout=PATIENCE_S).json() == []


def test_a_fault_of_no_known_kind_is_refused(plane: ControlPlane) -> None:
    answer = httpx.post(
        f"{plane.url}/_local/faults", json={"kind": "earthquake"}, trust_env=False, timeout=PATIENCE_S
    )
    assert answer.status_code == 400
    assert "earthquake" in answer.text


def test_what_is_not_supported_says_so(plane: ControlPlane, name: str) -> None:
    code, message = refusal(
        plane.sagemaker.create_endpoint_config,
        EndpointConfigName=name,
        ProductionVariants=[
            {
                "VariantName": "v",
                "ModelName": "shared-v1",
                "ServerlessConfig": {"MemorySizeInMB": 1024, "MaxConcurrency": 1},
            }
        ],
    )
    assert code == "ValidationException"
    assert "not supported by the SageMaker of this machine" in message
    assert refusal(plane.sagemaker.list_training_jobs)[0] == "UnknownOperationException"


@pytest.mark.parametrize(
    ("operation", "request_"),
    [
        ("DescribeModel", {"ModelName": "shared-v1"}),
        ("DescribeEndpointConfig", {"EndpointConfigName": "shared-v1"}),
        ("DescribeEndpoint", {"EndpointName": "shared"}),
        ("ListModels", {"MaxResults": 1}),
        ("ListEndpointConfigs", {"MaxResults": 1}),
        ("ListEndpoints", {}),
        ("ListTags", {"ResourceArn": f"{ARN}:endpoint/shared"}),
    ],
)
def test_answers_have_the_members_of_botocores_model_and_no_other(
    plane: ControlPlane, operation: str, request_: dict[str, Any]
) -> None:
    """boto3 drops what it does not know, so the bare answer is checked."""
    headers = {"X-Amz-Target": f"SageMaker.{operation}"}
    answer = httpx.post(plane.url, json=request_, headers=headers, trust_env=False, timeout=PATIENCE_S)
    shape = service_model("sagemaker").operation_model(operation).output_shape
    report = ParamValidator().validate(answer.json(), shape)
    assert not report.has_errors(), report.generate_report()
    assert set(answer.json()) <= set(shape.members)


def test_requests_that_are_no_json_object(plane: ControlPlane) -> None:
    headers = {"X-Amz-Target": "SageMaker.ListModels"}
    answer = httpx.post(plane.url, content=b"[", headers=headers, trust_env=False, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["__type"]) == (400, "SerializationException")


def test_a_second_server_on_the_same_folder_is_refused(plane: ControlPlane) -> None:
    command = [sys.executable, "-m", "containers.local", "serve", "--home", str(plane.home), "--port", "1"]
    second = subprocess.run(command, cwd=ROOT, env=plane.environment, capture_output=True, text=True)
    assert second.returncode == 1
    assert "another local SageMaker runs" in second.stderr
    assert "Traceback" not in second.stderr


def test_stop_ends_server_and_instances(moto: str, tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, moto)
    plane.start()
    plane.create_endpoint("e", plane.create_config("c"))
    [pid] = plane.pids("c")
    command = [sys.executable, "-m", "containers.local", "stop", "--home", str(plane.home)]
    subprocess.run(command, cwd=ROOT, env=plane.environment, check=True, timeout=PATIENCE_S)
    assert plane.process is not None
    plane.process.wait(timeout=PATIENCE_S)
    assert not is_alive(pid)
    subprocess.run(
        command, cwd=ROOT, env=plane.environment, check=True, timeout=PATIENCE_S
    )  # nothing left to stop


def test_it_does_not_start_where_it_would_speak_to_aws(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    command = [sys.executable, "-m", "containers.local", "serve", "--home", str(tmp_path)]
    refused = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert refused.returncode == 1
    assert "AWS_ENDPOINT_URL_S3 is not set" in refused.stderr
    assert "fledge up" in refused.stderr


def test_it_listens_on_loopback_and_to_its_own_names_only(plane: ControlPlane) -> None:
    answer = httpx.get(
        f"{plane.url}/_local/health", headers={"Host": "evil.example"}, trust_env=False, timeout=PATIENCE_S
    )
    assert answer.status_code == 400
    assert plane.url.startswith("http://127.0.0.1:")
