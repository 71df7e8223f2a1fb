"""Small chats with an endpoint: how fast it answers, how much of the guesses is accepted, and which fleet did it.

An answer names the served model, and its first name carries the drafter's version. So probes that SageMaker
spreads over two fleets sort themselves, and CloudWatch gets figures per version, on which alarms can watch.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any, Self

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from drafter.captures import PROBE_PREFIX
from drafter.errors import FledgeError
from drafter.records import DatasetRecord, Record
from tasks.aws import Aws, AwsError, connect_aws
from tasks.build_endpoint import EndpointPlan
from tasks.build_rollout import METRICS
from tasks.endpoint_settings import DrafterUnfit, EndpointError, ProbeSettings
from tasks.logs import flow_logger
from tasks.settings import Places
from tasks.version_record import VersionRecord

UNKNOWN = "unknown"
GENERAL_PROMPTS = (
    "Write a Python function that reverses a list, with a docstring.",
    "List five vegetables that grow in the shade, one a line.",
    "Explain in three sentences what a hash table is.",
    "Write a SQL query that counts the orders of each customer.",
)
_MAX_PROMPTS = 16
_MAX_SMOKE_TRIES = 8
_REMEMBERED = 30
_COMPARED = 8  # so many of the newest answers of the fleet beside it


class ChatAnswer(Record):
    """One answer, with what it cost."""

    text: str
    served_name: str = Field(description="First served model name of the fleet that answered.")
    latency_ms: float = Field(description="From sending the request to the whole answer.")
    output_tokens: int
    acceptance_length: float | None = Field(
        description="Mean tokens per verification step; None: the server does not say, or does not speculate."
    )
    finish_reason: str | None = None

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.latency_ms * 1000

    @property
    def latency_per_token_ms(self) -> float:
        return self.latency_ms / max(self.output_tokens, 1)


def chat(
    endpoint_name: str,
    messages: Sequence[dict[str, str]],
    max_tokens: int = 256,
    temperature: float = 0.0,
    aws: Aws | None = None,
    probe: bool = False,
) -> ChatAnswer:
    """Ask an endpoint, and measure.

    Raises:
        AwsError: there is no such endpoint, or its container failed.
        EndpointError: the answer is no chat completion.
    """
    aws = aws or connect_aws(Places())
    body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
    mark = {"InferenceId": f"{PROBE_PREFIX}-{uuid.uuid4().hex}"} if probe else {}
    started = time.perf_counter()
    answer = aws.runtime.invoke_endpoint(
        EndpointName=endpoint_name,
        ContentType="application/json",
        Accept="application/json",
        Body=json.dumps(body).encode(),
        **mark,
    )
    content = answer["Body"].read()
    return read_answer(content, (time.perf_counter() - started) * 1000)


def read_answer(content: bytes, latency_ms: float) -> ChatAnswer:
    """A chat completion of vLLM as a record.

    Raises:
        EndpointError: it is none.
    """
    try:
        document = json.loads(content)
        choice = document["choices"][0]
        speculation = (document.get("metrics") or {}).get("speculative_decoding") or {}
        return ChatAnswer(
            text=choice["message"]["content"] or "",
            served_name=document["model"],
            latency_ms=latency_ms,
            output_tokens=document["usage"]["completion_tokens"],
            acceptance_length=speculation.get("mean_acceptance_length"),
            finish_reason=choice.get("finish_reason"),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(
            f"the endpoint answered {content[:200]!r} ({type(error).__name__}: {error})",
            "an OpenAI chat completion",
            "see the container's log; is it vLLM's server?",
        ) from None


class Prober:
    """Asks an endpoint again and again in a thread of its own, and publishes what it finds.

    Args:
        aws: the installation's clients.
        endpoint_name: whom to ask.
        prompts: asked in turn.
        settings: how often, and how much.
        on_answer: told of each answer; for progress and tests.
    """

    def __init__(
        self,
        aws: Aws,
        endpoint_name: str,
        prompts: Sequence[str],
        settings: ProbeSettings,
        on_answer: Callable[[ChatAnswer], None] | None = None,
    ) -> None:
        self.aws = aws
        self.endpoint_name = endpoint_name
        self.prompts = tuple(prompts)
        self.settings = settings
        self.on_answer = on_answer
        self.num_errors = 0
        self.num_unpublished = 0
        self._recent: dict[str, deque[ChatAnswer]] = {}
        self._uncompared: dict[str, list[ChatAnswer]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"probe-{endpoint_name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=self.settings.timeout_s + 15)

    def answers(self, served_name: str) -> tuple[ChatAnswer, ...]:
        """The latest answers of one fleet."""
        return tuple(self._recent.get(served_name, ()))

    def _run(self) -> None:
        index = 0
        while not self._stop.is_set():
            self.probe(self.prompts[index % len(self.prompts)])
            index += 1
            self._stop.wait(self.settings.interval_s)

    def probe(self, prompt: str) -> ChatAnswer | None:
        """Ask once and publish; a failed answer is a figure too, and None."""
        try:
            answer = chat(
                self.endpoint_name,
                [{"role": "user", "content": prompt}],
                self.settings.max_tokens,
                aws=self.aws,
                probe=True,
            )
        except FledgeError:
            self.num_errors += 1
            self._publish([_metric("ProbeErrors", 1, "Count", self.endpoint_name, UNKNOWN)])
            return None
        self._recent.setdefault(answer.served_name, deque(maxlen=_REMEMBERED)).append(answer)
        self._publish([*metrics_of(answer, self.endpoint_name), *self._comparisons(answer)])
        if self.on_answer is not None:
            self.on_answer(answer)
        return answer

    def _comparisons(self, answer: ChatAnswer) -> list[dict[str, Any]]:
        """Answers of the other fleets, compared now that this one has answered after them.

        Load that slows both fleets cancels out, as long as both have it. Once all traffic has gone over, the fleet
        that is left would only have answers from before, and nothing is compared any more.
        """
        newest = tuple(self._recent[answer.served_name])[-_COMPARED:]
        waiting = [
            one for name, some in self._uncompared.items() if name != answer.served_name for one in some
        ]
        self._uncompared = {
            answer.served_name: [*self._uncompared.get(answer.served_name, ()), answer][-_REMEMBERED:]
        }
        return [comparison_of(one, newest, self.endpoint_name) for one in waiting]

    def _publish(self, metrics: list[dict[str, Any]]) -> None:
        """A figure that does not arrive is a gap; the next one will."""
        try:
            self.aws.cloudwatch.put_metric_data(Namespace=METRICS, MetricData=metrics)
        except AwsError as error:
            self.num_unpublished += 1
            if self.num_unpublished == 1:
                flow_logger().warning("a probe's figures were not published: %s", error.given)


def metrics_of(answer: ChatAnswer, endpoint_name: str) -> list[dict[str, Any]]:
    """One answer as CloudWatch takes it, all under the name that the answer carries."""
    figures: list[tuple[str, float, str]] = [
        ("ProbeLatency", answer.latency_ms, "Milliseconds"),
        ("OutputTokensPerSecond", answer.output_tokens_per_second, "Count/Second"),
        ("ProbeErrors", 0, "Count"),
    ]
    if answer.acceptance_length is not None:
        figures.append(("AcceptanceLength", answer.acceptance_length, "None"))
    return [_metric(name, value, unit, endpoint_name, answer.served_name) for name, value, unit in figures]


def comparison_of(answer: ChatAnswer, beside: Sequence[ChatAnswer], endpoint_name: str) -> dict[str, Any]:
    """An answer's time per token over the median of the fleet beside it."""
    ratio = answer.latency_per_token_ms / median(one.latency_per_token_ms for one in beside)
    return _metric("ProbeLatencyRatio", ratio, "None", endpoint_name, answer.served_name)


