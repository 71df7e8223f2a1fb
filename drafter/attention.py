"""Attention of both streams: grouped batched products over row blocks, with its own backward.

Shapes: R query rows, S keys of the real stream, G key/value heads, J query heads per key/value head,
E head size, D = (G*J + 2*G) * E the width of the joint query/key/value projection.

Every row sees the real slots `first..last` of its document and, in the placeholder stream, the shallower
placeholders of its own chain. Query heads are folded onto their key/value head, so that a block of rows is
one batched product and no key is repeated. A block only touches the keys between its earliest document
start and its latest anchor, and only the columns that differ between its rows are masked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """Head counts and size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Block:
    """Rows `rows` against real keys `keys`, then (placeholder stream) against the rows' own keys.

    Attributes:
        hidden_from: first masked column; every column before it is visible to all rows.
        hidden: [rows, columns - hidden_from] bool, true where a row may not look; None: nothing hidden.
    """

    rows: slice
    keys: slice
    hidden_from: int
    hidden: Tensor | None

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start


@dataclass(frozen=True)
class AttentionPlan:
    """Which rows look where; one for all layers of a stream.

    Attributes:
        num_scores: scores per query head, the measure of what keeping probabilities costs.
        row_index: [R] rows of the stream that ask; None: all of them.
        own_keys: whether rows also look at their own chain.
    """

    blocks: tuple[Block, ...]
    num_scores: int
    own_keys: bool
    row_index: Tensor | None = None


def plan_attention(
    first: Tensor, last: Tensor, chain: Tensor | None, rows_per_block: int, device: torch.device
) -> AttentionPlan:
    """Cut rows into blocks and build their masks.

    Args:
        first: [R] first real slot that a row sees, ascending (CPU).
        last: [R] last real slot that a row sees, ascending (CPU).
        chain: [R] chain of each placeholder, ascending, shallow before deep; None for real rows.
        rows_per_block: most rows of a block; a chain is never cut.
        device: where the masks live.
    """
    blocks = []
    num_scores = 0
    starts = _block_starts(len(last), chain, rows_per_block)
    for start, stop in zip(starts, [*starts[1:], len(last)], strict=True):
        low, high = int(first[start]), int(last[stop - 1]) + 1
        same_document = int(first[start]) == int(first[stop - 1])
        hidden_from = int(last[start]) + 1 - low if same_document else 0
        columns = torch.arange(low + hidden_from, high)
        hidden = (columns > last[start:stop, None]) | (columns < first[start:stop, None])
        if chain is not None:
            own = chain[start:stop]
            deeper = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
            hidden = torch.cat([hidden, (own[:, None] != own[None, :]) | deeper], dim=1)
        num_scores += (stop - start) * (hidden_from + hidden.shape[1])
        needed = hidden.to(device) if bool(hidden.any()) else None
        blocks.append(Block(slice(start, stop), slice(low, high), hidden_from, needed))
    return AttentionPlan(tuple(blocks), num_scores, own_keys=chain is not None)


def _block_starts(num_rows: int, chain: Tensor | None, rows_per_block: int) -> list[int]:
    """First rows of the blocks; with chains, only where a chain begins."""
    if chain is None:
        return list(range(0, num_rows, rows_per_block))
    begins = [0, *(torch.where(chain.diff() != 0)[0] + 1).tolist()]
    starts = [0]
    for previous, begin in zip(begins, [*begins[1:], num_rows], strict=True):
        if begin - starts[-1] > rows_per_block and previous > starts[-1]:
            starts.append(previous)
    return starts


@dataclass
class KeyValueStore:
    """One layer's keys and values of the real stream, and the gradient that later streams leave there.

    Both are [G, S, E] after rotation. The gradients are float32 whatever the compute type, because many
    segments add to them.
    """

    key: Tensor
    value: Tensor
    key_gradient: Tensor | None = field(default=None)
    value_gradient: Tensor | None = field(default=None)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The two gradient buffers, made on first use."""
        if self.key_gradient is None or self.value_gradient is None:
            self.key_gradient = torch.zeros_like(self.key, dtype=torch.float32)
            self.value_gradient = torch.zeros_like(self.value, dtype=torch.float32)
        return self.key_gradient, self.value_gradient


@dataclass(frozen=True)
class Rotation:
    """Rotary position tables of a stream's rows, each [R, E/2] float32."""

    cosine: Tensor
    sine: Tensor

    def select(self, rows: Tensor | None) -> Rotation:
        """The tables of some rows."""
        return self if rows is None else Rotation(self.cosine[rows], self.sine[rows])


