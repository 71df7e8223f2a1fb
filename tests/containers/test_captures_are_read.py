"""What an endpoint of this machine captures is what the next retrain reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from containers.local.capture import Captured, CaptureWriter
from containers.local.traffic import Route
from drafter.config import PrepareSettings
from drafter.conversations import load_conversations, prepare
from tests.containers.control_plane import forget_everything
from tests.drafter.captured_lines import chat_request, streamed_answer, whole_answer
from tests.drafter.tiny import make_target


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket, and the environment that leads to it."""
    import s3fs

    forget_everything(moto)
    s3fs.S3FileSystem.clear_instance_cache()  # one that knows the server of another test
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket="captured")
    yield client
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("json_types", [["application/json"], []], ids=["as text", "in base64"])
def test_captured_requests_become_conversations(json_types: list[str], s3: Any, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "EnableCapture": True,
        "InitialSamplingPercentage": 100,
        "DestinationS3Uri": "s3://captured/captures/fledge/",
        "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
    }
    if json_types:
        config["CaptureContentTypeHeader"] = {"JsonContentTypes": json_types}
    fleet: Any = None  # capturing needs none
    route = Route(fleet=fleet, weight=1.0, variant_name="AllTraffic", config_name="fledge-v1", capture=config)
    exchanges = [
        (chat_request("hi"), whole_answer("hello"), "application/json", "i-1"),
        (chat_request("hi", "hello", "ünd jetzt?", stream=True), streamed_answer("ein ", "Flug"), "text/event-stream", None),
        (chat_request("ping"), whole_answer("pong"), "application/json", "fledge-probe-1"),
    ]  # fmt: skip
    writer = CaptureWriter(s3)
    for request, answer, kind, inference_id in exchanges:
        body = json.dumps(request).encode()
        captured = Captured("fledge", body, "application/json", answer.encode(), kind, inference_id)
        assert writer.wants(route)
        writer.add(route, captured)
    asyncio.run(writer.flush())

    prepare(
        PrepareSettings.model_validate(
            {
                "sources": [{"uri": "s3://captured/captures/fledge/", "domain": "production"}],
                "target": make_target(tmp_path / "target"),
                "output": tmp_path / "dataset",
                "evaluation_share": 0.0,
            }
        )
    )

    (conversation,) = load_conversations(tmp_path / "dataset", "train")
    assert [m.content for m in conversation.messages] == ["hi", "hello", "ünd jetzt?", "ein Flug"]
