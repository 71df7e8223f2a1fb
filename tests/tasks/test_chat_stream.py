"""A streamed answer is put together from pieces that come as the network likes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.chat_stream import ChatStream
from tasks.endpoint_settings import EndpointError

EVENTS = [
    {"model": "fledge-drafter-v3", "choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"model": "fledge-drafter-v3", "choices": [{"delta": {"content": "Zwei Vögel"}}]},
    {"model": "fledge-drafter-v3", "choices": [{"delta": {"content": " singen."}, "finish_reason": "stop"}]},
    {
        "model": "fledge-drafter-v3",
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 6},
        "metrics": {"speculative_decoding": {"mean_acceptance_length": 1.75}},
    },
]
STREAM = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in EVENTS)


def stream_of(*parts: bytes) -> ChatStream:
    """A question whose answer comes in these parts."""
    asked: dict[str, Any] = {}

    def invoke(**request: Any) -> dict[str, Any]:
        asked.update(request)
        return {"Body": [{"PayloadPart": {"Bytes": part}} for part in parts]}

    runtime = SimpleNamespace(invoke_endpoint_with_response_stream=invoke, asked=asked)
    return ChatStream(SimpleNamespace(runtime=runtime), "birds", [], 16, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_pieces_may_be_cut_anywhere_even_within_a_letter(size: int) -> None:
    whole = STREAM + b"data: [DONE]\n\n"
    stream = stream_of(*(whole[start : start + size] for start in range(0, len(whole), size)))
    assert list(stream) == ["Zwei Vögel", " singen."]
    assert stream.answer is not None
    assert (stream.answer.text, stream.answer.served_name) == ("Zwei Vögel singen.", "fledge-drafter-v3")
    assert (stream.answer.output_tokens, stream.answer.acceptance_length) == (6, 1.75)
    assert 0 < stream.answer.first_token_s <= stream.answer.latency_s


def test_usage_is_asked_for_since_acceptance_comes_with_it() -> None:
    stream = stream_of(STREAM + b"data: [DONE]\n\n")
    list(stream)
    body = json.loads(stream._aws.runtime.asked["Body"])
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    stream = stream_of(STREAM[:120])
    with pytest.raises(EndpointError, match="broke off"):
        list(stream)
    assert stream.answer is None


def test_an_error_within_the_stream_is_told_in_the_servers_words() -> None:
    error = {"error": {"message": "context length is 2048", "code": 400}}
    stream = stream_of(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
    with pytest.raises(EndpointError, match="context length is 2048"):
        list(stream)


def test_serving_without_a_drafter_is_told_as_such() -> None:
    events = [{**event, "metrics": None} for event in EVENTS]
    parts = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    stream = stream_of(parts + b"data: [DONE]\n\n")
    list(stream)
    assert stream.answer is not None
    assert stream.answer.acceptance_length is None
