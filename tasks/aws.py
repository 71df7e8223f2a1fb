"""boto3 clients of one installation, and AWS's errors as ours: what went wrong, what was expected, what to do.

`AWS_ENDPOINT_URL_...` decides whether a client speaks to AWS or to the SageMaker of this machine; nothing
here knows which. boto3's standard mode repeats throttled and interrupted calls.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from drafter.errors import FledgeError
from tasks.settings import Places

POLICIES = Path(__file__).resolve().parent.parent / "containers" / "policies"
MAX_ATTEMPTS = 8

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_UNKNOWN_KEYS = {
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidSignatureException",
    "AuthFailure",
}
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AllAccessDisabled", "403"}
_THROTTLED = {
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "RequestLimitExceeded",
    "SlowDown",
}
_INTERNAL = {"InternalFailure", "InternalServerError", "ServiceUnavailable", "500", "503"}
_REFUSAL_IN_WORDS = re.compile(
    r"error occurred \((\w+)\) when calling the (\w+) operation[^:]*: (.*)", re.DOTALL
)
_NOT_AUTHORIZED = re.compile(r"not authorized to perform:? ?([\w-]+:\w+)")


class AwsError(FledgeError):
    """A call to AWS that failed.

    Args:
        code: AWS's error code (`ThrottlingException`); empty where the call did not get that far.
        message: AWS's own words.
    """

    def __init__(self, given: str, expected: str, remedy: str, code: str = "", message: str = "") -> None:
        super().__init__(given, expected, remedy)
        self.code = code
        self.message = message

    @property
    def is_not_found(self) -> bool:
        """SageMaker has no code of its own for what does not exist."""
        return self.code in ("ResourceNotFound", "NoSuchKey", "404") or self.message.startswith(
            "Could not find"
        )

    @property
    def is_existing(self) -> bool:
        return self.message.startswith("Cannot create already existing")


def may_pass(_task: Any, _run: Any, state: Any) -> bool:
    """Whether a failed task is worth another try: what was refused with a reason will be refused again."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, AwsError):
        return not error.code or error.code in _THROTTLED | _INTERNAL
    return not isinstance(error, FledgeError)


@dataclass(frozen=True)
class Aws:
    """The clients of one installation. Every call raises AwsError."""

    sagemaker: Any
    runtime: Any
    s3: Any
    cloudwatch: Any
    autoscaling: Any
    region: str


def connect_aws(places: Places) -> Aws:
    """Clients for the installation's region; nothing is asked of AWS yet.

    Raises:
        AwsError: AWS has no such region, or none with SageMaker.
    """
    import boto3
    from botocore.config import Config

    session = boto3.Session(region_name=places.region)
    _require_region(session, places.region)
    # A probe must see a failed answer as one, so the runtime repeats nothing.
    patient = Config(retries={"mode": "standard", "max_attempts": MAX_ATTEMPTS}, connect_timeout=5)
    honest = Config(retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=5, read_timeout=70)

    def client(service: str, config: Any = patient) -> Explained:
        return Explained(session.client(service, config=config))

    return Aws(
        sagemaker=client("sagemaker"),
        runtime=client("sagemaker-runtime", honest),
        s3=client("s3"),
        cloudwatch=client("cloudwatch"),
        autoscaling=client("application-autoscaling"),
        region=places.region,
    )


class Explained:
    """A boto3 client whose errors are AwsError. Paginate with `pages`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._client, name)
        if not callable(member):
            return member

        @wraps(member)
        def call(*args: Any, **kwargs: Any) -> Any:
            with explained():
                return member(*args, **kwargs)

        return call

    def pages(self, operation: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Every page of a listing."""
        with explained():
            yield from self._client.get_paginator(operation).paginate(**parameters)


