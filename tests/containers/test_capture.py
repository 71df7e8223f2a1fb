"""Data capture and metrics, as S3 and CloudWatch hold them afterwards."""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from containers.local.metrics import Metrics
from tests.containers.data_plane import BUCKET, CHAT, ENDPOINT, DataPlane, chat, stream

CAPTURE = {
    "EnableCapture": True,
    "InitialSamplingPercentage": 100,
    "DestinationS3Uri": f"s3://{BUCKET}/capture/",
    "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
    "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
}
KEY = re.compile(
    r"capture/fledge/AllTraffic/\d{4}/\d\d/\d\d/\d\d/\d\d-\d\d-\d{3}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.jsonl"
)


def captured_lines(plane: DataPlane, s3: Any) -> list[dict[str, Any]]:
    plane.run(plane.capture_writer.flush())
    keys = [found["Key"] for found in s3.list_objects_v2(Bucket=BUCKET, Prefix="capture").get("Contents", ())]
    assert all(KEY.fullmatch(key) for key in keys)
    texts = [s3.get_object(Bucket=BUCKET, Key=key)["Body"].read().decode() for key in keys]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_a_plain_request_is_captured_as_sagemaker_writes_it(plane: DataPlane, s3: Any) -> None:
    plane.route((plane.launched(), 1.0), capture=CAPTURE)
    answer = plane.client().invoke_endpoint(
        EndpointName=ENDPOINT,
        ContentType="application/json",
        InferenceId="id-7",
        CustomAttributes="trace=7",
        Body=json.dumps(CHAT),
    )
    (line,) = captured_lines(plane, s3)
    assert line["captureData"] == {
        "endpointInput": {
            "observedContentType": "application/json",
            "mode": "INPUT",
            "data": json.dumps(CHAT),
            "encoding": "JSON",
        },
        "endpointOutput": {
            "observedContentType": "application/json",
            "mode": "OUTPUT",
            "data": answer["Body"].read().decode(),
            "encoding": "JSON",
        },
    }
    metadata = line["eventMetadata"]
    assert metadata["inferenceId"] == "id-7"
    assert metadata["customAttributes"] == ["trace=7"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", metadata["inferenceTime"])
    assert len(metadata["eventId"]) == 36
    assert line["eventVersion"] == "0"


def test_a_streamed_answer_is_captured_whole_and_as_base64_unless_declared(plane: DataPlane, s3: Any) -> None:
    plane.route((plane.launched(), 1.0), capture=CAPTURE)
    pieces = b"".join(event["PayloadPart"]["Bytes"] for event in stream(plane.client()))
    (line,) = captured_lines(plane, s3)
    output = line["captureData"]["endpointOutput"]
    assert output["observedContentType"].startswith("text/event-stream")
    assert output["encoding"] == "BASE64"
    assert base64.b64decode(output["data"]) == pieces
    assert line["captureData"]["endpointInput"]["encoding"] == "JSON"


@pytest.mark.parametrize(
    ("changes", "lines", "sides"),
    [
        ({"InitialSamplingPercentage": 0}, 0, set()),
        ({"EnableCapture": False}, 0, set()),
        ({"CaptureOptions": [{"CaptureMode": "Input"}]}, 4, {"endpointInput"}),
        ({"CaptureOptions": [{"CaptureMode": "InputAndOutput"}]}, 4, {"endpointInput", "endpointOutput"}),
    ],
)
def test_what_is_captured_follows_the_config(
    plane: DataPlane, s3: Any, changes: dict[str, Any], lines: int, sides: set[str]
) -> None:
    plane.route((plane.launched(), 1.0), capture={**CAPTURE, **changes})
    client = plane.client()
    for _ in range(4):
        chat(client)
    captured = captured_lines(plane, s3)
    assert len(captured) == lines
    assert {side for line in captured for side in line["captureData"]} == sides


def test_the_share_captured_is_the_percentage_asked_for(plane: DataPlane, s3: Any) -> None:
    plane.route((plane.launched(), 1.0), capture={**CAPTURE, "InitialSamplingPercentage": 30})
    (route,) = plane.traffic.routes(ENDPOINT)
    wanted = sum(plane.capture_writer.wants(route) for _ in range(2000))
    assert 500 < wanted < 700


def test_failed_requests_are_not_captured(plane: DataPlane, s3: Any) -> None:
    plane.route((plane.launched(environment={"FAKE_STATUS": "500"}), 1.0), capture=CAPTURE)
    with pytest.raises(ClientError):
        chat(plane.client())
    assert captured_lines(plane, s3) == []


def test_lines_wait_while_the_bucket_is_missing(plane: DataPlane, s3: Any) -> None:
    elsewhere = {**CAPTURE, "DestinationS3Uri": "s3://fledge-later/capture"}
    plane.route((plane.launched(), 1.0), capture=elsewhere)
    chat(plane.client())
    plane.run(plane.capture_writer.flush())
    s3.create_bucket(Bucket="fledge-later")
    plane.run(plane.capture_writer.flush())
    assert len(s3.list_objects_v2(Bucket="fledge-later", Prefix="capture/fledge/")["Contents"]) == 1


def test_a_writer_that_is_ended_writes_what_it_holds(plane: DataPlane, s3: Any) -> None:
    plane.route((plane.launched(), 1.0), capture=CAPTURE)
    writing = plane.start(plane.capture_writer.run())
    chat(plane.client())
    writing.cancel()
    plane.run(plane.capture_writer.flush())
    assert len(captured_lines(plane, s3)) == 1


def sum_of(metric: str, config: str | None, variant: str = "AllTraffic") -> dict[str, float]:
    """Sum, samples and average of what CloudWatch holds, by the dimensions that SageMaker publishes under."""
    dimensions = [{"Name": "EndpointName", "Value": ENDPOINT}, {"Name": "VariantName", "Value": variant}]
    if config is not None:
        dimensions.append({"Name": "EndpointConfigName", "Value": config})
    now = datetime.now(UTC)
    statistics = {"total": "Sum", "samples": "SampleCount", "average": "Average"}
    queries = [
        {
            "Id": name,
            "MetricStat": {
                "Metric": {"Namespace": "AWS/SageMaker", "MetricName": metric, "Dimensions": dimensions},
                "Period": 3600,
                "Stat": statistic,
            },
        }
        for name, statistic in statistics.items()
    ]
    results = boto3.client("cloudwatch").get_metric_data(
        MetricDataQueries=queries, StartTime=now - timedelta(minutes=30), EndTime=now + timedelta(minutes=1)
    )["MetricDataResults"]
    return {statistics[result["Id"]]: sum(result["Values"]) for result in results}


def test_metrics_are_published_for_the_variant_and_for_each_config(plane: DataPlane) -> None:
    name = f"V{id(plane)}"  # CloudWatch is shared: a variant of our own
    old = plane.launched(config_name="old", variant_name=name)
    new = plane.launched(config_name="new", variant_name=name, environment={"FAKE_STATUS": "503"})
    client = plane.client()
    plane.route((old, 1.0))
    for _ in range(3):
        chat(client, fake_latency_s=0.1)
    list(stream(client, fake_latency_s=0.4))
    plane.route((new, 1.0))
    with pytest.raises(ClientError):
        chat(client)
    plane.run(plane.metrics.flush())
    assert sum_of("Invocations", "old", name)["Sum"] == 4
    assert sum_of("Invocations", "new", name)["Sum"] == 1
    assert sum_of("Invocations", None, name)["Sum"] == 5
    assert sum_of("Invocation5XXErrors", "old", name) == {"Sum": 0, "SampleCount": 4, "Average": 0}
    assert sum_of("Invocation5XXErrors", "new", name) == {"Sum": 1, "SampleCount": 1, "Average": 1}
    assert sum_of("InvocationModelErrors", "new", name)["Sum"] == 1
    assert sum_of("Invocation4XXErrors", None, name)["Sum"] == 0
    assert sum_of("ModelLatency", "old", name)["SampleCount"] == 4
    assert 150_000 < sum_of("ModelLatency", "old", name)["Average"] < 5_000_000
    assert 0 < sum_of("OverheadLatency", "old", name)["Average"] < 2_000_000
    assert sum_of("FirstChunkModelLatency", "old", name)["SampleCount"] == 1


def test_a_fleet_that_is_gone_is_counted_as_failing_though_another_answers(plane: DataPlane) -> None:
    name = f"W{id(plane)}"
    old = plane.launched(config_name="old", variant_name=name)
    new = plane.launched(config_name="new", variant_name=name)
    plane.run(new.scale(0))
    plane.route((old, 0.5), (new, 0.5))
    client = plane.client()
    for _ in range(10):
        chat(client)
    plane.run(plane.metrics.flush())
    assert 3 <= sum_of("Invocation5XXErrors", "new", name)["Sum"] <= 7
    assert sum_of("Invocations", "old", name)["Sum"] == 10
    assert sum_of("Invocation5XXErrors", "old", name)["Sum"] == 0


def test_metrics_wait_while_cloudwatch_cannot_be_reached(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"X{id(plane)}"
    plane.route((plane.launched(variant_name=name), 1.0))
    chat(plane.client())
    (route,) = plane.traffic.routes(ENDPOINT)
    unreachable = boto3.client("cloudwatch", endpoint_url="http://127.0.0.1:9")
    metrics = Metrics(unreachable)
    metrics.record(route, ENDPOINT, status=200, model_s=1.0)
    plane.run(metrics.flush())
    monkeypatch.setattr(metrics, "_cloudwatch", boto3.client("cloudwatch"))
    plane.run(metrics.flush())
    assert sum_of("Invocations", "config-1", name)["Sum"] == 1