def _metric(name: str, value: float, unit: str, endpoint_name: str, served_name: str) -> dict[str, Any]:
    return {
        "MetricName": name,
        "Dimensions": [
            {"Name": "EndpointName", "Value": endpoint_name},
            {"Name": "DrafterVersion", "Value": served_name},
        ],
        "Value": float(value),
        "Unit": unit,
        "StorageResolution": 1,  # alarms may have periods below a minute
    }


class ProbePrompts(Record):
    """What is asked, and whether the version's own evaluation says what to expect of it."""

    prompts: tuple[str, ...]
    domain: str | None
    comparable: bool


def choose_prompts(places: Places, settings: ProbeSettings, version: VersionRecord, k: int) -> ProbePrompts:
    """The settings' prompts, else held-out ones of the domain that it learned best, else general ones."""
    if settings.prompts:
        return ProbePrompts(prompts=settings.prompts, domain=None, comparable=True)
    trained = version.train_domains
    measured = {
        name: one for name, one in version.acceptance_of(k=k).items() if not trained or name in trained
    }
    if measured:
        best = max(measured.values(), key=lambda one: one.acceptance_length).domain
        held_out = held_out_prompts(places, version.dataset_digest, best)
        if held_out:
            return ProbePrompts(prompts=held_out, domain=best, comparable=True)
    return ProbePrompts(prompts=GENERAL_PROMPTS, domain=None, comparable=False)


