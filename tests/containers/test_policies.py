"""IAM policies: enough for what the code calls, and no more."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import botocore.session
import pytest
from botocore import xform_name

from tests.containers.policies import FOLDER, NAMES, VALUES, actions, allows, grants, load_policy

ROOT = Path(__file__).parents[2]
# Names of the clients in tasks/, and the prefix of IAM actions of that service.
CLIENTS = {
    "sagemaker": ("sagemaker", "sagemaker"),
    "runtime": ("sagemaker-runtime", "sagemaker"),
    "s3": ("s3", "s3"),
    "cloudwatch": ("cloudwatch", "cloudwatch"),
    "autoscaling": ("application-autoscaling", "application-autoscaling"),
}
# S3's permissions are not named after its operations.
S3_PERMISSIONS = {
    "head_bucket": {"s3:ListBucket"},
    "list_objects_v2": {"s3:ListBucket"},
    "head_object": {"s3:GetObject"},
    "get_object": {"s3:GetObject"},
    "download_file": {"s3:GetObject"},
    "put_object": {"s3:PutObject"},
    "upload_file": {"s3:PutObject", "s3:AbortMultipartUpload"},
}
# AWS knows no resources for these.
WITHOUT_RESOURCE = {
    "application-autoscaling:DescribeScalableTargets",
    "cloudwatch:GetMetricData",
    "cloudwatch:GetMetricStatistics",
    "cloudwatch:PutMetricData",
    "ecr:GetAuthorizationToken",
    "sagemaker:ListEndpointConfigs",
    "sagemaker:ListEndpoints",
    "sagemaker:ListModels",
    "sagemaker:ListTrainingJobs",
}


def operations_of(service: str) -> dict[str, str]:
    """boto3's name of each operation -> the API's."""
    names = botocore.session.get_session().get_service_model(service).operation_names
    return {xform_name(name): name for name in names}


def called_permissions() -> dict[str, str]:
    """Permission that code in tasks/ and flows/ needs -> a place that needs it.

    Read from the syntax: `aws.sagemaker.create_model`, called or handed on, and names of listings as text.
    """
    needed: dict[str, str] = {}
    known = {client: operations_of(service) for client, (service, _) in CLIENTS.items()}
    for path in sorted([*ROOT.glob("tasks/*.py"), *ROOT.glob("flows/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.name}:{getattr(node, 'lineno', 0)}"
            for client, operation in _operations_in(node):
                if client == "s3":
                    needed.update(dict.fromkeys(S3_PERMISSIONS.get(operation, {f"s3 {operation}"}), place))
                elif operation in known[client]:
                    needed[f"{CLIENTS[client][1]}:{known[client][operation]}"] = place
    return needed


def _operations_in(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", None))
        return [(owner, node.attr)] if owner in CLIENTS and node.attr not in ("pages", "region") else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("list_"):
        return [("sagemaker", node.value)]
    return []


def test_the_code_is_read_as_it_calls() -> None:
    needed = called_permissions()
    expected = {"sagemaker:CreateModel", "sagemaker:UpdateEndpoint", "sagemaker:ListTags", "s3:PutObject"}
    expected |= {"cloudwatch:PutMetricAlarm", "application-autoscaling:PutScalingPolicy"}
    expected |= {"sagemaker:InvokeEndpoint", "sagemaker:ListEndpointConfigs"}
    assert expected <= needed.keys()


def test_the_deployer_may_do_all_that_the_code_does_and_nothing_else() -> None:
    needed = called_permissions()
    missing = {
        permission: place for permission, place in needed.items() if permission not in actions("deployer")
    }
    assert not missing
    services = {prefix for _, prefix in CLIENTS.values()}
    granted = {action for action in actions("deployer") if action.split(":")[0] in services}
    # What AWS asks of the caller of other operations, or the SDK calls.
    implied = {
        "s3:GetBucketLocation",
        "sagemaker:CreateTrainingJob",
        "sagemaker:DescribeModel",
        "sagemaker:UpdateEndpointWeightsAndCapacities",
    }
    assert granted - needed.keys() <= implied


@pytest.mark.parametrize("name", NAMES)
def test_no_action_is_a_pattern_and_no_resource_is_everything(name: str) -> None:
    for action, resource in grants(name):
        assert "*" not in action
        assert resource != "*" or action in WITHOUT_RESOURCE, f"{action} on everything"


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_of_this_account_region_and_bucket(name: str) -> None:
    for action, resource in grants(name):
        if resource.startswith("arn:aws:s3:::"):
            bucket = resource.removeprefix("arn:aws:s3:::").partition("/")[0]
            assert bucket == "fledge" or bucket.startswith("jumpstart-"), action
            assert (
                bucket != "fledge" or "/" in resource or action in ("s3:ListBucket", "s3:GetBucketLocation")
            )
        elif resource != "*":
            owner = resource.split(":")[4]
            assert owner in (VALUES["FLEDGE_ACCOUNT"], "aws", "763104351884"), action


@pytest.mark.parametrize("name", ["monitor", "viewer"])
def test_who_looks_may_create_no_endpoint_and_delete_none(name: str) -> None:
    # The monitor may take an endpoint back, and reads captured traffic.
    more = {
        "sagemaker:UpdateEndpoint",
        "sagemaker:AddTags",
        "cloudwatch:PutMetricData",
        "cloudwatch:DeleteAlarms",
    }
    more |= {"s3:GetObject", "s3:ListBucket"}
    allowed = (
        "sagemaker:Describe",
        "sagemaker:List",
        "sagemaker:Invoke",
        "cloudwatch:Describe",
        "cloudwatch:Get",
    )
    others = {action for action in actions(name) if not action.startswith(allowed)}
    assert others <= (more if name == "monitor" else set())
    assert actions(name) <= actions("deployer")


def test_roles_are_handed_to_sagemaker_alone() -> None:
    (statement,) = [s for s in load_policy("deployer")["Statement"] if "iam:PassRole" in s["Action"]]
    assert statement["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    assert all(
        resource.endswith(("/fledge-endpoint", "/fledge-training")) for resource in statement["Resource"]
    )


def test_execution_roles_reach_what_they_need_and_not_each_others_output() -> None:
    bucket = "arn:aws:s3:::fledge"
    assert allows("endpoint-execution", "s3:GetObject", f"{bucket}/drafters/ab12/model.safetensors")
    assert allows("endpoint-execution", "s3:PutObject", f"{bucket}/captures/fledge/AllTraffic/a.jsonl")
    assert not allows("endpoint-execution", "s3:PutObject", f"{bucket}/drafters/ab12/model.safetensors")
    training = f"{bucket}/training/training-ab12"
    assert allows("training-execution", "s3:PutObject", f"{training}/checkpoints/training/metrics.jsonl")
    assert allows("training-execution", "s3:DeleteObject", f"{training}/checkpoints/training/x/state.json")
    assert allows("training-execution", "s3:GetObject", f"{bucket}/training/states-ab12/manifest.json")
    assert not allows("training-execution", "s3:PutObject", f"{bucket}/training/states-ab12/manifest.json")
    assert not allows("training-execution", "s3:DeleteObject", f"{training}/output/model/weights.safetensors")


def test_only_sagemaker_of_this_account_takes_an_execution_role() -> None:
    trust = json.loads((FOLDER / "trust" / "sagemaker.json").read_text())
    (statement,) = trust["Statement"]
    assert statement["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert statement["Condition"]["StringEquals"]["aws:SourceAccount"] == "${FLEDGE_ACCOUNT}"


def lint(policies: dict[str, object]) -> list[str]:
    """What cfn-lint says about policies: grammar, and actions that AWS does not have."""
    from cfnlint.api import lint_all

    resources = {
        name.title().replace("-", ""): {
            "Type": "AWS::IAM::ManagedPolicy",
            "Properties": {"PolicyDocument": policy},
        }
        for name, policy in policies.items()
    }
    template = json.dumps({"AWSTemplateFormatVersion": "2010-09-09", "Resources": resources})
    return [f"{m.rule.id} {m.message}"[:200] for m in lint_all(template) if m.rule.id[0] in "EW"]


@pytest.mark.slow
def test_aws_knows_every_action() -> None:
    assert lint({name: load_policy(name) for name in NAMES}) == []
    misspelt = {"Sid": "A", "Effect": "Allow", "Action": "sagemaker:CreatEndpoint", "Resource": "*"}
    assert "W3037" in lint({"bad": {"Version": "2012-10-17", "Statement": [misspelt]}})[0]