@contextmanager
def explained() -> Iterator[None]:
    """Turn botocore's errors of the block into AwsError.

    Raises:
        AwsError: instead of anything that botocore raises.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise explain_refusal(error.response, error.operation_name) from None
    except Boto3Error as error:  # an upload tells only in words what S3 answered
        found = _REFUSAL_IN_WORDS.search(str(error))
        if found is None:
            raise _explain_failure(error) from None
        code, operation, message = found.groups()
        raise explain_refusal({"Error": {"Code": code, "Message": message}}, operation) from None
    except BotoCoreError as error:
        raise _explain_failure(error) from None


def explain_refusal(response: dict[str, Any], operation: str) -> AwsError:
    """What AWS answered, as an error that says what to do."""
    error = response.get("Error", {})
    code, message = str(error.get("Code", "")), str(error.get("Message", "")).strip()
    said = f"{operation}: {message} ({code})" if message else f"{operation} was refused ({code})"

    def problem(expected: str, remedy: str, given: str = said) -> AwsError:
        return AwsError(given, expected, remedy, code, message)

    if code in _EXPIRED:
        return problem(
            "credentials that are still valid",
            "get new ones (`aws sso login`, or your usual way) and run this again; it continues",
            f"the AWS credentials have expired ({operation})",
        )
    if code in _UNKNOWN_KEYS:
        return problem(
            "credentials that AWS knows",
            "check AWS_PROFILE or the access keys in the environment with `aws sts get-caller-identity`",
            f"AWS does not know these credentials ({operation}: {code})",
        )
    if code in _DENIED:
        return problem(*_permission_of(operation, message), given=said)
    if code == "NoSuchBucket":
        bucket = error.get("BucketName") or "the bucket"
        return problem(
            "a bucket that exists in this region",
            f"create it (`aws s3 mb s3://{bucket}`), or set FLEDGE_BUCKET to one of yours",
            f"there is no S3 bucket {bucket}",
        )
    if code in _THROTTLED:
        return problem(
            f"an answer within {MAX_ATTEMPTS} attempts",
            "wait some minutes and run this again; it continues where it stopped",
        )
    if code in ("ResourceLimitExceeded", "LimitExceeded", "LimitExceededException"):
        return problem(
            "a quota that allows this",
            "ask for a higher one in AWS's Service Quotas (SageMaker), delete what is not needed "
            "(`fledge status`, `fledge delete`), or choose another instance type",
        )
    if code in ("ValidationException", "ValidationError", "InvalidParameterValue"):
        return problem(
            "a request that SageMaker accepts", "change what the message names, and run this again"
        )
    return problem("an answer", "see AWS's documentation of this error code; running this again continues")


def _explain_failure(error: Exception) -> AwsError:
    """A call that never got an answer."""
    kind, words = type(error).__name__, str(error)
    if "Credentials" in kind or "SSO" in kind or "Token" in kind:
        return AwsError(
            f"no usable AWS credentials: {words}",
            "credentials in the environment, a profile or a role",
            "log in (`aws sso login`) or set AWS_PROFILE; for this machine's own SageMaker, run `fledge up`",
        )
    if kind == "ParamValidationError":
        return AwsError(
            words,
            "a request that botocore accepts",
            "change the setting that the message names",
            "ParamValidation",
        )
    if kind in (
        "EndpointConnectionError",
        "ConnectionClosedError",
        "ConnectTimeoutError",
        "ProxyConnectionError",
    ):
        return AwsError(
            f"no connection: {words}",
            "a server at that address",
            "check the network and AWS_REGION; for this machine's own SageMaker, see whether `fledge up` runs",
        )
    return AwsError(f"{kind}: {words}", "an answer from AWS", "run this again; it continues where it stopped")


def _permission_of(operation: str, message: str) -> tuple[str, str]:
    """What is missing, and which policy of ours grants it."""
    found = _NOT_AUTHORIZED.search(message)
    action = found[1] if found else f"*:{operation}"
    policy = policy_granting(action)
    if policy is None:
        return f"permission for {action}", f"let an administrator allow {action} for your role"
    return (
        f"permission for {action}",
        f"attach the policy containers/policies/{policy.name} to your role; it grants {action}",
    )


def policy_granting(action: str, folder: Path = POLICIES) -> Path | None:
    """The policy file that allows an action (`sagemaker:CreateModel`); None: no file does."""
    service, _, operation = action.partition(":")
    for path in sorted(folder.glob("*.json")):
        statements = json.loads(path.read_text(encoding="utf-8")).get("Statement", [])
        for statement in statements if isinstance(statements, list) else [statements]:
            allowed = statement.get("Action", [])
            for pattern in [allowed] if isinstance(allowed, str) else allowed:
                same_service = service == "*" or pattern.startswith((f"{service}:", "*"))
                if same_service and fnmatch.fnmatchcase(operation, pattern.partition(":")[2] or "*"):
                    return path
    return None


def _require_region(session: Any, region: str) -> None:
    known = {
        name
        for partition in session.get_available_partitions()
        for name in session.get_available_regions("sagemaker", partition_name=partition)
    }
    if region not in known:
        near = sorted(name for name in known if name.split("-")[0] == region.split("-")[0]) or sorted(known)
        raise AwsError(
            f"AWS has no region {region!r} with SageMaker",
            f"one of {', '.join(near)}",
            "set AWS_REGION (or FLEDGE_REGION) to the region of your endpoint",
        )


def require_bucket(aws: Aws, bucket: str) -> None:
    """Make sure that the installation's bucket is there and may be read.

    Raises:
        AwsError: it is not there, it is somebody else's, or this role may not read it.
    """
    try:
        aws.s3.head_bucket(Bucket=bucket)
    except AwsError as error:
        if error.code in ("404", "NoSuchBucket"):
            raise AwsError(
                f"there is no S3 bucket {bucket!r}",
                f"a bucket of yours in {aws.region}",
                f"create it (`aws s3 mb s3://{bucket} --region {aws.region}`), or set FLEDGE_BUCKET",
                error.code,
            ) from None
        if error.code == "403":
            raise AwsError(
                f"the S3 bucket {bucket!r} exists, but this role may not list it",
                "a bucket of yours, with s3:ListBucket",
                "set FLEDGE_BUCKET to a bucket of yours, or attach "
                f"containers/policies/{getattr(policy_granting('s3:ListBucket'), 'name', '...')} to your role",
                error.code,
            ) from None
        raise


def require_role(places: Places) -> str:
    """The role that SageMaker takes on.

    Raises:
        AwsError: none is set.
    """
    if places.execution_role_arn is None:
        raise AwsError(
            "FLEDGE_EXECUTION_ROLE_ARN is not set",
            "the IAM role that SageMaker takes on to read the bucket and write its logs",
            "make one with the execution policy of containers/policies and set "
            "FLEDGE_EXECUTION_ROLE_ARN=arn:aws:iam::ACCOUNT:role/NAME",
        )
    return places.execution_role_arn
