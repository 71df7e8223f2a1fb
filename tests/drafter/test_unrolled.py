"""EAGLE-3's unrolled step against dense masks, and against decoding token after token."""

from __future__ import annotations

import pytest
import torch

from drafter.chains import Chains, sample_chains
from drafter.drafting import draft_answers
from drafter.packing import PackedBatch
from drafter.two_stream import StepOptions, count_supervised
from drafter.unrolled import unrolled_step
from tests.reference.eagle3_forward import Server, unrolled_logits, unrolled_loss
from tests.reference.random_drafters import (
    leaves,
    random_batch,
    random_config,
    random_document,
    random_drafter,
    random_teacher,
)

EXACT = StepOptions(dtype=torch.float32)
EAGLE3 = {"num_layers": 1, "mask_token_id": None}
PACKED = (30, 3, 17, 41, 4, 9)


def _chains(batch: PackedBatch, num_depths: int = 5, retention: float = 1.0) -> Chains:
    return sample_chains(batch, num_depths, retention, 0.0, torch.Generator().manual_seed(5))


def _compare(batch: PackedBatch, chains: Chains, options: StepOptions = EXACT, **changes: object) -> None:
    """Both computations on the same weights; relative 1e-5 in the loss and in every gradient."""
    config = random_config(**{**EAGLE3, **changes})
    drafter, teacher = random_drafter(config, spread=0.15), random_teacher(config)
    count = count_supervised(batch, chains)
    result = unrolled_step(drafter, teacher, batch, chains, options, float(count.sum()))
    weights = leaves(drafter.state_dict())
    loss, supervised, correct = unrolled_loss(weights, config, teacher, batch, chains)
    loss.backward()
    assert float(result.loss_sum / count.sum()) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.supervised.tolist() == supervised.tolist() == count.tolist()
    assert result.correct.tolist() == correct.tolist()
    for name, parameter in drafter.named_parameters():
        expected = weights[name].grad
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        assert expected is not None, name
        error = float((parameter.grad - expected).norm() / expected.norm())
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("num_depths", [1, 2, 3, 8])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_gradients_are_exact_for_every_number_of_depths(num_depths: int, norm_before_residual: bool) -> None:
    batch = random_batch(PACKED)
    _compare(batch, _chains(batch, num_depths), norm_before_residual=norm_before_residual)


@pytest.mark.parametrize("lengths", [(90,), (30, 30, 30), (5,) * 18, (3, 80, 3)])
@pytest.mark.parametrize("retention", [1.0, 0.7])
def test_gradients_are_exact_for_every_packing(lengths: tuple[int, ...], retention: float) -> None:
    batch = random_batch(lengths, supervised_share=0.9)
    _compare(batch, _chains(batch, retention=retention))


@pytest.mark.parametrize("chains_per_segment", [1, 7, 1000])
@pytest.mark.parametrize("attention_rows", [8, 1000])
def test_how_the_step_is_cut_does_not_change_it(chains_per_segment: int, attention_rows: int) -> None:
    batch = random_batch((40, 3, 22))
    _compare(batch, _chains(batch), StepOptions(torch.float32, chains_per_segment, 13, attention_rows))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1), (9, 3)])