def held_out_prompts(places: Places, dataset_digest: str, domain: str) -> tuple[str, ...]:
    """Prompts that a dataset has kept from training; empty when it is not on this machine."""
    for record in sorted(places.stages.glob("dataset-*/dataset.json")):
        dataset: DatasetRecord = DatasetRecord.load(record)
        if dataset.digest == dataset_digest:
            return _prompts_of(record.with_name("evaluation.jsonl"), domain)
    return ()


def _prompts_of(path: Path, domain: str) -> tuple[str, ...]:
    prompts: list[str] = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            conversation = json.loads(line)
            first = conversation["messages"][0]
            if conversation["domain"] == domain and first["role"] == "user":
                prompts.append(first["content"])
            if len(prompts) == _MAX_PROMPTS:
                break
    return tuple(prompts)


class SmokeResult(Record):
    """What the chats after a shift found."""

    answers: tuple[ChatAnswer, ...]
    latency_ms: float
    acceptance_length: float | None


@task(name="smoke-test", cache_policy=NO_CACHE, timeout_seconds=900)
def smoke_test(plan: EndpointPlan, prompts: ProbePrompts, settings: ProbeSettings) -> SmokeResult:
    """Chat with the fleet that has taken over, and judge it.

    Raises:
        EndpointError: it does not answer, another fleet answers, or hardly a guess is accepted.
    """
    aws = connect_aws(Places())
    with_floor = plan.acceptance_floor if prompts.comparable else None
    answers = [
        _ask_new_fleet(aws, plan, prompts.prompts[index % len(prompts.prompts)], settings)
        for index in range(settings.num_smoke)
    ]
    accepted = [one.acceptance_length for one in answers if one.acceptance_length is not None]
    acceptance = fmean(accepted) if accepted else None
    latency_ms = fmean(one.latency_ms for one in answers)
    flow_logger().info(
        "%s answers in %.0f ms, acceptance length %s",
        plan.served_name, latency_ms, "not told" if acceptance is None else f"{acceptance:.2f}",
    )  # fmt: skip
    if acceptance is None:
        raise DrafterUnfit(
            f"answers of {plan.served_name} tell no acceptance: the server does not speculate",
            "an answer with metrics.speculative_decoding",
            "see the container's log; an image that ignores SM_VLLM_* serves without the drafter",
        )
    if with_floor is not None and acceptance < with_floor:
        raise DrafterUnfit(
            f"acceptance length of {plan.served_name} is {acceptance:.2f} over {len(answers)} chats",
            f"at least {with_floor:.2f}",
            "evaluate the version again on this traffic's domain, or retrain on it",
        )
    return SmokeResult(answers=tuple(answers), latency_ms=latency_ms, acceptance_length=acceptance)


def _ask_new_fleet(aws: Aws, plan: EndpointPlan, prompt: str, settings: ProbeSettings) -> ChatAnswer:
    """One answer of the new fleet; an answer that an instance failed is asked for once more."""
    error: FledgeError | None = None
    heard = "nobody"
    for _ in range(_MAX_SMOKE_TRIES):
        try:
            answer = chat(
                plan.endpoint_name,
                [{"role": "user", "content": prompt}],
                settings.max_tokens,
                aws=aws,
                probe=True,
            )
        except AwsError as failed:
            if error is not None:
                raise DrafterUnfit(
                    f"the endpoint fails to answer: {failed.given}", "a chat completion", failed.remedy
                ) from None
            error = failed
            continue
        if answer.served_name == plan.served_name:
            return answer
        heard = answer.served_name
        time.sleep(settings.interval_s)  # the old fleet may still have had requests
    raise EndpointError(
        f"answers come from {heard}",
        f"answers of {plan.served_name}, which should have all traffic",
        "see `fledge status`; has somebody else updated the endpoint?",
    )
