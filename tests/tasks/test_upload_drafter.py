"""Model data in S3 (moto's server): named by content, sent once, config.json last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
import pytest

from drafter.errors import CheckpointError
from tasks.aws import AwsError
from tasks.upload_drafter import drafter_prefix, upload_drafter, upload_target
from tests.tasks.drafters_on_disk import export_drafter

BUCKET = "fledge"


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 with an empty bucket."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": moto,
        "FLEDGE_BUCKET": BUCKET,
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    return client


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    export_drafter(tmp_path / "drafter")
    return tmp_path / "drafter"


def changed_at(s3: Any) -> dict[str, Any]:
    found = s3.list_objects_v2(Bucket=BUCKET).get("Contents", ())
    return {entry["Key"]: entry["LastModified"] for entry in found}


def test_the_prefix_is_the_content_and_a_repetition_sends_nothing(s3: Any, drafter: Path) -> None:
    uri = upload_drafter.fn(drafter)
    assert uri == f"s3://{BUCKET}/{drafter_prefix(drafter)}"
    assert uri.endswith("/")
    before = changed_at(s3)
    assert {Path(key).name for key in before} == {"config.json", "model.safetensors", "provenance.json"}
    upload_drafter.fn(drafter)
    assert changed_at(s3) == before


def test_what_is_missing_or_another_file_is_sent_again(s3: Any, drafter: Path) -> None:
    upload_drafter.fn(drafter)
    prefix = drafter_prefix(drafter)
    s3.delete_object(Bucket=BUCKET, Key=f"{prefix}config.json")
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}model.safetensors", Body=b"half")
    upload_drafter.fn(drafter)
    for name in ("config.json", "model.safetensors"):
        stored = s3.get_object(Bucket=BUCKET, Key=f"{prefix}{name}")["Body"].read()
        assert stored == (drafter / name).read_bytes()


def test_config_json_is_written_last(s3: Any, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(
        "tasks.upload_drafter._upload_file", lambda aws, bucket, key, path: sent.append(path.name) is None
    )
    upload_drafter.fn(drafter)
    upload_target.fn(make_target(drafter.parent / "target"))
    assert sent[2] == "config.json"
    assert sent[-1] == "config.json"


def test_a_changed_drafter_is_refused(s3: Any, drafter: Path) -> None:
    (drafter / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not the file that was exported"):
        upload_drafter.fn(drafter)
    assert not changed_at(s3)


def test_a_bucket_that_does_not_exist_is_named(
    s3: Any, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_BUCKET", "somewhere-else")
    with pytest.raises(AwsError, match=r"no S3 bucket 'somewhere-else'\n.*\n.*aws s3 mb"):
        upload_drafter.fn(drafter)


def make_target(path: Path) -> Path:
    from tests.drafter.tiny import make_target as make

    make(path)
    return path
