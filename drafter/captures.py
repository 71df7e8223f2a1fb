"""SageMaker's data capture, read as conversations: what an endpoint was asked and answered becomes training data.

One line is one request: the body that came in, the body that went out (a chat completion, or the server-sent
events of a streamed one), each as text or in base64. A request carries the whole conversation so far, so its
messages and the answer are one conversation; an earlier request of the same one is a prefix of it, and
`longest_only` keeps the longest.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# The prober marks its requests by such an inference id: what it asks is nobody's conversation.
PROBE_PREFIX = "fledge-probe"

Turns = Sequence[tuple[str, str]]

_SPOKEN_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Capture:
    """One captured request.

    Attributes:
        messages: OpenAI messages of the request and, where it ended well, the answer as the last one.
        where: inference id and time in words, for messages to the user; may be empty.
        problem: why the line is damaged, or None.
        left_out: why an intact line is no conversation to learn from, or None.
    """

    messages: tuple[dict[str, Any], ...] = ()
    where: str = ""
    problem: str | None = None
    left_out: str | None = None


class _Damaged(Exception):
    """The line is not what data capture writes. The text says why."""


class _LeftOut(Exception):
    """A request that is no conversation. The text says which kind, as a plural for the summary."""


def is_capture(value: Any) -> bool:
    """Whether a decoded line is of SageMaker's data capture."""
    return isinstance(value, dict) and "captureData" in value


def open_capture(value: dict[str, Any]) -> Capture:
    """The conversation of one captured line, or what is the matter with it."""
    event = value.get("eventMetadata")
    event = event if isinstance(event, dict) else {}
    inference_id = str(event.get("inferenceId") or "")
    where = _where(inference_id, event)
    if inference_id.startswith(PROBE_PREFIX):
        return Capture(where=where, left_out="Fledge's own probes")
    try:
        data = value["captureData"]
        if not isinstance(data, dict):
            raise _Damaged("captureData is no object")
        messages = _asked(_body(data, "endpointInput"))
        answer = _answered(_body(data, "endpointOutput"))
    except _Damaged as error:
        return Capture(where=where, problem=str(error))
    except _LeftOut as error:
        return Capture(where=where, left_out=str(error))
    answered = ({"role": "assistant", "content": answer},) if answer else ()
    return Capture((*messages, *answered), where)


def longest_only(conversations: Sequence[Turns]) -> Iterator[int]:
    """Indexes of the conversations that are no proper prefix of another one, in order.

    Each turn's outer white space is left out of the comparison, because clients trim the answers that they
    send back: (hi, hello), (hi, "hello ", bye, so long) -> 1.
    """
    digests = [list(_prefix_digests(turns)) for turns in conversations]
    continued = {digest for prefixes in digests for digest in prefixes[:-1]}
    for index, prefixes in enumerate(digests):
        if not prefixes or prefixes[-1] not in continued:
            yield index


def _prefix_digests(turns: Turns) -> Iterator[bytes]:
    """Digest of the first 1, 2, ... turns."""
    digest = hashlib.sha256()
    for role, content in turns:
        text = json.dumps([role, content.strip()])
        digest.update(f"{len(text)}:{text}".encode())
        yield digest.digest()


def _where(inference_id: str, event: dict[str, Any]) -> str:
    at = event.get("inferenceTime") or event.get("eventTime")
    parts = [f"inference {inference_id}"] if inference_id else []
    return " ".join([*parts, f"at {at}"] if at else parts)


def _body(data: dict[str, Any], side: str) -> str | None:
    """A captured body as text; None where that side was not captured."""
    part = data.get(side)
    if part is None:
        return None
    body = part.get("data") if isinstance(part, dict) else None
    if isinstance(body, dict | list):  # written as JSON instead of as a string of it
        return json.dumps(body)
    if not isinstance(body, str):
        raise _Damaged(f"{side} has no data")
    if str(part.get("encoding", "")).upper() != "BASE64":
        return body
    try:
        return base64.b64decode(body, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        raise _Damaged(f"{side} is not base64 of text") from None


def _asked(body: str | None) -> tuple[dict[str, Any], ...]:
    """The messages of a chat request. `developer`, the newer name, is read as `system`."""
    if body is None:
        raise _LeftOut("answers without their request")
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"endpointInput is broken JSON: {error}") from None
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _LeftOut("requests that are no chat")
    if any(message.get("role") not in _SPOKEN_ROLES or message.get("tool_calls") for message in messages):
        raise _LeftOut("chats that call tools")
    if any(_has_other_than_text(message.get("content")) for message in messages):
        raise _LeftOut("chats with images or other parts that are no text")
    if messages and messages[-1]["role"] == "assistant":
        raise _LeftOut("requests to continue an answer")
    return tuple({**message, "role": _SPOKEN_ROLES[message["role"]]} for message in messages)


def _has_other_than_text(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") != "text" for part in content
    )


def _answered(body: str | None) -> str | None:
    """The whole answer; None where none was captured or it broke off: the prompt is kept without it."""
    if body is None:
        return None
    text = body.lstrip()
    return _whole_answer(text) if text.startswith("{") else _streamed_answer(text)


def _whole_answer(body: str) -> str | None:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"endpointOutput is broken JSON: {error}") from None
    choice = _first_choice(answer)
    message = choice.get("message") if choice else None
    if not isinstance(message, dict):
        raise _LeftOut("failed requests")
    return _spoken(message)


def _streamed_answer(body: str) -> str | None:
    """The pieces of a streamed answer put together; None without an end (the client left)."""
    pieces: list[str] = []
    is_whole = False
    events = list(_events(body))
    if not events:
        raise _LeftOut("failed requests")
    for event in events:
        if "error" in event:
            raise _LeftOut("failed requests")
        choice = _first_choice(event)
        if choice is None:
            continue  # figures about the use of tokens come without a choice
        delta = choice.get("delta")
        pieces.append((_spoken(delta) if isinstance(delta, dict) else None) or "")
        is_whole = is_whole or choice.get("finish_reason") is not None
    return "".join(pieces) if is_whole else None


def _events(body: str) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event; a last one that broke off is dropped."""
    lines = [line.removeprefix("data:").strip() for line in body.splitlines() if line.startswith("data:")]
    for number, line in enumerate(lines):
        if line == "[DONE]":
            return
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) - 1:
                return
            raise _Damaged(f"event {number + 1} of the streamed answer is broken JSON") from None
        if isinstance(event, dict):
            yield event


def _first_choice(answer: Any) -> dict[str, Any] | None:
    """The choice of index 0: a request may ask for several."""
    choices: Iterable[Any] = answer.get("choices") or () if isinstance(answer, dict) else ()
    for choice in choices:
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            return choice
    return None


def _spoken(message: dict[str, Any]) -> str | None:
    if message.get("tool_calls"):
        raise _LeftOut("chats that call tools")
    content = message.get("content")
    return content if isinstance(content, str) else None
