"""Lines as SageMaker's data capture writes them, for tests."""

from __future__ import annotations

import base64
import json
from typing import Any


def chat_request(*contents: str, system: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chat request whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages, **fields}


def whole_answer(content: str | None, **message: Any) -> str:
    """The body of a chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": "stop",
    }
    return json.dumps({"object": "chat.completion", "model": "drafter-v7", "choices": [choice]})


def streamed_answer(*pieces: str, ends: bool = True) -> str:
    """The server-sent events of a streamed chat completion; without `ends` the client has left before."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in pieces]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    if ends:
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [{"object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    if ends:
        events.append({"object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 9}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return body + ("data: [DONE]\n\n" if ends else "")


def captured(
    request: dict[str, Any] | str | None,
    answer: str | None,
    encoding: str = "JSON",
    inference_id: str | None = None,
) -> dict[str, Any]:
    """One captured line; a body of None was not captured."""
    bodies = {
        "endpointInput": json.dumps(request) if isinstance(request, dict) else request,
        "endpointOutput": answer,
    }
    data = {}
    for (side, body), mode in zip(bodies.items(), ("INPUT", "OUTPUT"), strict=True):
        if body is not None:
            shown = base64.b64encode(body.encode()).decode() if encoding == "BASE64" else body
            kind = "text/event-stream" if body.startswith("data:") else "application/json"
            data[side] = {"observedContentType": kind, "mode": mode, "data": shown, "encoding": encoding}
    event = {"eventId": "0f0c", "inferenceTime": "2026-05-04T03:02:01Z"}
    if inference_id is not None:
        event["inferenceId"] = inference_id
    return {"captureData": data, "eventMetadata": event, "eventVersion": "0"}
