"""A conversation with an endpoint, word by word: InvokeEndpointWithResponseStream and OpenAI's event format."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import Field

from drafter.records import Record
from tasks.aws import Aws, explained
from tasks.endpoint_settings import EndpointError

_EVENT = b"data: "
_END = b"[DONE]"


class StreamedAnswer(Record):
    """What an endpoint said, and how it went."""

    text: str
    served_name: str = Field(
        description="First served name of the fleet that answered: its drafter's version."
    )
    latency_s: float = Field(description="From the request to the last token.")
    first_token_s: float = Field(description="From the request to the first token.")
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float | None = Field(description="Output tokens over latency; None: nothing was said.")
    acceptance_length: float | None = Field(
        description="Mean tokens per verification step; None: served without a drafter."
    )


class ChatStream:
    """One question being answered: iterate for the pieces of text, then read `answer`."""

    def __init__(
        self,
        aws: Aws,
        endpoint_name: str,
        messages: Sequence[dict[str, str]],
        max_tokens: int,
        temperature: float,
    ) -> None:
        self._aws, self._endpoint_name = aws, endpoint_name
        self._body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},  # the last event then carries usage and acceptance
        }
        self.answer: StreamedAnswer | None = None

    def __iter__(self) -> Iterator[str]:
        """Pieces of the answer as they come.

        Raises:
            AwsError: no such endpoint, the container refused or died.
            EndpointError: the answer broke off, or was no chat completion.
        """
        started = time.monotonic()
        pieces: list[str] = []
        first_token_s = 0.0
        last: dict[str, Any] = {}
        for event in _events(self._bytes(), self._endpoint_name):
            last = {**last, **event}
            text = _text(event)
            if text:
                first_token_s = first_token_s or time.monotonic() - started
                pieces.append(text)
                yield text
        self.answer = _answer("".join(pieces), last, time.monotonic() - started, first_token_s)

    def _bytes(self) -> Iterator[bytes]:
        response = self._aws.runtime.invoke_endpoint_with_response_stream(
            EndpointName=self._endpoint_name,
            ContentType="application/json",
            Accept="text/event-stream",
            Body=json.dumps(self._body).encode(),
        )
        with explained():
            for event in response["Body"]:
                yield event.get("PayloadPart", {}).get("Bytes", b"")


def _events(parts: Iterable[bytes], endpoint_name: str) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line; a line may come in several parts.

    Raises:
        EndpointError: the stream ended before its end was announced, or holds something else.
    """
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(_EVENT + _END):
                return
            if line.startswith(_EVENT):
                yield _checked(json.loads(line.removeprefix(_EVENT)), endpoint_name)
    raise EndpointError(
        f"the answer of {endpoint_name} broke off"
        + (f" at {rest[:200].decode(errors='replace')!r}" if rest else ""),
        "an answer to its end, as events",
        f"ask again; if it stays so, see `fledge logs {endpoint_name}`",
    )


def _checked(event: dict[str, Any], endpoint_name: str) -> dict[str, Any]:
    if "error" in event:
        raise EndpointError(
            f"{endpoint_name} answered with an error: {json.dumps(event['error'])[:500]}",
            "an answer",
            "change the question or --max-tokens as the message says",
        )
    return event


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices") or []
    return str(choices[0].get("delta", {}).get("content") or "") if choices else ""


def _answer(text: str, last: dict[str, Any], latency_s: float, first_token_s: float) -> StreamedAnswer:
    usage, metrics = last.get("usage") or {}, last.get("metrics") or {}
    drafting = metrics.get("speculative_decoding") or {}
    output_tokens = int(usage.get("completion_tokens", 0))
    return StreamedAnswer(
        text=text,
        served_name=str(last.get("model", "")),
        latency_s=latency_s,
        first_token_s=first_token_s,
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        output_tokens=output_tokens,
        tokens_per_second=output_tokens / latency_s if output_tokens else None,
        acceptance_length=drafting.get("mean_acceptance_length"),
    )
