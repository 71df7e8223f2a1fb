"""What the gate decides, and how it says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from drafter.config import GateThresholds
from drafter.gate import decide_release
from drafter.records import EvaluationReport, ReleaseDecision
from tests.drafter.synthetic_evaluation import (
    DOMAIN,
    UNSEEN,
    make_cell,
    make_good_report,
    make_prompts,
    make_report,
)

THRESHOLDS = GateThresholds(
    min_acceptance_length=1.5, min_speedup=1.05, min_prompts=12, non_inferiority_margin=0.05
)


def spread(mean: float, count: int = 24, width: float = 0.05) -> list[float]:
    """Acceptance lengths around a mean."""
    return list(mean + width * np.linspace(-1, 1, count))


@dataclass(frozen=True)
class Case:
    """A world to judge, good unless said otherwise."""

    lengths: Sequence[float] = field(default_factory=lambda: spread(1.9))
    champion: Sequence[float] | None = None
    speed: float = 80.0
    plain: float | None = 58.0
    identical: float | None = 1.0
    thresholds: GateThresholds = THRESHOLDS

    def decide(self) -> ReleaseDecision:
        cells = [make_cell("challenger", 3, 1, self.speed)]
        if self.plain is not None:
            cells.append(make_cell(None, 0, 1, self.plain))
        prompts = make_prompts("challenger", 3, self.lengths)
        if self.champion is not None:
            prompts += make_prompts("champion", 3, self.champion)
            cells.append(make_cell("champion", 3, 1, 80.0))
        identical = {} if self.identical is None else {"challenger": {"float32": self.identical}}
        champion = None if self.champion is None else "champion"
        return decide_release(make_report(cells, prompts, identical), "challenger", champion, self.thresholds)


LENIENT = THRESHOLDS.model_copy(update={"require_identical_float32": False})

CASES = {
    "everything well, no champion": (Case(), "approve", "Passed: acceptance length"),
    "as good as the champion": (Case(champion=spread(1.9)), "approve", "against champion: +0.00"),
    "better than the champion": (Case(champion=spread(1.7)), "approve", "against champion: +0.20"),
    "a little worse, within the margin": (Case(champion=spread(1.93)), "approve", "against champion: -0.03"),
    "clearly worse than the champion": (
        Case(champion=spread(2.1)),
        "reject",
        "a loss of more than 0.05 is certain",
    ),
    "about the margin worse, and noisy": (
        Case(lengths=spread(1.9, width=0.6), champion=spread(1.95, width=0.6)[::-1]),
        "not_enough_evidence",
        "stays open: measure more prompts",
    ),
    "below the floor": (Case(lengths=spread(1.3)), "reject", "below the floor of 1.50"),
    "floor within the interval": (Case(lengths=spread(1.5, width=0.3)), "not_enough_evidence", "lies inside"),
    "a worthy value on too few prompts": (
        Case(lengths=spread(1.9, count=11)),
        "not_enough_evidence",
        "11 prompts were",
    ),
    "just enough prompts": (Case(lengths=spread(1.9, count=12)), "approve", "over 12 prompts"),
    "champion shares too few prompts": (
        Case(champion=spread(1.9, count=5)),
        "not_enough_evidence",
        "comparison with champion on python-stdlib at K=3: 5 prompts were measured, 12 are needed",
    ),
    "slower than asked": (
        Case(speed=59.0),
        "reject",
        "59 output tokens/s with K=3, 58 without a drafter: 1.02x",
    ),
    "exactly as fast as asked": (Case(speed=105.0, plain=100.0), "approve", "1.05x, and at least 1.05x"),
    "no baseline": (Case(plain=None), "not_enough_evidence", "serving without a drafter was not measured"),
    "speed that is no number": (Case(speed=float("nan")), "not_enough_evidence", "no speed of challenger"),
    "output differs": (Case(identical=0.875), "reject", "12% of the greedy answers differ"),
    "output not compared": (Case(identical=None), "not_enough_evidence", "was not measured"),
    "output differs, and may": (Case(identical=0.875, thresholds=LENIENT), "approve", "Note: in float32"),
    "output not compared, nor asked for": (
        Case(identical=None, thresholds=LENIENT),
        "approve",
        "Note: whether",
    ),
    "a failure beats an unknown": (
        Case(lengths=spread(1.9, count=3), speed=20.0),
        "reject",
        "3 prompts were measured",
    ),
}


@pytest.mark.parametrize(("case", "outcome", "words"), CASES.values(), ids=CASES.keys())
def test_outcome_and_reason(case: Case, outcome: str, words: str) -> None:
    decision = case.decide()
    assert decision.outcome == outcome, decision.reasons
    assert any(words in reason for reason in decision.reasons), decision.reasons
    assert decision.approved == (outcome == "approve")


def test_what_went_wrong_stands_first() -> None:
    reasons = Case(lengths=spread(1.9, count=3), speed=20.0).decide().reasons
    assert [reason.split(":")[0] for reason in reasons] == ["Failed", "Not known", "Passed"]


def _two_k(speed_3: float, speed_5: float) -> EvaluationReport:
    cells = [
        make_cell(None, 0, 1, 58.0),
        make_cell("challenger", 3, 1, speed_3),
        make_cell("challenger", 5, 1, speed_5),
    ]
    prompts = make_prompts("challenger", 3, spread(1.9)) + make_prompts("challenger", 5, spread(1.3))
    return make_report(cells, prompts)


def test_k_is_the_fastest_measured_and_the_floor_is_judged_at_that_k() -> None:
    assert decide_release(_two_k(80, 75), "challenger", None, THRESHOLDS).num_speculative_tokens == 3
    slower = decide_release(_two_k(75, 80), "challenger", None, THRESHOLDS)
    assert slower.num_speculative_tokens == 5
    assert slower.outcome == "reject"


def test_what_is_judged_is_the_k_that_is_advised_for_the_expected_load() -> None:
    cells = [
        make_cell(None, 0, 1, 50.0), make_cell(None, 0, 4, 100.0),
        make_cell("challenger", 3, 1, 70.0), make_cell("challenger", 3, 4, 130.0),
        make_cell("challenger", 5, 1, 80.0), make_cell("challenger", 5, 4, 110.0),
    ]  # fmt: skip
    report = make_report(cells, make_prompts("challenger", 3, spread(1.9)))
    for expected, k in ((1, 5), (4, 3)):
        thresholds = THRESHOLDS.model_copy(update={"expected_concurrency": expected})
        decision = decide_release(report, "challenger", None, thresholds)
        assert decision.advice is not None
        assert (decision.num_speculative_tokens, decision.advice.num_speculative_tokens) == (k, k)
        assert any(f"at concurrency {expected}: " in reason for reason in decision.reasons)


def test_k_without_a_measurement_on_every_gated_domain_is_not_chosen() -> None:
    report = make_good_report()
    cells = [cell for cell in report.cells if (cell.num_speculative_tokens, cell.domain) != (3, UNSEEN)]
    thresholds = THRESHOLDS.model_copy(update={"gated_domains": (DOMAIN, UNSEEN)})
    decision = decide_release(
        report.model_copy(update={"cells": tuple(cells)}), "challenger", None, thresholds
    )
    assert decision.num_speculative_tokens == 5


def test_domain_that_was_not_measured_is_no_evidence() -> None:
    thresholds = THRESHOLDS.model_copy(update={"gated_domains": ("medicine",)})
    decision = decide_release(make_good_report(), "challenger", None, thresholds)
    assert decision.outcome == "not_enough_evidence"
    assert decision.num_speculative_tokens is None
    assert any("medicine" in reason for reason in decision.reasons)


def test_concurrency_that_was_not_measured_is_no_evidence() -> None:
    thresholds = THRESHOLDS.model_copy(update={"expected_concurrency": 8})
    assert decide_release(make_good_report(), "challenger", None, thresholds).outcome == "not_enough_evidence"


def test_domain_that_did_not_train_is_not_gated_but_its_losses_are_said() -> None:
    report = make_good_report()
    slow = make_cell("challenger", 3, 1, 44.0, UNSEEN)
    cells = [
        slow if (c.drafter, c.num_speculative_tokens, c.domain) == ("challenger", 3, UNSEEN) else c
        for c in report.cells
    ]
    decision = decide_release(
        report.model_copy(update={"cells": tuple(cells)}), "challenger", None, THRESHOLDS
    )
    assert decision.approved
    assert any(r.startswith("Note: at concurrency 1 on humaneval") and "0.77x" in r for r in decision.reasons)
    assert any("at concurrency 16 on python-stdlib, K=3 is slower" in reason for reason in decision.reasons)


def test_each_length_bucket_with_enough_prompts_is_compared() -> None:
    """Better on short contexts, worse on long ones: the average must not hide it."""

    def both(drafter: str, short: float, long: float, num_long: int) -> list:  # type: ignore[type-arg]
        return make_prompts(drafter, 3, spread(short)) + make_prompts(
            drafter, 3, spread(long, count=num_long), context_tokens=2000, first_id=100
        )

    cells = [
        make_cell(None, 0, 1, 58.0),
        make_cell("challenger", 3, 1, 80.0),
        make_cell("champion", 3, 1, 80.0),
    ]
    enough = make_report(cells, both("challenger", 2.2, 1.7, 24) + both("champion", 1.9, 1.95, 24))
    decision = decide_release(enough, "challenger", "champion", THRESHOLDS)
    assert decision.outcome == "reject"
    assert decision.reasons[0].startswith(
        "Failed: acceptance length on python-stdlib at <=4096 tokens of context"
    )

    few = make_report(cells, both("challenger", 2.2, 1.7, 6) + both("champion", 1.9, 1.95, 6))
    decision = decide_release(few, "challenger", "champion", THRESHOLDS)
    assert decision.outcome == "approve"
    assert any("left out: 6 prompts, 12 are needed" in reason for reason in decision.reasons)


def test_champion_that_was_not_measured_is_no_evidence() -> None:
    decision = decide_release(make_good_report(), "challenger", "champion", THRESHOLDS)
    assert decision.outcome == "not_enough_evidence"


def test_deciding_twice_gives_the_same() -> None:
    report = make_good_report()
    assert decide_release(report, "challenger", None, THRESHOLDS) == decide_release(
        report, "challenger", None, THRESHOLDS
    )
