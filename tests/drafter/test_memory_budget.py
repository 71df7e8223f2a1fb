"""How a step is cut up to fit a memory budget."""

from __future__ import annotations

import pytest
import torch

from drafter.errors import FledgeError
from drafter.memory_budget import fit_step, step_memory_gb
from tests.reference.random_drafters import random_config

CPU = torch.device("cpu")
SMOLLM2_SHAPE = random_config(
    hidden_size=576,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    draft_vocab_size=8192,
    mask_token_id=49151,
    train_embedding=False,
)


def _fit(num_slots: int, budget_gb: float | None):
    return fit_step(SMOLLM2_SHAPE, num_slots, 8, torch.bfloat16, CPU, budget_gb)


def test_twenty_thousand_tokens_fit_four_gib() -> None:
    assert step_memory_gb(SMOLLM2_SHAPE, 20_000, 8, _fit(20_000, 4.0)) <= 4.0


def test_memory_grows_linearly_with_the_length_and_less_without_feed_forwards_kept() -> None:
    slopes = []
    for options in (_fit(2048, 100.0), _fit(20_000, 3.2)):
        sizes = [step_memory_gb(SMOLLM2_SHAPE, n, 8, options) for n in (10_000, 20_000, 30_000)]
        assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0])
        slopes.append(sizes[1] - sizes[0])
    assert slopes[1] < 0.8 * slopes[0]


def test_a_smaller_budget_first_makes_pieces_smaller() -> None:
    large, small = _fit(4096, 100.0), _fit(4096, 2.0)
    assert large.chains_per_segment > small.chains_per_segment
    assert large.keep_feed_forward


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    with pytest.raises(FledgeError, match="20000 tokens"):
        _fit(20_000, 1.0)


def test_without_a_stated_budget_there_is_always_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.memory_budget._available_gb", lambda device: 0.1)
    options = _fit(20_000, None)
    assert not options.keep_feed_forward
    assert options.chains_per_segment == 32
