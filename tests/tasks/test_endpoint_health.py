"""Windows put together from CloudWatch and captured answers, both in moto's server."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.aws import connect_aws
from tasks.endpoint_health import (
    Fleet,
    expectation_of,
    health_markdown,
    history_of,
    read_windows,
    window_starts,
)
from tasks.endpoint_settings import ProbeSettings
from tasks.endpoints import UPDATE_FROM_TAG, UPDATE_TO_TAG, Endpoint
from tasks.monitor_settings import MonitorSettings, MonitorThresholds
from tasks.monitoring import MonitorDecision
from tasks.promotion import read_version, record_retrain_asked, record_rollback, set_champion
from tasks.served_answers import mean_acceptance, read_line
from tasks.settings import Places
from tests.tasks.registered_versions import register_version

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
SETTINGS = MonitorSettings(
    window_s=60,
    settle_s=0,
    probe=ProbeSettings(prompts=("Fledge?",)),
    thresholds=MonitorThresholds(num_bad_windows=1, min_answers=2),
)
STREAMED = (
    'data: {"model": "fledge-drafter-v1", "choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'
    'data: {"model": "fledge-drafter-v1", "choices": [], "metrics": {"speculative_decoding": '
    '{"mean_acceptance_length": 1.5, "num_spec_steps": 10}}}\n\ndata: [DONE]\n\n'
)


@pytest.fixture
def fleet(places: Places, tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Version 2 in production, after version 1, on an endpoint that captures."""
    for name in ("S3", "CLOUDWATCH", "SAGEMAKER"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name = f"birds{abs(hash(str(tmp_path))) % 10**8}"  # CloudWatch forgets nothing between tests
    connect_aws(Places()).s3.create_bucket(Bucket=name)
    register_version(places, tmp_path, "a")
    register_version(places, tmp_path, "b")
    set_champion.fn("1", name, "one")
    set_champion.fn("2", name, "two", "one")
    version = read_version("2").model_copy(update={"deployed_at": START - timedelta(hours=1)})
    endpoint = Endpoint(
        name=name,
        arn="arn",
        status="InService",
        config_name="two",
        pending_config_name=None,
        failure_reason=None,
        tags={UPDATE_TO_TAG: "two", UPDATE_FROM_TAG: "one"},
        description={
            "DataCaptureConfig": {"EnableCapture": True, "DestinationS3Uri": f"s3://{name}/captures/"}
        },
    )
    return Fleet(endpoint, version, "fledge-drafter-v2", 3)


def answer(
    acceptance_length: float, steps: int = 10, model: str = "fledge-drafter-v2", **changes: Any
) -> dict[str, Any]:
    speculation = {"mean_acceptance_length": acceptance_length, "num_spec_steps": steps}
    return {"model": model, "choices": [], "metrics": {"speculative_decoding": speculation}, **changes}


def line(
    body: str, at: datetime = START, inference_id: str | None = None, encoding: str = "JSON"
) -> dict[str, Any]:
    if encoding == "BASE64":
        body = base64.b64encode(body.encode()).decode()
    event = {"eventId": "1", "inferenceTime": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
    if inference_id is not None:
        event["inferenceId"] = inference_id
    output = {"observedContentType": "application/json", "mode": "OUTPUT", "data": body, "encoding": encoding}
    return {"captureData": {"endpointOutput": output}, "eventMetadata": event, "eventVersion": "0"}


def capture(fleet: Fleet, at: datetime, *lines: dict[str, Any]) -> None:
    """Lines written as data capture would have at that time."""
    key = f"captures/{fleet.endpoint.name}/AllTraffic/{at:%Y/%m/%d/%H}/{at:%M-%S}-000-{len(lines)}.jsonl"
    body = "".join(json.dumps(one) + "\n" for one in lines)
    connect_aws(Places()).s3.put_object(Bucket=fleet.endpoint.name, Key=key, Body=body.encode())


def publish(fleet: Fleet, name: str, at: datetime, *values: float) -> None:
    dimensions = {"EndpointName": fleet.endpoint.name}
    namespace = "Fledge"
    if name.startswith("Invocation"):
        namespace = "AWS/SageMaker"
        dimensions |= {"VariantName": "AllTraffic", "EndpointConfigName": "two"}
    else:
        dimensions["DrafterVersion"] = fleet.served_name
    data = [
        {
            "MetricName": name,
            "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
            "Timestamp": at,
            "Value": value,
            "StorageResolution": 1,
        }
        for value in values
    ]
    connect_aws(Places()).cloudwatch.put_metric_data(Namespace=namespace, MetricData=data)


def test_a_captured_answer_tells_its_acceptance() -> None:
    found = read_line(json.dumps(line(json.dumps(answer(1.5)))))

    assert found is not None
    assert (found.at, found.served_name) == (START, "fledge-drafter-v2")
    assert (found.num_steps, found.acceptance_length) == (10, 1.5)


def test_a_streamed_answer_in_base64_tells_it_in_its_last_event() -> None:
    found = read_line(json.dumps(line(STREAMED, encoding="BASE64")))

    assert found is not None
    assert (found.served_name, found.acceptance_length) == ("fledge-drafter-v1", 1.5)


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "no json",
        "[]",
        '{"captureData": {}}',
        json.dumps(line('{"error": "no"}')),
        json.dumps(line("data: [DONE]\n\n")),
        json.dumps(line(json.dumps(answer(1.5, model="x", metrics=None)))),
        json.dumps(line(json.dumps(answer(1.5)), inference_id="fledge-probe-1")),
        json.dumps(line("%%%", encoding="JSON")),
    ],
)
def test_probes_failures_and_damaged_lines_tell_nothing(damaged: str) -> None:
    assert read_line(damaged) is None


