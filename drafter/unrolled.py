"""EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): guess after guess, as decoding will.

Shapes: N slots, C chains that are still going, G key/value heads, J query heads per key/value head, E head
size, H hidden size, d depth (0 is the first guess).

A server drafts in turn: the first guess comes from the real slot, every later one reads the token guessed
before and, in place of the fused auxiliary states, the drafter's own sum before its last norm. Training does
the same from every anchor a, with the true tokens as the guesses (only then does a later one count):

    depth 0   slot a    reads t[a+1] and fc(aux[a])             predicts t[a+2]
    depth d   slot a+d  reads t[a+d+1] and the sum of depth d-1   predicts t[a+d+2]

Depth d sees the real keys up to its anchor and the keys of its own chain so far. What real slots compute does
not depend on chains, so the work splits as in `drafter/two_stream.py`: the real slots run once; some hundred
chains at a time go down all depths, forward, loss and backward, and leave their gradient at the real keys,
values and sums; one backward through the real slots ends the step. Memory holds one segment of chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.attention import (
    Block,
    Heads,
    Keys,
    KeyValueStore,
    attend_blocks,
    differentiate_blocks,
    plan_attention,
    rotate,
    scale_of_queries,
)
from drafter.chains import Chains
from drafter.loss import LossSums, TeacherHead
from drafter.model import Drafter
from drafter.packing import PackedBatch
from drafter.two_stream import ChunkedLoss, StepOptions, StepResult, real_stream, rotation_of

_LN2 = math.log(2)

# The tokens that chains read at a depth, from the depth and the chains' numbers [C].
ReadTokens = Callable[[int, Tensor], Tensor]


def unrolled_step(
    drafter: Drafter,
    teacher: TeacherHead,
    batch: PackedBatch,
    chains: Chains,
    options: StepOptions,
    normalizer: float,
) -> StepResult:
    """Add the gradients of (sum of KL over this batch) / normalizer to the drafter's `.grad`.

    The arguments are those of `two_stream_step`. A chain's length says how deep it is unrolled.
    """
    if normalizer <= 0:
        raise ValueError(f"normalizer must be positive, not {normalizer}: nothing is supervised")
    sums = LossSums.zeros(chains.num_depths, drafter.device)
    slots = torch.where(batch.supervised)[0]
    if not len(slots):
        return StepResult(sums.loss, sums.supervised, sums.correct)
    loss = ChunkedLoss(drafter, teacher, batch, options, sums, 1.0 / normalizer)
    (store,), hidden, state = real_stream(drafter, batch, options, slots)
    unrolling = Unrolling(drafter, options, store, batch.positions, batch.document_starts())
    hidden_gradient = loss.gradient(hidden.detach(), slots, torch.zeros_like(slots))
    state_gradient = torch.zeros_like(state, dtype=torch.float32)  # many segments add to it
    for segment in chains.segments(options.chains_per_segment):
        anchors = segment.anchors.to(drafter.device)
        row = torch.searchsorted(slots, anchors)
        start = state.detach()[row].requires_grad_()
        steps = list(unrolling.steps(segment, start, _TrueTokens(batch, anchors)))
        output = torch.cat([step.hidden for step in steps])
        depth = torch.cat([torch.full_like(step.chains, step.depth) for step in steps])
        chain = torch.cat([step.chains for step in steps])
        output.backward(loss.gradient(output.detach(), anchors[chain] + depth, depth))
        assert start.grad is not None
        state_gradient.index_add_(0, row, start.grad.float())
    torch.autograd.backward([hidden, state], [hidden_gradient, state_gradient.to(state.dtype)])
    return StepResult(sums.loss, sums.supervised, sums.correct)


@dataclass(frozen=True)
class _TrueTokens:
    """Teacher forcing: the slot at a depth reads the token that was written."""

    batch: PackedBatch
    anchors: Tensor

    def __call__(self, depth: int, chains: Tensor) -> Tensor:
        return self.batch.input_ids[self.anchors[chains] + depth]


@dataclass(frozen=True)
class Guesses:
    """One depth of some chains.

    Attributes:
        chains: [C] int64, which chains reach this depth, ascending.
        hidden: [C, H] normed output, for the head.
    """

    depth: int
    chains: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Unrolling:
    """Chains over one packed sequence whose real slots have run.

    Attributes:
        store: keys and values of the real slots.
        positions: [N] RoPE positions of the slots.
        document_starts: [N] first slot of each slot's document, on the CPU.
    """

    drafter: Drafter
    options: StepOptions
    store: KeyValueStore
    positions: Tensor
    document_starts: Tensor

    def steps(self, chains: Chains, state: Tensor, read: ReadTokens) -> Iterator[Guesses]:
        """Go down all depths from 1, one at a time.

        Args:
            state: [C, H] the anchors' sums before the last norm.
        """
        drafter, device = self.drafter, self.drafter.device
        weights, layer = drafter.compute_weights(self.options.dtype), drafter.layer(0)
        heads = drafter.config.heads
        alive = torch.arange(chains.num_chains)
        keys = values = state.new_empty(len(alive), 0, heads.num_kv_heads, heads.head_dim)
        for depth in range(1, int(chains.lengths.max()) + 1):
            goes_on = chains.lengths[alive] >= depth
            alive = alive[goes_on]
            goes_on = goes_on.to(device)
            anchors, numbers = chains.anchors[alive], alive.to(device)
            embedding = drafter.embed_tokens(read(depth, numbers)).to(self.options.dtype)
            projection, residual = layer.first_input(embedding, state[goes_on], weights)
            query, key, value = _split(projection, heads)
            rotation = rotation_of(drafter, self.positions[anchors.to(device)] + depth)
            keys = torch.cat([keys[goes_on], rotate(key, rotation)[:, None]], dim=1)
            values = torch.cat([values[goes_on], value[:, None]], dim=1)
            first = self.document_starts[anchors]
            plan = plan_attention(first, anchors, None, self.options.tiles, device, self.options.dtype)
            query = rotate(query, rotation.scaled(scale_of_queries(heads)))
            attended = _ChainAttention.apply(query, keys, values, self.store, plan.blocks)
            output, residual = layer.finish(attended, residual, weights)
            hidden, state = drafter.norm.add(output, residual)
            yield Guesses(depth, numbers, hidden)


def _split(projection: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [C, G, J, E], keys and values [C, G, E] of the joint projection."""
    query, key, value = projection.split([heads.query_width, heads.kv_width, heads.kv_width], dim=-1)
    shape = (len(projection), heads.num_kv_heads, heads.head_dim)
    return query.reshape(*shape[:2], heads.group, heads.head_dim), key.reshape(shape), value.reshape(shape)


