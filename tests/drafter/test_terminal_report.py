"""The tables on a terminal: every measured figure beside its baseline, in the order a reader asks for."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from drafter.config import GateThresholds
from drafter.gate import decide_release
from drafter.records import AcceptanceSummary, Cell, EvaluationReport, ReleaseDecision
from drafter.terminal_report import columns_of, decision_text, show_evaluation


def cell(domain: str, concurrency: int, drafter: str | None, k: int, otps: float) -> Cell:
    return Cell(
        speculation="peagle" if drafter else "none",
        drafter=drafter,
        num_speculative_tokens=k,
        concurrency=concurrency,
        domain=domain,
        num_requests=8,
        output_tokens=1000,
        acceptance_length=1.8 if drafter else None,
        acceptance_rate_per_position=(0.5, 0.25)[:k] if drafter else (),
        output_tokens_per_second=otps,
        ttft_ms=50,
        tpot_ms=20,
    )


def report(*cells: Cell) -> EvaluationReport:
    summary = AcceptanceSummary(
        drafter="challenger",
        num_speculative_tokens=3,
        domain="code",
        length_bucket="all",
        num_prompts=24,
        acceptance_length=1.91,
        lower=1.83,
        upper=1.99,
    )
    return EvaluationReport(
        path="somewhere",
        digest="d",
        target_fingerprint="t",
        dataset_digest="d",
        drafters={"challenger": "c"},
        cells=cells,
        prompts=(),
        acceptance=(summary,),
        greedy_identical_share={"challenger": {"float32": 1.0, "bfloat16": 0.25}},
        train_domains=("code",),
        machine="test",
        versions={},
        elapsed_s=1.0,
    )


def shown(evaluation: EvaluationReport) -> str:
    stream = io.StringIO()
    show_evaluation(evaluation, Console(file=stream, width=160))
    return stream.getvalue()


def row_of(text: str, concurrency: int) -> list[str]:
    line = next(line for line in text.splitlines() if re.match(rf"│\s+{concurrency} │", line))
    return [part.strip() for part in line.strip("│").split("│")]


def test_each_concurrency_shows_every_k_the_baseline_and_the_best_ratio() -> None:
    text = shown(
        report(
            cell("code", 1, "challenger", 3, 80),
            cell("code", 1, "challenger", 5, 70),
            cell("code", 1, None, 0, 50),
            cell("code", 16, "challenger", 3, 90),
            cell("code", 16, None, 0, 100),
        )
    )
    assert row_of(text, 1) == ["1", "80", "70", "50", "1.60x"]
    assert row_of(text, 16) == ["16", "90", "-", "100", "0.90x"]
    assert "1.83 to 1.99" in text
    assert "100% of greedy answers in float32" in text
    assert "25% of greedy answers in bfloat16" in text


def test_the_domain_that_trained_comes_first_and_the_other_is_named_so() -> None:
    text = shown(report(cell("another", 1, None, 0, 50), cell("code", 1, None, 0, 50)))
    assert text.index("code (trained on)") < text.index("another (never seen in training)")


def test_challenger_stands_before_champion() -> None:
    cells = [
        cell("code", 1, "champion", 3, 1),
        cell("code", 1, "challenger", 5, 1),
        cell("code", 1, None, 0, 1),
    ]
    assert columns_of(cells) == [("challenger", 5), ("champion", 3)]


def test_a_decision_shows_outcome_and_every_reason() -> None:
    values: dict[str, Any] = {"outcome": "not_enough_evidence", "reasons": ("3 prompts", "12 needed")}
    text = decision_text(ReleaseDecision(**values)).plain
    assert text.startswith("decision: not enough evidence")
    assert "- 3 prompts" in text
    assert "- 12 needed" in text


def test_a_decision_ends_with_how_to_serve_the_drafter() -> None:
    cells = [
        cell("code", 1, "challenger", 3, 80),
        cell("code", 1, None, 0, 50),
        cell("code", 4, "challenger", 3, 90),
        cell("code", 4, None, 0, 120),
    ]
    decision = decide_release(report(*cells), "challenger", None, GateThresholds())
    last = decision_text(decision).plain.splitlines()[-1]
    assert last.startswith("serving: K=3 up to 1 request in flight: 1.60x at 1. Above 1 do not speculate")


def test_a_drafter_that_guesses_in_turn_is_called_eagle3() -> None:
    drafted = cell("code", 1, "other", 3, 50.0).model_copy(update={"speculation": "eagle3"})
    text = shown(report(cell("code", 1, None, 0, 40.0), cell("code", 1, "challenger", 3, 60.0), drafted))
    (heading,) = [line for line in text.splitlines() if "concurrency" in line]
    assert "challenger K=3 ┃" in heading
    assert "other K=3 (EAGLE-3) ┃" in heading
