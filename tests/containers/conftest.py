"""S3 and CloudWatch from moto's server, and the data plane of the local SageMaker in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.containers.data_plane import BUCKET, DataPlane


@pytest.fixture
def aws(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """boto3's environment pointing at moto; returns its address."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": moto,
        "AWS_ENDPOINT_URL_CLOUDWATCH": moto,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION", raising=False)
    return moto


@pytest.fixture
def s3(aws: str) -> Any:
    """S3 with an empty bucket `BUCKET`."""
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    return client


@pytest.fixture
def plane(aws: str, tmp_path: Path) -> Iterator[DataPlane]:
    """A data plane with room for many instances."""
    data_plane = DataPlane(tmp_path / "sagemaker")
    yield data_plane
    data_plane.close()
