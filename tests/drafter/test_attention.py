"""Blocked attention: who sees whom, and how little is computed for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.attention import AttentionCall, AttentionPlan, Heads, Rotation, attend, plan_attention, rotate

CPU = torch.device("cpu")
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)


def _visible(plan: AttentionPlan, num_rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Dense masks of a plan: rows against real keys, rows against rows."""
    real = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    own = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for block in plan.blocks:
        num_real = block.keys.stop - block.keys.start
        columns = num_real + (block.num_rows if plan.own_keys else 0)
        seen = torch.ones(block.num_rows, columns, dtype=torch.bool)
        if block.hidden is not None:
            seen[:, block.hidden_from :] = ~block.hidden
        real[block.rows, block.keys] = seen[:, :num_real]
        own[block.rows, block.rows] = seen[:, num_real:] if plan.own_keys else False
    return real, own


@pytest.mark.parametrize("rows_per_block", [4, 16, 100])
def test_real_rows_see_their_document_up_to_themselves(rows_per_block: int) -> None:
    first = torch.tensor([0] * 20 + [20] * 3 + [23] * 30)
    slots = torch.arange(53)
    real, _ = _visible(plan_attention(first, slots, None, rows_per_block, CPU), 53, 53)
    expected = (slots[None] <= slots[:, None]) & (slots[None] >= first[:, None])
    assert torch.equal(real, expected)


@pytest.mark.parametrize("rows_per_block", [4, 7, 100])
def test_placeholders_see_their_anchors_past_and_their_own_chain(rows_per_block: int) -> None:
    anchors = torch.tensor([2, 5, 9, 21, 24])
    lengths = torch.tensor([3, 1, 4, 2, 4])
    chain = torch.arange(5).repeat_interleave(lengths)
    last = anchors[chain]
    first = torch.where(last < 20, 0, 20)
    real, own = _visible(plan_attention(first, last, chain, rows_per_block, CPU), 14, 30)
    keys, rows = torch.arange(30), torch.arange(14)
    assert torch.equal(real, (keys <= last[:, None]) & (keys >= first[:, None]))
    assert torch.equal(own, (chain[:, None] == chain[None]) & (rows[None] <= rows[:, None]))


def test_packed_short_documents_do_not_pay_for_the_whole_prefix() -> None:
    """2,048 slots in documents of 128: scores grow with the document, not with the pack."""
    slots = torch.arange(2048)
    plan = plan_attention(slots // 128 * 128, slots, None, 128, CPU)
    assert plan.num_scores == 2048 * 128
    whole = plan_attention(torch.zeros_like(slots), slots, None, 128, CPU)
    assert plan.num_scores < whole.num_scores / 8


def test_only_the_last_block_of_one_document_is_masked() -> None:
    slots = torch.arange(1000)
    plan = plan_attention(torch.zeros_like(slots), slots, None, 100, CPU)
    for block in plan.blocks:
        assert block.hidden is not None
        assert block.hidden.shape == (100, 99)


def test_attention_equals_the_dense_softmax_with_kept_and_recomputed_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 40
    projection = torch.randn(rows, HEADS.query_width + 2 * HEADS.kv_width, generator=generator)
    positions = torch.arange(rows)
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    rotation = Rotation(angles.cos(), angles.sin())
    plan = plan_attention(torch.zeros(rows, dtype=torch.int64), positions, None, 16, CPU)
    weight = torch.randn(rows, HEADS.query_width, generator=generator)

    dense_input = projection.clone().requires_grad_()
    query, key, value = dense_input.split([HEADS.query_width, HEADS.kv_width, HEADS.kv_width], -1)
    query = rotate(query.view(rows, 4, 8), rotation).transpose(0, 1)
    key = rotate(key.view(rows, 2, 8), rotation).transpose(0, 1).repeat_interleave(2, 0)
    value = value.view(rows, 2, 8).transpose(0, 1).repeat_interleave(2, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = expected.transpose(0, 1).reshape(rows, -1)
    (expected * weight).sum().backward()

    for keep_scores in (10**9, 0):
        own_input = projection.clone().requires_grad_()
        output = attend(own_input, AttentionCall(HEADS, plan, rotation, None, keep_scores))
        (output * weight).sum().backward()
        assert torch.allclose(output, expected, atol=1e-5)
        assert torch.allclose(own_input.grad, dense_input.grad, atol=1e-5)


def test_rotation_backwards_undoes_rotation() -> None:
    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    rotation = Rotation(angles.cos(), angles.sin())
    assert torch.allclose(rotate(rotate(x, rotation), rotation, backward=True), x, atol=1e-6)
