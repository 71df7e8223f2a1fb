"""A client that asks an endpoint all the time: a few requests a second, plain and streamed in turn."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.config import Config

from tasks.version_record import VersionRecord

PROMPTS = ("Tell me about rain.", "Name three birds.", "What is a clock?", "Why is the sea salty?")
_MOST_IN_FLIGHT = 32


@dataclass(frozen=True)
class Answered:
    """One request. Times are seconds of time.monotonic()."""

    sent_at: float
    ended_at: float
    streamed: bool
    served_name: str | None
    error: str | None


@dataclass
class SteadyLoad:
    """Sends requests as a `with` block lasts, whether earlier ones are answered or not.

    Args:
        url: of the runtime.
        endpoint_name: whom to ask.
        requests_per_s: how many are sent a second.
        max_tokens: of one answer.
        temperature: None: the model's own.
    """

    url: str
    endpoint_name: str
    requests_per_s: float = 3.0
    max_tokens: int = 16
    temperature: float | None = None
    prompts: tuple[str, ...] = PROMPTS
    answers: list[Answered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._runtime = boto3.client(
            "sagemaker-runtime",
            endpoint_url=self.url,
            region_name="us-east-1",
            # A failed request is to be seen, not tried again.
            config=Config(
                retries={"total_max_attempts": 1}, read_timeout=90, max_pool_connections=_MOST_IN_FLIGHT
            ),
        )
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_MOST_IN_FLIGHT)
        self._clock = threading.Thread(target=self._send_on, daemon=True)

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._clock.join()
        self._pool.shutdown(wait=True)

    @property
    def failed(self) -> list[Answered]:
        return [one for one in self.answers if one.error is not None]

    def answered_by(self, version: VersionRecord) -> list[Answered]:
        """The answers of a version's fleets, by the time that their requests were sent."""
        found = (one for one in self.answers if (one.served_name or "").startswith(f"{version.served_name}-"))
        return sorted(found, key=lambda one: one.sent_at)

    def num_sent_since(self, since: float) -> int:
        """How many requests that were sent after a time have their answer."""
        return sum(one.sent_at >= since for one in self.answers)

    def share_of(self, version: VersionRecord, since: float, until: float = math.inf) -> float:
        """Share of the requests sent in a span of time that a version answered."""
        inside = [one for one in self.answers if since <= one.sent_at < until]
        mine = set(self.answered_by(version))
        return sum(one in mine for one in inside) / len(inside)

    def _send_on(self) -> None:
        number = 0
        while not self._stop.wait(1 / self.requests_per_s):
            self._pool.submit(self._ask, number)
            number += 1

    def _ask(self, number: int) -> None:
        sent_at, streamed, name, problem = time.monotonic(), bool(number % 2), None, None
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": self.prompts[number // 2 % len(self.prompts)]}],
            "max_tokens": self.max_tokens,
            "stream": streamed,
            **({} if self.temperature is None else {"temperature": self.temperature}),
        }
        request = {
            "EndpointName": self.endpoint_name,
            "ContentType": "application/json",
            "Body": json.dumps(body),
        }
        try:
            name = self._streamed(request) if streamed else self._plain(request)
        except Exception as error:  # whatever it is, the client saw it
            problem = f"{type(error).__name__}: {error}"
        self.answers.append(Answered(sent_at, time.monotonic(), streamed, name, problem))

    def _plain(self, request: dict[str, Any]) -> str:
        answer = json.loads(self._runtime.invoke_endpoint(**request)["Body"].read())
        # Its text may be empty: a sampled answer can begin with its end.
        assert answer["choices"][0]["finish_reason"] in ("stop", "length"), answer
        return str(answer["model"])

    def _streamed(self, request: dict[str, Any]) -> str:
        """The served name of an answer that came whole, to its last event."""
        events = self._runtime.invoke_endpoint_with_response_stream(**request)["Body"]
        text = b"".join(event["PayloadPart"]["Bytes"] for event in events).decode()
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", text
        return str(json.loads(lines[0])["model"])