def test_gradients_are_exact_for_every_grouping_of_heads(num_heads: int, num_kv_heads: int) -> None:
    batch = random_batch((40, 22))
    _compare(batch, _chains(batch), num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("changes", [{"draft_vocab_size": 64}, {"train_embedding": False}])
def test_gradients_are_exact_with_a_full_vocabulary_and_a_frozen_embedding(
    changes: dict[str, object],
) -> None:
    batch = random_batch((40, 22))
    _compare(batch, _chains(batch), **changes)


def test_bfloat16_gradients_point_where_float32_ones_do() -> None:
    batch = random_batch(PACKED)
    config = random_config(**EAGLE3)
    exact, rounded, teacher = random_drafter(config), random_drafter(config), random_teacher(config)
    half = type(teacher)(teacher.norm, teacher.weight.bfloat16(), teacher.eps)
    unrolled_step(exact, teacher, batch, _chains(batch), EXACT, 100.0)
    unrolled_step(rounded, half, batch, _chains(batch), StepOptions(chains_per_segment=9), 100.0)
    for (name, one), (_, two) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert two.grad.dtype == torch.float32
        alike = torch.nn.functional.cosine_similarity(one.grad.flatten(), two.grad.flatten(), dim=0)
        assert float(alike) > 0.98, f"{name}: {float(alike):.3f}"


def test_nothing_supervised_cannot_be_normalized() -> None:
    batch = random_batch((30,), supervised_share=0.0)
    config = random_config(**EAGLE3)
    with pytest.raises(ValueError, match="normalizer"):
        unrolled_step(random_drafter(config), random_teacher(config), batch, _chains(batch), EXACT, 0.0)


# Decoding, token after token


def test_training_computes_what_serving_computes() -> None:
    """Verified tokens arrive in runs; after each, the K guesses on accepted tokens are the chain's logits."""
    num_depths, num_tokens = 4, 30
    document, batch = random_document(num_tokens, seed=1), random_batch((1, num_tokens))
    batch.supervised.fill_(True)
    config = random_config(**EAGLE3)
    weights = {name: tensor.detach() for name, tensor in random_drafter(config).state_dict().items()}
    chains = _chains(batch, num_depths)
    logits, anchors, depths = unrolled_logits(weights, config, batch, chains)
    trained = {
        key: logits[row] for row, key in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True))
    }
    server, known = Server(weights, config), 0
    for run in (6, 1, 4, 2, 1, 3, 5):  # a prefill, then what verifications let through
        ids, auxiliary = (
            document.input_ids[known + 1 : known + 1 + run],
            document.auxiliary[known : known + run],
        )
        slot_logits, states = server.verified(ids, auxiliary)
        known += run
        anchor = known - 1  # has read t[known], the newest token
        accepted = document.input_ids[known + 1 : known + num_depths]
        served, _ = server.draft(slot_logits[-1], states[-1], accepted, num_depths)
        for depth in range(num_depths):
            torch.testing.assert_close(served[depth], trained[anchor, depth], rtol=1e-4, atol=1e-4)


def test_the_step_counts_the_hits_that_serving_would_make() -> None:
    """The same alignment, through the product: hits per depth of the step are those of the server's logits."""
    num_depths, num_tokens = 4, 40
    document, batch = random_document(num_tokens, seed=3), random_batch((1, 1, 1, num_tokens))
    batch.supervised.fill_(True)
    config = random_config(**EAGLE3)
    drafter, teacher = random_drafter(config), random_teacher(config)
    weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    result = unrolled_step(drafter, teacher, batch, _chains(batch, num_depths), EXACT, 1.0)
    best = teacher.logits(document.final).argmax(-1)  # [T]: after t[i], what the target would write next
    in_vocabulary = torch.isin(document.input_ids, drafter.draft_ids)
    server, hits = Server(weights, config), [0] * num_depths
    for anchor in range(num_tokens - 2):
        slot_logits, states = server.verified(
            document.input_ids[anchor + 1 : anchor + 2], document.auxiliary[anchor : anchor + 1]
        )
        depth_limit = min(num_depths, num_tokens - 2 - anchor)
        accepted = document.input_ids[anchor + 2 : anchor + 1 + depth_limit]
        served, _ = server.draft(slot_logits[0], states[0], accepted, depth_limit)
        for depth in range(depth_limit):
            right = served[depth].argmax() == best[anchor + depth + 1]
            hits[depth] += bool(right and in_vocabulary[anchor + depth + 2])
    assert result.correct.tolist() == hits
    assert sum(hits) > 0


@pytest.mark.parametrize("chains_per_segment", [2, 512])
def test_drafting_guesses_what_a_server_guesses(chains_per_segment: int) -> None:
    """Each guess reads the one before it, right or wrong."""
    document = random_document(40, seed=1)
    config = random_config(**EAGLE3)
    drafter = random_drafter(config)
    starts = torch.tensor([0, 3, 4, 20, 38])
    options = StepOptions(torch.float32, chains_per_segment)
    guesses = draft_answers(drafter, document.input_ids, document.auxiliary, starts, 5, options)
    weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    for row, start in enumerate(starts.tolist()):
        server = Server(weights, config)
        logits, states = server.verified(document.input_ids[1 : start + 2], document.auxiliary[: start + 1])
        _, expected = server.draft(logits[-1], states[-1], None, 5)
        assert guesses[row].tolist() == expected.tolist()