def test_the_mean_is_over_steps_not_answers() -> None:
    read = [read_line(json.dumps(line(json.dumps(answer(*pair))))) for pair in ((2.0, 10), (1.0, 30))]

    assert mean_acceptance([one for one in read if one is not None]) == 1.25
    assert mean_acceptance([]) is None


def test_windows_hold_traffic_probes_and_errors_of_their_time(fleet: Fleet) -> None:
    second = START + timedelta(seconds=60)
    other = json.dumps(answer(9.0, model="fledge-drafter-v1"))
    capture(
        fleet,
        START,
        line(json.dumps(answer(2.0)), START),
        line(json.dumps(answer(1.5, 30)), START + timedelta(seconds=59)),
        line(other, START),
    )
    capture(fleet, second, line(json.dumps(answer(1.1)), second))
    publish(fleet, "AcceptanceLength", second + timedelta(seconds=5), 1.8, 1.9)
    publish(fleet, "OutputTokensPerSecond", second + timedelta(seconds=5), 60.0, 80.0)
    publish(fleet, "Invocations", START + timedelta(seconds=3), *[1.0] * 20)
    publish(fleet, "Invocation5XXErrors", START + timedelta(seconds=3), *[0.0] * 19, 1.0)

    windows = read_windows.fn(fleet, SETTINGS, second + timedelta(seconds=70))

    first, last = windows[-2:]
    assert (first.started_at, last.started_at) == (START, second)
    assert (first.acceptance_length, first.acceptance_from, first.num_answers) == (1.625, "traffic", 2)
    assert (first.num_requests, first.num_failed, first.num_probes) == (20, 1, 0)
    # One captured answer is too little here: the probes stand in.
    assert last.acceptance_length == pytest.approx(1.85)
    assert (last.acceptance_from, last.num_answers) == ("probes", 2)
    assert (last.output_tokens_per_second, last.num_probes) == (70.0, 2)


