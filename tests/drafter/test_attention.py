"""Blocked attention: who sees whom, and how little is computed for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.attention import (
    AttentionCall,
    AttentionPlan,
    Heads,
    Rotation,
    Tiles,
    attend,
    plan_attention,
    rotate,
)

WHERE = (torch.device("cpu"), torch.float32)
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)


def _visible(plan: AttentionPlan, num_rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """Dense masks of a plan: rows against real keys, rows against rows."""
    real = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    own = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for block in plan.blocks:
        real[block.rows, block.prefix] = True
        seen = block.bias == 0
        width = block.edge.stop - block.edge.start
        real[block.rows, block.edge] = seen[:, :width]
        if plan.own_keys:
            own[block.rows, block.rows] = seen[:, width:]
        assert bool(seen.any(dim=1).all())
    return real, own


@pytest.mark.parametrize("rows_per_block", [4, 16, 100])
def test_real_rows_see_their_document_up_to_themselves(rows_per_block: int) -> None:
    first = torch.tensor([0] * 20 + [20] * 3 + [23] * 30)
    slots = torch.arange(53)
    real, _ = _visible(plan_attention(first, slots, None, Tiles(rows_per_block), *WHERE), 53, 53)
    expected = (slots[None] <= slots[:, None]) & (slots[None] >= first[:, None])
    assert torch.equal(real, expected)


@pytest.mark.parametrize("rows_per_block", [4, 7, 100])
def test_placeholders_see_their_anchors_past_and_their_own_chain(rows_per_block: int) -> None:
    anchors = torch.tensor([2, 5, 9, 21, 24])
    lengths = torch.tensor([3, 1, 4, 2, 4])
    chain = torch.arange(5).repeat_interleave(lengths)
    last = anchors[chain]
    first = torch.where(last < 20, 0, 20)
    real, own = _visible(plan_attention(first, last, chain, Tiles(rows_per_block), *WHERE), 14, 30)
    keys, rows = torch.arange(30), torch.arange(14)
    assert torch.equal(real, (keys <= last[:, None]) & (keys >= first[:, None]))
    assert torch.equal(own, (chain[:, None] == chain[None]) & (rows[None] <= rows[:, None]))


def test_packed_short_documents_do_not_pay_for_the_whole_prefix() -> None:
    """2,048 slots in documents of 128: scores grow with the document, not with the pack."""
    slots = torch.arange(2048)
    plan = plan_attention(slots // 128 * 128, slots, None, Tiles(128), *WHERE)
    assert plan.num_scores == 2048 * 128
    whole = plan_attention(torch.zeros_like(slots), slots, None, Tiles(128), *WHERE)
    assert plan.num_scores < whole.num_scores / 8


def test_a_document_after_a_long_one_begins_a_block() -> None:
    first = torch.tensor([0] * 1000 + [1000] * 30 + [1030] * 30)
    plan = plan_attention(first, torch.arange(1060), None, Tiles(128), *WHERE)
    assert [block.rows.start for block in plan.blocks][-2:] == [896, 1000]
    assert plan.blocks[-1].edge == slice(1000, 1060)


def test_only_the_rows_own_stretch_of_one_document_is_masked() -> None:
    slots = torch.arange(1000)
    plan = plan_attention(torch.zeros_like(slots), slots, None, Tiles(100), *WHERE)
    for block in plan.blocks:
        assert block.bias.shape == (100, 100)
        assert block.prefix == slice(0, block.rows.start)


def _compare_with_dense(projection: Tensor, tiles: Tiles, tolerance: float = 1e-5) -> None:
    """Output and gradient of causal attention against PyTorch's."""
    rows = len(projection)
    positions = torch.arange(rows)
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    rotation = Rotation(angles.cos(), angles.sin())
    weight = torch.randn(rows, HEADS.query_width, generator=torch.Generator().manual_seed(1))

    dense_input = projection.clone().requires_grad_()
    query, key, value = dense_input.split([HEADS.query_width, HEADS.kv_width, HEADS.kv_width], -1)
    query = rotate(query.view(rows, 4, 8), rotation).transpose(0, 1)
    key = rotate(key.view(rows, 2, 8), rotation).transpose(0, 1).repeat_interleave(2, 0)
    value = value.view(rows, 2, 8).transpose(0, 1).repeat_interleave(2, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = expected.transpose(0, 1).reshape(rows, -1)
    (expected * weight).sum().backward()

    plan = plan_attention(torch.zeros(rows, dtype=torch.int64), positions, None, tiles, *WHERE)
    own_input = projection.clone().requires_grad_()
    output = attend(own_input, AttentionCall(HEADS, plan, rotation, None))
    (output * weight).sum().backward()
    assert torch.allclose(output, expected, atol=1e-5)
    error = float((own_input.grad - dense_input.grad).norm() / dense_input.grad.norm())
    assert error < tolerance


@pytest.mark.parametrize("tiles", [Tiles(16, 7), Tiles(8, 64), Tiles(64, 64)])
def test_attention_equals_the_dense_softmax_however_it_is_cut(tiles: Tiles) -> None:
    width = HEADS.query_width + 2 * HEADS.kv_width
    _compare_with_dense(torch.randn(40, width, generator=torch.Generator().manual_seed(0)), tiles)


@pytest.mark.parametrize(("factor", "tolerance"), [(30.0, 1e-5), (3000.0, 1e-3)])
def test_a_first_key_that_outweighs_all_later_ones_does_not_overflow(factor: float, tolerance: float) -> None:
    """Attention sinks: the log-sum-exp so far comes from the rows' own stretch, and the sink is far above."""
    width = HEADS.query_width + 2 * HEADS.kv_width
    projection = torch.randn(40, width, generator=torch.Generator().manual_seed(0))
    keys = slice(HEADS.query_width, HEADS.query_width + HEADS.kv_width)
    projection[0, keys] *= factor
    _compare_with_dense(projection, Tiles(8, 8), tolerance)


def test_rotation_backwards_undoes_rotation() -> None:
    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    rotation = Rotation(angles.cos(), angles.sin())
    assert torch.allclose(rotate(rotate(x, rotation), rotation, backward=True), x, atol=1e-6)
