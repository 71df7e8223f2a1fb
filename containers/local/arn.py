"""The account and region that this machine pretends to be, and the names that SageMaker gives resources."""

from __future__ import annotations

import os

ACCOUNT = "123456789012"


def region() -> str:
    """The region that boto3 would take, `us-east-1` where the environment names none."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def resource_arn(kind: str, name: str) -> str:
    """`arn:aws:sagemaker:REGION:ACCOUNT:KIND/NAME`, the name in lower case as SageMaker writes it."""
    return f"arn:aws:sagemaker:{region()}:{ACCOUNT}:{kind}/{name.lower()}"
