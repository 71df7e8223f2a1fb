"""The runtime's two calls, made by boto3 against the router in a real uvicorn with real (fake) containers behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from botocore.eventstream import EventStreamBuffer
from botocore.exceptions import ClientError, EventStreamError

from containers.local import router as router_module
from containers.local.faults import Fault
from containers.local.fleet import Fleet
from tests.containers.data_plane import CHAT, ENDPOINT, DataPlane, chat, stream
from tests.waiting import PATIENCE_S, wait_until

TEXT = "The bird has fledged."


def names(version: str) -> dict[str, str]:
    return {"SM_VLLM_MODEL": "m", "SM_VLLM_SERVED_MODEL_NAME": version}


def two_fleets(plane: DataPlane) -> tuple[Fleet, Fleet]:
    """An old and a new fleet, told apart by the model that their answers name."""
    old = plane.launched(config_name="config-1", environment=names("v1"))
    new = plane.launched(config_name="config-2", environment=names("v2"))
    return old, new


def kill_first(fleet: Fleet) -> None:
    """Kill an instance, and wait until the kernel has closed its port: a connection in between is one in flight."""
    instance = fleet.in_service_instances()[0]
    os.kill(instance.record.pid, signal.SIGKILL)
    wait_until(lambda: not instance.is_alive())


def error_of(call: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
    with pytest.raises(ClientError) as caught:
        call(*arguments, **named)
    return caught.value.response


def test_a_plain_request_gets_the_containers_answer_and_the_variants_name(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    answer = plane.client().invoke_endpoint(
        EndpointName=ENDPOINT,
        ContentType="application/json",
        CustomAttributes="trace=7",
        InferenceId="id-1",
        TargetVariant="AllTraffic",
        Body=json.dumps(CHAT),
    )
    body = json.loads(answer["Body"].read())
    assert body["choices"][0]["message"]["content"] == TEXT
    assert body["model"] == "drafter-v1"
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert answer["ContentType"] == "application/json"
    assert answer["CustomAttributes"] == "trace=7"


@pytest.mark.slow
def test_a_streamed_answer_arrives_piece_by_piece_as_it_is_written(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    arrived, pieces = [], []
    for event in stream(plane.client(), fake_latency_s=10.0):
        arrived.append(time.monotonic())
        pieces.append(event["PayloadPart"]["Bytes"])
    events = [line.removeprefix("data: ") for line in b"".join(pieces).decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    words = [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert "".join(words) == TEXT
    assert arrived[-1] - arrived[0] > 0.5  # not all at the end


def test_the_streams_head_names_variant_and_content_type(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    answer = plane.client().invoke_endpoint_with_response_stream(
        EndpointName=ENDPOINT, ContentType="application/json", Body=json.dumps({**CHAT, "stream": True})
    )
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert answer["ContentType"].startswith("text/event-stream")
    list(answer["Body"])


def test_an_unknown_endpoint_and_an_unknown_variant_are_validation_errors(plane: DataPlane) -> None:
    client = plane.client()
    for call in (chat, stream):
        response = error_of(call, client)
        assert response["Error"] == {
            "Code": "ValidationError",
            "Message": "Endpoint fledge of account 123456789012 not found.",
        }
        assert response["ResponseMetadata"]["HTTPStatusCode"] == 400
    plane.route((plane.launched(), 1.0))
    response = error_of(client.invoke_endpoint, EndpointName=ENDPOINT, Body=b"{}", TargetVariant="Other")
    assert response["Error"]["Message"] == "Variant Other not found for Request"


def test_features_of_other_kinds_of_endpoint_are_refused(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    response = error_of(plane.client().invoke_endpoint, EndpointName=ENDPOINT, Body=b"{}", TargetModel="a")
    assert response["Error"]["Code"] == "ValidationError"


def test_a_body_over_6_mib_is_refused(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    url = f"{plane.url}/endpoints/{ENDPOINT}/invocations"
    fits = json.dumps({**CHAT, "pad": ""}).encode()
    fits = fits.replace(b'"pad": ""', b'"pad": "' + b"x" * (6 * 2**20 - len(fits)) + b'"')
    assert len(fits) == 6 * 2**20
    assert httpx.post(url, content=fits, timeout=PATIENCE_S).status_code == 200
    refused = httpx.post(url, content=fits + b" ", timeout=PATIENCE_S)
    assert refused.status_code == 400
    assert refused.headers["x-amzn-ErrorType"] == "ValidationError"
    assert "less than or equal to 6291456" in refused.json()["Message"]


@pytest.mark.parametrize("call", [chat, stream])
def test_an_error_of_the_container_becomes_a_model_error_with_its_status_and_words(
    plane: DataPlane, call: Any
) -> None:
    plane.route((plane.launched(environment={"SM_VLLM_MODEL": "m", "FAKE_STATUS": "500"}), 1.0))
    response = error_of(call, plane.client())
    assert response["Error"]["Code"] == "ModelError"
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert response["OriginalStatusCode"] == 500
    assert json.loads(response["OriginalMessage"])["error"]["message"] == "told to fail"
    assert response["LogStreamArn"].endswith("log-group:/aws/sagemaker/Endpoints/fledge")
    assert 'Received server error (500) from primary with message "' in response["Error"]["Message"]
    assert str(plane.machine.home / "logs") in response["Error"]["Message"]


def test_a_bad_request_is_the_clients_error(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    response = error_of(plane.client().invoke_endpoint, EndpointName=ENDPOINT, Body=b"{}")
    assert response["OriginalStatusCode"] == 400
    assert response["Error"]["Message"].startswith("Received client error (400) from primary")


@pytest.mark.parametrize("call", [chat, stream])
def test_an_answer_that_takes_too_long_is_a_model_error(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    assert router_module.INVOCATION_TIMEOUT_S == 60.0
    monkeypatch.setattr(router_module, "INVOCATION_TIMEOUT_S", 0.5)
    fleet = plane.launched()
    plane.route((fleet, 1.0))
    (hung,) = (instance["pid"] for instance in fleet.describe())
    os.kill(hung, signal.SIGSTOP)
    response = error_of(call, plane.client())
    os.kill(hung, signal.SIGCONT)
    assert response["Error"]["Code"] == "ModelError"
    assert response["OriginalStatusCode"] == 0
    assert (
        "invocation timed out while waiting for a response from container primary"
        in response["OriginalMessage"]
    )
    wait_until(lambda: fleet.in_flight == 0)


def test_a_stream_that_takes_too_long_ends_with_sagemakers_exception(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "STREAM_TIMEOUT_S", 1.0)
    fleet = plane.launched()
    plane.route((fleet, 1.0))
    with pytest.raises(EventStreamError, match=r"ModelStreamError.*within the time allowed"):
        list(stream(plane.client(), fake_latency_s=8))
    wait_until(lambda: fleet.in_flight == 0)


def test_a_request_in_flight_on_an_instance_that_dies_gets_awss_error_and_a_retry_is_answered(
    plane: DataPlane,
) -> None:
    old, new = two_fleets(plane)
    plane.route((old, 0.0), (new, 1.0))
    response = error_of(chat, plane.client(), fake_exit=True)
    assert response["Error"]["Code"] == "ModelError"
    assert response["OriginalStatusCode"] == 0
    assert "could not get a response from the fledge endpoint" in response["OriginalMessage"]
    assert chat(plane.client())["model"] == "v1"


def test_a_stream_whose_instance_dies_ends_with_sagemakers_exception(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    events = iter(stream(plane.client(), fake_exit=True))
    assert "PayloadPart" in next(events)
    with pytest.raises(EventStreamError, match=r"ModelStreamError.*reset or closed"):
        list(events)


def test_a_broken_stream_says_which_kind_it_is(plane: DataPlane) -> None:
    plane.route((plane.launched(), 1.0))
    url = f"{plane.url}/endpoints/{ENDPOINT}/invocations-response-stream"
    buffer = EventStreamBuffer()
    body = {**CHAT, "stream": True, "fake_exit": True}
    buffer.add_data(httpx.post(url, json=body, timeout=PATIENCE_S).content)
    *parts, last = list(buffer)
    assert parts
    assert last.headers[":message-type"] == "exception"
    assert last.headers[":exception-type"] == "ModelStreamError"
    assert json.loads(last.payload)["ErrorCode"] == "StreamBroken"


def test_an_instance_that_refuses_the_connection_costs_no_request(plane: DataPlane) -> None:
    fleet = plane.launched(instance_count=2)
    plane.route((fleet, 1.0))
    kill_first(fleet)
    client = plane.client()
    for _ in range(6):
        assert chat(client)["model"] == "drafter-v1"
    assert len(fleet.in_service_instances()) == 1


def test_when_the_whole_fleet_is_gone_another_answers_and_without_one_the_service_is_unavailable(
    plane: DataPlane,
) -> None:
    old, new = two_fleets(plane)
    plane.route((old, 0.9), (new, 0.1))
    kill_first(new)
    client = plane.client()
    assert {chat(client)["model"] for _ in range(20)} == {"v1"}
    kill_first(old)
    response = error_of(chat, client)
    assert response["Error"]["Code"] == "ServiceUnavailable"
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 503


def test_shares_of_traffic_are_those_asked_for(plane: DataPlane) -> None:
    old, new = two_fleets(plane)
    client = plane.client()
    for percent in (10, 50, 33):
        plane.route((old, 100 - percent), (new, percent))
        answers = Counter(chat(client)["model"] for _ in range(30))
        # Wherever the even sequence begins: 2 to 4 of 3, 13 to 17 of 15, 9 to 12 of 9.9.
        assert answers["v2"] == pytest.approx(0.3 * percent, abs=2.2)


def test_a_client_that_alternates_plain_and_streamed_sees_the_share_in_both(plane: DataPlane) -> None:
    old, new = two_fleets(plane)
    plane.route((old, 1.0), (new, 1.0))
    client = plane.client()
    plain: Counter[str] = Counter()
    streamed: Counter[str] = Counter()
    for _ in range(30):
        plain[chat(client)["model"]] += 1
        first = next(iter(stream(client)))["PayloadPart"]["Bytes"].decode()
        streamed["v2" if '"v2"' in first else "v1"] += 1
    assert 10 <= plain["v2"] <= 20
    assert 10 <= streamed["v2"] <= 20


def test_a_steady_load_loses_no_request_while_one_fleet_takes_over_from_another(plane: DataPlane) -> None:
    old, new = two_fleets(plane)
    plane.route((old, 1.0))
    client = plane.client()
    stop = threading.Event()
    answers: list[str] = []

    def load(number: int) -> None:
        while not stop.is_set():
            if number % 2:
                answers.append(chat(client, fake_latency_s=0.1)["model"])
            else:
                pieces = [event["PayloadPart"]["Bytes"] for event in stream(client, fake_latency_s=0.1)]
                assert b"[DONE]" in pieces[-1]
                answers.append("v2" if b'"v2"' in pieces[0] else "v1")

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(load, number) for number in range(4)]
        try:
            wait_until(lambda: len(answers) > 10)
            plane.route((old, 0.9), (new, 0.1))
            wait_until(lambda: "v2" in answers)
            plane.route((new, 1.0))
            plane.run(old.stop(drain_s=PATIENCE_S))
            count = len(answers)
            wait_until(lambda: len(answers) > count + 20)
        finally:
            stop.set()
        for submitted in clients:
            submitted.result(PATIENCE_S)  # raises what the client raised
    assert set(answers[-10:]) == {"v2"}
    wait_until(lambda: new.in_flight == 0)  # a caller has its last byte a moment before the router is done


@pytest.mark.slow
def test_a_canary_that_crashes_under_load_costs_only_what_it_was_answering_and_one_retry_answers_that(
    plane: DataPlane,
) -> None:
    old = plane.launched(config_name="config-1", environment=names("v1"))
    crashing = {**names("v2"), "FAKE_CRASH_AFTER_S": "15"}
    new = plane.launched(config_name="config-2", environment=crashing)
    first = new.describe()[0]["instance_id"]
    watching = [plane.start(fleet.watch()) for fleet in (old, new)]
    plane.route((old, 0.5), (new, 0.5))
    client = plane.client()
    stop = threading.Event()
    failures: list[dict[str, Any]] = []
    answered: Counter[str] = Counter()

    def load() -> None:
        while not stop.is_set():
            try:
                answered[chat(client, fake_latency_s=0.2)["model"]] += 1
            except ClientError as error:
                failures.append(error.response)
                answered[chat(client, fake_latency_s=0.2)["model"]] += 1  # raises when the retry fails too

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(load) for _ in range(4)]
        try:
            wait_until(lambda: first not in [instance["instance_id"] for instance in new.describe()])
            wait_until(lambda: new.in_service_instances())  # replaced
            wait_until(lambda: not new.in_service_instances())  # and crashed again
        finally:
            stop.set()
        for submitted in clients:
            submitted.result(PATIENCE_S)
    assert answered["v1"] > 10
    assert answered["v2"] > 5
    assert 1 <= len(failures) <= 8  # four clients, two crashes
    assert {failure["Error"]["Code"] for failure in failures} == {"ModelError"}
    for watch in watching:
        watch.cancel()


def test_the_least_busy_instance_is_asked_first(plane: DataPlane) -> None:
    fleet = plane.launched(instance_count=2)
    plane.route((fleet, 1.0))
    client = plane.client()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(chat, client, fake_latency_s=50.0)
        wait_until(lambda: fleet.in_flight == 2)
        busy = [instance.in_flight for instance in fleet.in_service_instances()]
        plane.run(fleet.stop(drain_s=0))  # nobody wants these answers
    assert busy == [1, 1]


def test_a_client_that_goes_away_frees_its_instance(plane: DataPlane) -> None:
    fleet = plane.launched()
    plane.route((fleet, 1.0))
    url = f"{plane.url}/endpoints/{ENDPOINT}/invocations-response-stream"
    body = {**CHAT, "stream": True, "fake_latency_s": 2 * PATIENCE_S}
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        assert fleet.in_flight == 1
    wait_until(lambda: fleet.in_flight == 0)


def test_latency_can_be_ordered_for_one_config(plane: DataPlane) -> None:
    old, new = two_fleets(plane)
    plane.faults.order(Fault(kind="latency", config="config-2", delay_s=1.5, factor=2.0))
    client = plane.client()

    def seconds(fleet: Fleet, call: Any) -> float:
        plane.route((fleet, 1.0))
        started = time.monotonic()
        answer = call(client, fake_latency_s=0.4)
        if call is stream:
            list(answer)
        return time.monotonic() - started

    assert seconds(new, chat) > 2.25
    assert seconds(new, stream) > 2.0
    assert min(seconds(old, chat) for _ in range(5)) < 2.0