def rotate(x: Tensor, rotation: Rotation, backward: bool = False) -> Tensor:
    """Rotate halves of heads by their position. `x` is [R, heads..., E]; `backward` rotates the other way."""
    shape = (len(x), *([1] * (x.dim() - 2)), x.shape[-1] // 2)
    cosine = rotation.cosine.view(shape)
    sine = -rotation.sine.view(shape) if backward else rotation.sine.view(shape)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1).to(x.dtype)


@dataclass
class AttentionCall:
    """What one layer's attention needs beside its projection.

    Attributes:
        store: the real stream's keys and values; filled by the real stream's own call, read by others.
        keep_scores: most kept probabilities (over all query heads) of a call; beyond, the backward
            computes them again to bound memory.
    """

    heads: Heads
    plan: AttentionPlan
    rotation: Rotation
    store: KeyValueStore | None
    keep_scores: int


def attend(projection: Tensor, call: AttentionCall) -> Tensor:
    """Rotate, attend, and return [rows, G*J*E] from the joint projection [R, D].

    With `call.store` None this is the real stream: the call fills in the store.
    """
    return _Attention.apply(projection, call)


def _fold_queries(queries: Tensor, heads: Heads) -> Tensor:
    """[R, G*J*E] rotated or not -> [G, J, R, E]."""
    return queries.view(len(queries), heads.num_kv_heads, heads.group, heads.head_dim).permute(1, 2, 0, 3)


def _unfold_queries(queries: Tensor) -> Tensor:
    """[G, J, R, E] -> [R, G*J*E]."""
    return queries.permute(2, 0, 1, 3).reshape(queries.shape[2], -1)