class _ChainAttention(torch.autograd.Function):
    """One query a chain, against the real keys up to its anchor and the chain's own keys so far.

    The softmax runs over both, in base 2 as in `drafter/attention.py`. What the real keys give is scaled to
    their share of it, and no probability of theirs is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, store: KeyValueStore, blocks: tuple[Block, ...]
    ) -> Tensor:
        """[C, G*J*E] from rotated queries [C, G, J, E] scaled for base 2, own keys and values [C, d, G, E]."""
        output, log_sum = attend_blocks(query, Keys(store, None), blocks)
        scores = torch.einsum("rgje,rdge->rgjd", query, keys).float()
        own_sum = (scores * _LN2).logsumexp(-1, keepdim=True) / _LN2
        joint = torch.logaddexp2(log_sum, own_sum)
        own = (scores - joint).exp2_().to(query.dtype)
        output = output * (log_sum - joint).exp2_() + torch.einsum("rgjd,rdge->rgje", own, values)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, keys, values, output, own, joint)
        ctx.store, ctx.blocks = store, blocks
        return output.view(len(output), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, own, joint = ctx.saved_tensors
        upstream = gradients[0].reshape(query.shape)
        by_query = differentiate_blocks(query, output, joint, upstream, Keys(ctx.store, None), ctx.blocks)
        # d softmax: P * (dP - sum(dP * P)), and sum(dP * P) = sum(dO * O) per query.
        inner = (upstream.float() * output).sum(-1, keepdim=True)
        by_scores = torch.einsum("rgje,rdge->rgjd", upstream, values).sub_(inner).mul_(own)
        by_query += torch.einsum("rgjd,rdge->rgje", by_scores, keys)
        by_keys = torch.einsum("rgjd,rgje->rdge", by_scores, query).mul_(_LN2)
        by_values = torch.einsum("rgjd,rgje->rdge", own, upstream)
        return by_query.mul_(_LN2), by_keys, by_values, None, None