def test_without_capture_the_probes_are_all_there_is(fleet: Fleet) -> None:
    fleet.endpoint.description.clear()
    publish(fleet, "AcceptanceLength", START + timedelta(seconds=5), 1.7, 1.7)

    (*_, window) = read_windows.fn(fleet, SETTINGS, START + timedelta(seconds=60))

    assert (window.acceptance_length, window.acceptance_from) == (1.7, "probes")


def test_general_probes_are_not_held_against_the_evaluation(fleet: Fleet) -> None:
    publish(fleet, "AcceptanceLength", START + timedelta(seconds=5), 1.1, 1.1)
    settings = SETTINGS.model_copy(update={"probe": ProbeSettings()})

    (*_, window) = read_windows.fn(fleet, settings, START + timedelta(seconds=60))

    assert (window.acceptance_length, window.num_answers) == (None, 0)


def test_windows_are_whole_settled_and_after_the_version_came_to_serve() -> None:
    settings = MonitorSettings(window_s=60, settle_s=30, thresholds=MonitorThresholds(num_bad_windows=2))
    now = START + timedelta(minutes=10, seconds=25)

    starts = window_starts(settings, None, now)
    assert starts == [START + timedelta(minutes=minute) for minute in range(3, 9)], "12:09 is not settled yet"
    since = window_starts(settings, START + timedelta(minutes=6, seconds=1), now)
    assert since == [START + timedelta(minutes=minute) for minute in (7, 8)]
    assert window_starts(settings, now, now) == []


def test_the_evaluation_promises_the_lowest_figures_of_what_it_learned(fleet: Fleet) -> None:
    assert expectation_of(fleet.version, 3).acceptance_length == 1.86
    assert expectation_of(fleet.version, 3).output_tokens_per_second == 72.0
    assert expectation_of(fleet.version, 5).acceptance_length is None
    general = fleet.version.model_copy(update={"train_domains": ("code", "general")})
    assert expectation_of(general, 3).acceptance_length == 1.09


def test_the_history_says_whether_there_is_a_way_back(fleet: Fleet, places: Places) -> None:
    history = history_of(fleet)
    assert (history.previous_version, history.obstacle) == ("1", None)

    record_retrain_asked.fn("1")
    record_rollback.fn("1", "it was worse still")
    history = history_of(fleet)
    assert history.retrain_asked_at is not None
    assert history.obstacle == "version 1, which served before, was taken back itself: it was worse still"

    first = Fleet(fleet.endpoint, read_version("1"), "fledge-drafter-v1", 3)
    assert history_of(first).obstacle == "version 1 serves, but the champion is 2"


def test_streams_that_tell_no_acceptance_are_said_aloud(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    untold = 'data: {"model": "fledge-drafter-v2", "choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'
    capture(fleet, START, line(untold, START, encoding="BASE64"))
    publish(fleet, "Invocations", START + timedelta(seconds=3), 1.0)

    read_windows.fn(fleet, SETTINGS, START + timedelta(seconds=70))
    assert "SM_VLLM_ENABLE_FORCE_INCLUDE_USAGE=true" in caplog.text

    caplog.clear()
    capture(fleet, START, line(json.dumps(answer(2.0)), START), line(untold, START, encoding="BASE64"))
    read_windows.fn(fleet, SETTINGS, START + timedelta(seconds=70))
    assert "tell no acceptance" not in caplog.text


def test_the_page_shows_every_window(fleet: Fleet) -> None:
    publish(fleet, "AcceptanceLength", START + timedelta(seconds=5), 1.7, 1.7)
    windows = read_windows.fn(fleet, SETTINGS, START + timedelta(seconds=60))
    decision = MonitorDecision(action="ask_retrain", asks_retrain=True, reasons=("because",))

    page = health_markdown("birds", fleet.version, windows, expectation_of(fleet.version, 3), decision)

    assert page.startswith("# birds on `models:/fledge-drafter/2`: ask retrain\n\n- because\n")
    assert "| 03-01 12:00:00 | 1.70 | probes | 2 | - | 0 | 0 |" in page
