"""What AWS refuses, in our words: real boto3 clients against a server that answers as AWS does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.aws import AwsError, connect_aws, policy_granting, require_role
from tasks.settings import Places
from tests.tasks.aws_server import refusing

ROOT = Path(__file__).parents[2]
EXPIRED = (400, {"__type": "ExpiredTokenException", "message": "The security token included has expired"})
DENIED = (
    400,
    {
        "__type": "AccessDeniedException",
        "message": "User: arn:aws:iam::123456789012:user/bird is not authorized to perform: "
        "sagemaker:CreateModel on resource: arn:aws:sagemaker:us-east-1:123456789012:model/m",
    },
)
THROTTLED = (400, {"__type": "ThrottlingException", "message": "Rate exceeded"})
LIMITED = (
    400,
    {
        "__type": "ResourceLimitExceeded",
        "message": "The account-level service limit 'ml.g7e.2xlarge for endpoint usage' is 0 Instances",
    },
)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def refusal_of(answer: tuple[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> AwsError:
    with refusing(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", server.url)
        with pytest.raises(AwsError) as caught:
            connect_aws(Places()).sagemaker.create_model(ModelName="m")
    return caught.value


def test_a_missing_permission_is_named_with_the_policy_that_grants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = refusal_of(DENIED, monkeypatch)
    assert error.expected == "permission for sagemaker:CreateModel"
    assert "containers/policies/deployer.json" in error.remedy


def test_expired_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal_of(EXPIRED, monkeypatch)
    assert error.given == "the AWS credentials have expired (CreateModel)"
    assert "aws sso login" in error.remedy


def test_a_quota_is_told_in_awss_words(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal_of(LIMITED, monkeypatch)
    assert "ml.g7e.2xlarge for endpoint usage" in error.given
    assert "Service Quotas" in error.remedy


def test_throttled_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing(THROTTLED, THROTTLED, (200, {"ModelArn": "arn"})) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", server.url)
        answer = connect_aws(Places()).sagemaker.create_model(ModelName="m")
    assert answer["ModelArn"] == "arn"
    assert server.asked == ["SageMaker.CreateModel"] * 3


def test_a_probe_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing((500, {"Message": "no"})) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", server.url)
        with pytest.raises(AwsError):
            connect_aws(Places()).runtime.invoke_endpoint(EndpointName="birds", Body=b"{}")
    assert len(server.asked) == 1


def test_a_region_that_does_not_exist_is_named_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_REGION", "us-north-9")
    with pytest.raises(AwsError, match=r"no region 'us-north-9'.*\n.*us-east-1"):
        connect_aws(Places())


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", "http://127.0.0.1:9")
    with pytest.raises(AwsError, match=r"no connection.*127\.0\.0\.1:9"):
        connect_aws(Places()).runtime.invoke_endpoint(EndpointName="birds", Body=b"{}")


def test_without_credentials_it_says_where_to_get_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AwsError, match=r"no usable AWS credentials.*\n.*\n.*fledge up"):
        connect_aws(Places()).sagemaker.list_models()


def test_a_role_that_is_not_set_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEDGE_EXECUTION_ROLE_ARN", raising=False)
    with pytest.raises(AwsError, match="FLEDGE_EXECUTION_ROLE_ARN is not set"):
        require_role(Places())


def test_every_call_of_a_deployment_is_granted_by_the_deployers_policy() -> None:
    """Read off the sources: each `aws.SERVICE.operation(` and each listing."""
    services = {
        "sagemaker": "sagemaker",
        "runtime": "sagemaker",
        "cloudwatch": "cloudwatch",
        "autoscaling": "application-autoscaling",
    }
    names = ("alarms", "autoscaling", "catalogue", "delete_endpoint", "endpoints", "probe", "roll_back",
             "shift_traffic")  # fmt: skip
    text = "".join((ROOT / "tasks" / f"{name}.py").read_text() for name in names)
    found = set(re.findall(r"\.(sagemaker|runtime|cloudwatch|autoscaling)\.(\w+)[(,]", text))
    found |= set(re.findall(r"\.(sagemaker|cloudwatch)\.pages\(\s*\"(\w+)\"", text))
    actions = {
        f"{services[service]}:{''.join(part.title() for part in operation.split('_'))}"
        for service, operation in found
        if operation != "pages"
    }
    assert {"sagemaker:UpdateEndpoint", "cloudwatch:PutMetricAlarm", "sagemaker:ListTags"} <= actions
    missing = {
        action for action in actions if getattr(policy_granting(action), "name", None) != "deployer.json"
    }
    assert not missing
