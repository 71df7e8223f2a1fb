"""The two-stream step against the flat masked forward: loss, hits and every gradient."""

from __future__ import annotations

import pytest
import torch

from drafter.chains import Chains, sample_chains
from drafter.drafting import draft_answers
from drafter.packing import PackedBatch, pack_documents
from drafter.two_stream import StepOptions, count_supervised, evaluate_loss, two_stream_step
from tests.reference.flat_forward import flat_logits, flat_loss
from tests.reference.random_drafters import (
    leaves,
    random_batch,
    random_config,
    random_document,
    random_drafter,
)
from tests.reference.random_drafters import random_teacher as make_teacher

EXACT = StepOptions(dtype=torch.float32)


def _chains(batch: PackedBatch, num_depths: int = 5, retention: float = 0.8) -> Chains:
    return sample_chains(batch, num_depths, retention, 0.2, torch.Generator().manual_seed(5))


def _compare(batch: PackedBatch, chains: Chains, options: StepOptions = EXACT, **changes: object) -> None:
    """Both computations on the same weights; relative 1e-5 in the loss and in every gradient."""
    config = random_config(**changes)
    drafter, teacher = random_drafter(config), make_teacher(config)
    count = count_supervised(batch, chains)
    result = two_stream_step(drafter, teacher, batch, chains, options, float(count.sum()))
    weights = leaves(drafter.state_dict())
    loss, supervised, correct = flat_loss(weights, config, teacher, batch, chains)
    loss.backward()
    assert float(result.loss_sum / count.sum()) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.supervised.tolist() == supervised.tolist() == count.tolist()
    assert result.correct.tolist() == correct.tolist()
    for name, parameter in drafter.named_parameters():
        expected = weights[name].grad
        assert parameter.grad is not None, name
        assert expected is not None, name
        error = float((parameter.grad - expected).norm() / expected.norm())
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


PACKED = (30, 3, 17, 41, 4, 9)


@pytest.mark.parametrize("num_layers", [1, 2, 4])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_gradients_are_exact_for_every_depth_of_layers(num_layers: int, norm_before_residual: bool) -> None:
    batch = random_batch(PACKED)
    _compare(batch, _chains(batch), num_layers=num_layers, norm_before_residual=norm_before_residual)


@pytest.mark.parametrize("num_depths", [1, 2, 3, 8])
def test_gradients_are_exact_for_every_number_of_depths(num_depths: int) -> None:
    batch = random_batch(PACKED)
    chains = _chains(batch, num_depths)
    if num_depths > 1:
        _compare(batch, chains)
        return
    config = random_config()
    drafter, teacher = random_drafter(config), make_teacher(config)
    two_stream_step(drafter, teacher, batch, chains, EXACT, 1.0)
    assert drafter.mask_hidden.grad is None  # without placeholders nothing teaches the shared state


@pytest.mark.parametrize("lengths", [(90,), (30, 30, 30), (5,) * 18, (3, 80, 3)])
def test_gradients_are_exact_for_every_packing(lengths: tuple[int, ...]) -> None:
    batch = random_batch(lengths, supervised_share=0.9)
    _compare(batch, _chains(batch))


@pytest.mark.parametrize("chains_per_segment", [1, 7, 1000])
@pytest.mark.parametrize("rows_per_chunk", [1, 13, 1000])
@pytest.mark.parametrize(("attention_rows", "attention_columns"), [(8, 5), (32, 16), (1000, 1000)])
def test_how_the_step_is_cut_does_not_change_it(
    chains_per_segment: int, rows_per_chunk: int, attention_rows: int, attention_columns: int
) -> None:
    batch = random_batch((40, 3, 22))
    options = StepOptions(
        torch.float32, chains_per_segment, rows_per_chunk, attention_rows, attention_columns
    )
    _compare(batch, _chains(batch), options)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1), (9, 3)])
def test_gradients_are_exact_for_every_grouping_of_heads(num_heads: int, num_kv_heads: int) -> None:
    batch = random_batch((40, 22))
    _compare(batch, _chains(batch), num_heads=num_heads, num_kv_heads=num_kv_heads)


def test_feed_forwards_computed_twice_give_the_same_gradients() -> None:
    batch = random_batch(PACKED)
    _compare(batch, _chains(batch), StepOptions(torch.float32, keep_feed_forward=False))


def test_a_full_draft_vocabulary_works() -> None:
    batch = random_batch((40, 22))
    _compare(batch, _chains(batch), draft_vocab_size=64)


