"""Bootstrap intervals over prompts."""

from __future__ import annotations

import numpy as np
import pytest

from drafter.records import PromptAcceptance
from drafter.statistics import acceptance_interval, length_bucket, paired_difference, summarise
from tests.drafter.synthetic_evaluation import make_prompts


def _noisy_prompts(rng: np.random.Generator, mean: float, count: int = 40) -> list[PromptAcceptance]:
    return make_prompts("challenger", 3, list(mean + 0.2 * rng.standard_normal(count)))


def test_interval_contains_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        interval = acceptance_interval(_noisy_prompts(rng, 1.9), confidence=0.9, seed=seed)
        hits += interval.lower <= 1.9 <= interval.upper
    assert 165 <= hits <= 195


def test_long_answers_weigh_more_than_short_ones() -> None:
    long = make_prompts("challenger", 3, [2.0], num_drafts=900)
    short = make_prompts("challenger", 3, [1.0], num_drafts=100, first_id=1)
    assert acceptance_interval(long + short).value == pytest.approx(1.9)


def test_pairing_removes_the_spread_between_prompts() -> None:
    rng = np.random.default_rng(1)
    easy_and_hard = 2.5 + rng.standard_normal(30) * 0.5
    champion = make_prompts("champion", 3, list(easy_and_hard))
    candidate = make_prompts("challenger", 3, list(easy_and_hard + 0.1))
    difference = paired_difference(candidate, champion)
    assert difference.value == pytest.approx(0.1, abs=0.01)
    assert 0.05 < difference.lower < difference.upper < 0.15
    alone = acceptance_interval(candidate)
    assert alone.upper - alone.lower > 5 * (difference.upper - difference.lower)


def test_unpaired_prompts_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        paired_difference(
            make_prompts("challenger", 3, [2.0]), make_prompts("champion", 3, [2.0], first_id=1)
        )


def test_same_seed_same_interval() -> None:
    prompts = _noisy_prompts(np.random.default_rng(2), 1.7)
    assert acceptance_interval(prompts, seed=5) == acceptance_interval(prompts, seed=5)


def test_answer_without_a_single_draft_counts_as_nothing_accepted() -> None:
    assert acceptance_interval(make_prompts("challenger", 3, [1.0], num_drafts=0)).value == 1.0


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1, "<=256"), (256, "<=256"), (257, "<=1024"), (4096, "<=4096"), (4097, ">4096")]
)
def test_bucket_edges_belong_to_the_lower_bucket(tokens: int, bucket: str) -> None:
    assert length_bucket(tokens, (256, 1024, 4096)) == bucket


def test_summary_has_all_lengths_and_each_bucket_per_domain_and_k() -> None:
    prompts = make_prompts("challenger", 3, [1.5, 1.5]) + make_prompts(
        "challenger", 3, [2.5, 2.5], context_tokens=2000, first_id=2
    )
    prompts += make_prompts("challenger", 5, [3.0], "humaneval")
    found = {
        (one.domain, one.num_speculative_tokens, one.length_bucket): (one.num_prompts, one.acceptance_length)
        for one in summarise(prompts)
    }
    assert found == {
        ("python-stdlib", 3, "all"): (4, 2.0),
        ("python-stdlib", 3, "<=256"): (2, 1.5),
        ("python-stdlib", 3, "<=4096"): (2, 2.5),
        ("humaneval", 5, "all"): (1, 3.0),
        ("humaneval", 5, "<=256"): (1, 3.0),
    }
