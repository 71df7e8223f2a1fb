"""Probes: figures sorted by the fleet that answered, prompts that fit the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafter.records import DatasetRecord
from tasks.endpoint_settings import EndpointError, ProbeSettings
from tasks.probe import (
    GENERAL_PROMPTS,
    ChatAnswer,
    Prober,
    choose_prompts,
    comparison_of,
    metrics_of,
    read_answer,
)
from tasks.settings import Places
from tests.tasks.test_build_endpoint import version


def answer(latency_ms: float = 500, tokens: int = 50, acceptance_length: float | None = 2.0) -> ChatAnswer:
    return ChatAnswer(
        text="tweet",
        served_name="fledge-drafter-v7",
        latency_ms=latency_ms,
        output_tokens=tokens,
        acceptance_length=acceptance_length,
    )


def test_an_answer_tells_its_fleet_and_its_acceptance() -> None:
    document = {
        "model": "fledge-drafter-v7",
        "choices": [{"message": {"content": "tweet"}, "finish_reason": "length"}],
        "usage": {"completion_tokens": 48},
        "metrics": {"speculative_decoding": {"mean_acceptance_length": 1.9}},
    }
    read = read_answer(json.dumps(document).encode(), 480)
    assert (read.served_name, read.acceptance_length) == ("fledge-drafter-v7", 1.9)
    assert read.output_tokens_per_second == pytest.approx(100)
    del document["metrics"]
    assert read_answer(json.dumps(document).encode(), 480).acceptance_length is None


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"choices": []}'])
def test_what_is_no_completion_is_refused_with_its_beginning(content: bytes) -> None:
    with pytest.raises(EndpointError, match="an OpenAI chat completion"):
        read_answer(content, 1)


def test_figures_go_under_the_version_that_answered() -> None:
    metrics = metrics_of(answer(), "birds")
    assert {metric["MetricName"] for metric in metrics} == {
        "ProbeLatency",
        "OutputTokensPerSecond",
        "ProbeErrors",
        "AcceptanceLength",
    }
    for metric in metrics:
        assert metric["Dimensions"] == [
            {"Name": "EndpointName", "Value": "birds"},
            {"Name": "DrafterVersion", "Value": "fledge-drafter-v7"},
        ]


def test_latency_is_compared_per_token_with_the_fleet_beside() -> None:
    beside = [answer(latency_ms=1000, tokens=100), answer(latency_ms=90, tokens=9)]
    metric = comparison_of(answer(latency_ms=1500, tokens=50), beside, "birds")
    assert (metric["MetricName"], metric["Value"]) == ("ProbeLatencyRatio", pytest.approx(3.0))


def test_a_fleet_that_is_left_alone_is_compared_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = answer(latency_ms=500), answer(latency_ms=600).model_copy(update={"served_name": "new"})
    alone = new.model_copy(update={"latency_ms": 5000.0})  # all traffic is on it, and the old fleet is gone
    said = iter([old, new, new, old, alone, alone])
    monkeypatch.setattr("tasks.probe.chat", lambda *_, **__: next(said))
    published: list[dict[str, Any]] = []
    cloudwatch = SimpleNamespace(put_metric_data=lambda MetricData, **_: published.extend(MetricData))
    prober = Prober(SimpleNamespace(cloudwatch=cloudwatch), "birds", ("Why?",), ProbeSettings())  # type: ignore[arg-type]
    for _ in range(6):
        prober.probe("Why?")
    ratios = [
        (metric["Dimensions"][1]["Value"], metric["Value"])
        for metric in published
        if metric["MetricName"] == "ProbeLatencyRatio"
    ]
    assert [one for one in ratios if one[0] == "new"] == [("new", pytest.approx(1.2))] * 2


def test_prompts_are_held_out_ones_of_the_domain_that_it_learned(tmp_path: Path) -> None:
    folder = tmp_path / "stages" / "dataset-0"
    folder.mkdir(parents=True)
    DatasetRecord(
        digest="d", path=str(folder), num_train=0, num_evaluation=2, num_duplicates=0, num_problems=0,
        num_truncated=0, num_per_domain={}, train_domains=("code",),
    ).save(folder / "dataset.json")  # fmt: skip
    lines = [
        {"domain": domain, "messages": [{"role": "user", "content": f"about {domain}"}]}
        for domain in ("general", "code")
    ]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = choose_prompts(Places(home=tmp_path), ProbeSettings(), version(), 3)
    assert (chosen.prompts, chosen.domain, chosen.comparable) == (("about code",), "code", True)


def test_general_prompts_promise_nothing(tmp_path: Path) -> None:
    chosen = choose_prompts(Places(home=tmp_path), ProbeSettings(), version(), 3)
    assert (chosen.prompts, chosen.comparable) == (GENERAL_PROMPTS, False)
    own = choose_prompts(Places(home=tmp_path), ProbeSettings(prompts=("Why?",)), version(), 3)
    assert (own.prompts, own.comparable) == (("Why?",), True)