def test_a_frozen_embedding_gets_no_gradient_but_the_mask_row_does() -> None:
    batch = random_batch((40, 22))
    config = random_config(train_embedding=False)
    drafter = random_drafter(config)
    two_stream_step(drafter, make_teacher(config), batch, _chains(batch), EXACT, 100.0)
    assert drafter.embed_tokens.weight.grad is None
    assert drafter.mask_embedding.grad is not None
    assert float(drafter.mask_embedding.grad.norm()) > 0


def test_batches_of_one_step_add_up_to_the_mean_over_all() -> None:
    """Two packed sequences with a common normalizer give what one sequence of all documents gives."""
    config = random_config()
    teacher = make_teacher(config)
    lengths = (30, 17, 41, 9)
    together = random_batch(lengths)
    apart = [random_batch(lengths[:2]), None]
    chains = _chains(together)
    cut = apart[0].num_slots
    first = int((chains.anchors < cut).sum())
    apart[1] = pack_documents([random_document(lengths[seed], seed) for seed in (2, 3)])
    parts = [
        chains.segment(0, first),
        Chains(chains.anchors[first:] - cut, chains.lengths[first:], chains.num_depths),
    ]
    normalizer = float(count_supervised(together, chains).sum())
    whole, summed = random_drafter(config), random_drafter(config)
    two_stream_step(whole, teacher, together, chains, EXACT, normalizer)
    for batch, part in zip(apart, parts, strict=True):
        two_stream_step(summed, teacher, batch, part, EXACT, normalizer)
    for (name, one), (_, two) in zip(whole.named_parameters(), summed.named_parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-7), name


def test_a_step_sees_what_the_optimizer_changed() -> None:
    """The copies of the weights in the compute type follow their masters."""
    batch = random_batch((40, 22))
    config = random_config()
    drafter, teacher, chains = random_drafter(config), make_teacher(config), _chains(batch)
    options = StepOptions(dtype=torch.bfloat16)
    before = float(evaluate_loss(drafter, teacher, batch, chains, options).loss_sum)
    optimizer = torch.optim.AdamW(drafter.trained_parameters(), lr=0.01)
    for _ in range(8):
        optimizer.zero_grad()
        two_stream_step(drafter, teacher, batch, chains, options, 100.0)
        optimizer.step()
    assert float(evaluate_loss(drafter, teacher, batch, chains, options).loss_sum) < 0.9 * before


def test_bfloat16_gradients_point_where_float32_ones_do() -> None:
    batch = random_batch(PACKED)
    config = random_config()
    exact, rounded, teacher = random_drafter(config), random_drafter(config), make_teacher(config)
    half = type(teacher)(teacher.norm, teacher.weight.bfloat16(), teacher.eps)
    two_stream_step(exact, teacher, batch, _chains(batch), EXACT, 100.0)
    two_stream_step(rounded, half, batch, _chains(batch), StepOptions(chains_per_segment=9), 100.0)
    for (name, one), (_, two) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert two.grad.dtype == torch.float32
        alike = torch.nn.functional.cosine_similarity(one.grad.flatten(), two.grad.flatten(), dim=0)
        assert float(alike) > 0.98, f"{name}: {float(alike):.3f}"


def test_evaluating_gives_the_sums_of_a_step_and_no_gradient() -> None:
    batch = random_batch(PACKED)
    config = random_config()
    drafter, teacher, chains = random_drafter(config), make_teacher(config), _chains(batch)
    evaluated = evaluate_loss(drafter, teacher, batch, chains, EXACT)
    assert all(parameter.grad is None for parameter in drafter.parameters())
    stepped = two_stream_step(drafter, teacher, batch, chains, EXACT, 100.0)
    assert float(evaluated.loss_sum) == pytest.approx(float(stepped.loss_sum), rel=1e-9)
    assert evaluated.correct.tolist() == stepped.correct.tolist()


def test_nothing_supervised_cannot_be_normalized() -> None:
    batch = random_batch((30,), supervised_share=0.0)
    config = random_config()
    with pytest.raises(ValueError, match="normalizer"):
        two_stream_step(random_drafter(config), make_teacher(config), batch, _chains(batch), EXACT, 0.0)


def test_drafting_guesses_what_the_flat_forward_ranks_first() -> None:
    document = random_document(40, seed=1)
    batch = random_batch((1, 40))
    config = random_config()
    drafter = random_drafter(config)
    starts = torch.tensor([0, 3, 4, 20])
    guesses = draft_answers(drafter, document.input_ids, document.auxiliary, starts, 4, EXACT)
    chains = Chains(starts, torch.full((4,), 3), 4)
    logits = flat_logits(dict(drafter.state_dict()), config, batch, chains).detach()
    best = drafter.draft_ids[logits.argmax(-1)]
    assert torch.equal(guesses[:, 0], best[starts])
    assert torch.equal(guesses[:, 1:], best[batch.num_slots :].view(4, 3))