class _Attention(torch.autograd.Function):
    """Attention with a backward from kept (or recomputed) probabilities."""

    @staticmethod
    def forward(ctx: Any, projection: Tensor, call: AttentionCall) -> Tensor:
        heads, plan = call.heads, call.plan
        query, key, value = _split(projection, call)
        is_real = call.store is None
        if call.store is None:
            call.store = KeyValueStore(key, value)
        store = call.store
        own_key, own_value = (key, value) if plan.own_keys else (None, None)
        keep = ctx.needs_input_grad[0] and plan.num_scores * heads.num_heads <= call.keep_scores
        output = torch.empty_like(query)
        kept: list[Tensor] = []
        for block in plan.blocks:
            probability = _probabilities(query, store.key, own_key, block, heads)
            block_value = _block_keys(store.value, own_value, block)
            output[:, :, block.rows] = torch.bmm(probability, block_value).view(
                heads.num_kv_heads, heads.group, block.num_rows, heads.head_dim
            )
            if keep:
                kept.append(probability)
        ctx.call, ctx.is_real, ctx.kept = call, is_real, kept
        ctx.num_rows, ctx.width = projection.shape
        ctx.save_for_backward(query, output, *(() if own_key is None else (own_key, own_value)))
        return _unfold_queries(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        call, heads, plan = ctx.call, ctx.call.heads, ctx.call.plan
        query, output, *own = ctx.saved_tensors
        own_key, own_value = own if own else (None, None)
        store = call.store
        key_gradient, value_gradient = store.gradients()
        own_gradients = [torch.zeros_like(t, dtype=torch.float32) for t in own]
        output_gradient = _fold_queries(gradients[0].contiguous(), heads)
        query_gradient = torch.empty_like(query)
        for index, block in enumerate(plan.blocks):
            if ctx.kept:
                probability, ctx.kept[index] = ctx.kept[index], None
            else:
                probability = _probabilities(query, store.key, own_key, block, heads)
            rows = _block_rows(output_gradient, block, heads)
            # d softmax: P * (dP - sum(dP * P)), and sum(dP * P) = sum(dO * O) per row.
            weighted = (rows.float() * _block_rows(output, block, heads).float()).sum(-1, keepdim=True)
            values = _block_keys(store.value, own_value, block)
            score_gradient = torch.bmm(rows, values.transpose(1, 2))
            score_gradient.sub_(weighted).mul_(probability).mul_(heads.head_dim**-0.5)
            keys = _block_keys(store.key, own_key, block)
            query_gradient[:, :, block.rows] = torch.bmm(score_gradient, keys).view(
                heads.num_kv_heads, heads.group, block.num_rows, heads.head_dim
            )
            queries = _block_rows(query, block, heads)
            num_real = block.keys.stop - block.keys.start
            for buffer, own_index, gradient in (
                (key_gradient, 0, torch.bmm(score_gradient.transpose(1, 2), queries)),
                (value_gradient, 1, torch.bmm(probability.transpose(1, 2), rows)),
            ):
                buffer[:, block.keys] += gradient[:, :num_real]
                if own:
                    own_gradients[own_index][:, block.rows] += gradient[:, num_real:]
        if ctx.is_real:
            key_back, value_back = key_gradient, value_gradient
        else:
            key_back, value_back = own_gradients
        return _join(ctx, query_gradient, key_back, value_back), None


def _split(projection: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [G, J, R, E], keys and values [G, S, E] of the projection, rotated."""
    heads, plan = call.heads, call.plan
    query, key, value = projection.split([heads.query_width, heads.kv_width, heads.kv_width], dim=-1)
    if plan.row_index is not None:
        query = query[plan.row_index]
    query = query.reshape(len(query), heads.num_kv_heads, heads.group, heads.head_dim)
    query = rotate(query, call.rotation.select(plan.row_index)).permute(1, 2, 0, 3).contiguous()
    key = rotate(key.reshape(len(key), heads.num_kv_heads, heads.head_dim), call.rotation)
    value = value.reshape(len(value), heads.num_kv_heads, heads.head_dim)
    return query, key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()


def _join(ctx: Any, query_gradient: Tensor, key_gradient: Tensor, value_gradient: Tensor) -> Tensor:
    """Gradient of the joint projection [R, D], the inverse of `_split`."""
    call, heads = ctx.call, ctx.call.heads
    index = call.plan.row_index
    projection = query_gradient.new_empty(ctx.num_rows, ctx.width)
    query, key, value = projection.split([heads.query_width, heads.kv_width, heads.kv_width], dim=-1)
    rotated = rotate(query_gradient.permute(2, 0, 1, 3), call.rotation.select(index), backward=True)
    if index is None:
        query.copy_(rotated.reshape(ctx.num_rows, -1))
    else:
        query.zero_()
        query[index] = rotated.reshape(len(index), -1)
    key.copy_(rotate(key_gradient.transpose(0, 1), call.rotation, backward=True).reshape(ctx.num_rows, -1))
    value.copy_(value_gradient.transpose(0, 1).reshape(ctx.num_rows, -1))
    return projection


def _block_rows(x: Tensor, block: Block, heads: Heads) -> Tensor:
    """Rows of a block, heads folded: [G, J, R, E] -> [G, J * rows, E]."""
    return x[:, :, block.rows].reshape(heads.num_kv_heads, heads.group * block.num_rows, heads.head_dim)


def _block_keys(real: Tensor, own: Tensor | None, block: Block) -> Tensor:
    """Keys or values that a block looks at, [G, columns, E]."""
    if own is None:
        return real[:, block.keys]
    return torch.cat([real[:, block.keys], own[:, block.rows]], dim=1)


def _probabilities(query: Tensor, key: Tensor, own_key: Tensor | None, block: Block, heads: Heads) -> Tensor:
    """Softmax of the scaled, masked scores of a block, [G, J * rows, columns]."""
    queries = _block_rows(query, block, heads) * heads.head_dim**-0.5
    scores = torch.bmm(queries, _block_keys(key, own_key, block).transpose(1, 2))
    if block.hidden is not None:
        by_head = scores.view(heads.num_kv_heads, heads.group, block.num_rows, -1)
        by_head[..., block.hidden_from :].masked_fill_(block.hidden, float("-inf"))
    return torch.softmax(scores, dim=-1)
