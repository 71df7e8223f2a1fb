"""Exact P-EAGLE gradients in two streams: real slots once, then chains of placeholders in segments.

Shapes: N slots, R rows of a stream, H hidden size, P placeholders of a segment, K depths.

Depth-0 slots never see a placeholder, so the flat masked forward over slots and placeholders splits:

1. The real stream runs once over the packed sequence; each layer's keys and values are kept as leaves.
2. Segments of chains, in anchor order, attend to those up to their anchor and to their own chain. After
   a segment's backward its memory is free; the leaves have collected its gradient in float32.
3. Head and loss go chunk by chunk (`drafter.loss`): with a segment's placeholders go the real slots up to
   its last anchor, so that rows which predict the same slot share one teacher.
4. One backward runs through the real stream with its own loss and the collected gradients.

The last layer's queries, feed-forward and head only run for supervised rows: the others are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.attention import AttentionCall, KeyValueStore, Rotation, Tiles, attend, plan_attention
from drafter.chains import Chains
from drafter.layers import ComputeWeights
from drafter.loss import HeadGradient, LossSums, RowTargets, TeacherHead, head_loss
from drafter.model import Drafter
from drafter.packing import HasPredictions, PackedBatch


@dataclass(frozen=True)
class StepOptions:
    """How a step is cut up; none of these changes its gradients.

    Attributes:
        dtype: of the computation; master weights and gradients are float32.
        chains_per_segment: chains whose placeholders are in memory at once.
        rows_per_chunk: rows of logits in memory at once.
        attention_rows: rows of one attention block.
        attention_columns: most keys that such a block looks at in one product.
        keep_feed_forward: whether the real stream keeps the inside of its feed-forwards for the backward.
    """

    dtype: torch.dtype = torch.bfloat16
    chains_per_segment: int = 512
    rows_per_chunk: int = 1024
    attention_rows: int = 128
    attention_columns: int = 512
    keep_feed_forward: bool = True

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.attention_rows, self.attention_columns)


@dataclass(frozen=True)
class StepResult:
    """Sums over the supervised predictions of one packed sequence.

    Attributes:
        loss_sum: sum of KL in nats.
        supervised: [K] int64, predictions per depth.
        correct: [K] int64, of these, where the best token is the target's.
    """

    loss_sum: Tensor
    supervised: Tensor
    correct: Tensor


def count_supervised(batch: HasPredictions, chains: Chains) -> Tensor:
    """Supervised predictions per depth, [K] int64 on the CPU; their sum over a step is its normalizer."""
    reaching = [int((chains.lengths >= depth).sum()) for depth in range(1, chains.num_depths)]
    return torch.tensor([int(batch.supervised.sum()), *reaching], dtype=torch.int64)


def two_stream_step(
    drafter: Drafter,
    teacher: TeacherHead,
    batch: PackedBatch,
    chains: Chains,
    options: StepOptions,
    normalizer: float,
) -> StepResult:
    """Add the gradients of (sum of KL over this batch) / normalizer to the drafter's `.grad`.

    Args:
        teacher: in the compute type, on the drafter's device.
        batch: on the drafter's device.
        normalizer: supervised predictions of the *whole* optimizer step, over all depths and all its
            packed sequences (`count_supervised`): the gradient is then of their mean.
    """
    if normalizer <= 0:
        raise ValueError(f"normalizer must be positive, not {normalizer}: nothing is supervised")
    return _run(drafter, teacher, batch, chains, options, 1.0 / normalizer)


@torch.no_grad()
def evaluate_loss(
    drafter: Drafter, teacher: TeacherHead, batch: PackedBatch, chains: Chains, options: StepOptions
) -> StepResult:
    """The sums of a step, without gradients."""
    return _run(drafter, teacher, batch, chains, options, None)


def _run(
    drafter: Drafter,
    teacher: TeacherHead,
    batch: PackedBatch,
    chains: Chains,
    options: StepOptions,
    scale: float | None,
) -> StepResult:
    sums = LossSums.zeros(chains.num_depths, drafter.device)
    slots = torch.where(batch.supervised)[0]
    if not len(slots):
        return StepResult(sums.loss, sums.supervised, sums.correct)
    loss = ChunkedLoss(drafter, teacher, batch, options, sums, scale)
    stores, hidden, _ = real_stream(drafter, batch, options, slots)
    real_gradients = []
    first = batch.document_starts()
    for segment, share in _segments(chains, options.chains_per_segment, slots):
        placeholders = placeholder_stream(drafter, first, batch.positions, segment, stores, options)
        chain, depth = (index.to(drafter.device) for index in segment.elements())
        predicting = torch.cat([slots[share], segment.anchors.to(drafter.device)[chain] + depth])
        depths = torch.cat([torch.zeros_like(slots[share]), depth])
        rows = torch.cat([hidden.detach()[share], placeholders.detach()])
        gradient = loss.gradient(rows, predicting, depths)
        if gradient is not None:
            by_real, by_placeholders = gradient.split([share.stop - share.start, len(placeholders)])
            real_gradients.append(by_real)
            if len(placeholders):
                placeholders.backward(by_placeholders)
    if real_gradients:
        hidden.backward(torch.cat(real_gradients))
    return StepResult(sums.loss, sums.supervised, sums.correct)


def _segments(chains: Chains, chains_per_segment: int, slots: Tensor) -> Iterator[tuple[Chains, slice]]:
    """Segments of chains, each with its share of the supervised slots: those up to its last anchor.

    At least one, and the last takes the slots that are left.
    """
    supervised = slots.cpu()
    taken = 0
    for start in range(0, max(chains.num_chains, 1), chains_per_segment):
        stop = min(start + chains_per_segment, chains.num_chains)
        upto = len(supervised)
        if stop < chains.num_chains:
            upto = int(torch.searchsorted(supervised, chains.anchors[stop - 1], right=True))
        yield chains.segment(start, stop), slice(taken, upto)
        taken = upto


def real_stream(
    drafter: Drafter, batch: PackedBatch, options: StepOptions, rows: Tensor
) -> tuple[list[KeyValueStore], Tensor, Tensor]:
    """Run the depth-0 slots.

    Args:
        rows: slots whose output is wanted, ascending.

    Returns:
        Each layer's keys and values over all slots; of `rows`, the normed output and the sum before that
        norm, both [len(rows), H].
    """
    weights = drafter.compute_weights(options.dtype)
    first = batch.document_starts()
    slots = torch.arange(batch.num_slots)
    where = (options.tiles, drafter.device, options.dtype)
    everywhere = last_layer = plan_attention(first, slots, None, *where)
    wanted = rows.cpu()
    if len(wanted) < len(slots):
        last_layer = plan_attention(first[wanted], wanted, None, *where, row_index=rows)
    rotation = rotation_of(drafter, batch.positions)
    embedding = drafter.embed_tokens(batch.input_ids).to(options.dtype)
    fused = weights.linear(batch.auxiliary.to(options.dtype), drafter.fc.weight)
    projection, residual = drafter.layer(0).first_input(embedding, fused, weights)
    stores = []
    for index in range(drafter.config.num_layers):
        is_last = index == drafter.config.num_layers - 1
        plan = last_layer if is_last else everywhere
        call = AttentionCall(drafter.config.heads, plan, rotation, None)
        attended = attend(projection, call)
        if call.store is None:
            raise AssertionError("the real stream leaves its keys and values behind")
        stores.append(call.store)
        residual = residual[rows] if is_last and last_layer.row_index is not None else residual
        projection, residual = _after_attention(
            drafter, index, attended, residual, weights, options.keep_feed_forward
        )
    return stores, projection, residual


def placeholder_stream(
    drafter: Drafter,
    document_starts: Tensor,
    positions: Tensor,
    chains: Chains,
    stores: list[KeyValueStore],
    options: StepOptions,
) -> Tensor:
    """Run the placeholders of some chains against the real stream's keys and values.

    All placeholders read the same embedding and the same fused state; until rotation tells their
    positions apart, layer 0 is one row.

    Returns:
        Normed output [P, H], chain after chain, shallow first.
    """
    weights = drafter.compute_weights(options.dtype)
    chain, depth = chains.elements()
    anchors = chains.anchors[chain]
    if not len(chain):
        return weights.of(drafter.fc.weight).new_empty(0, drafter.config.hidden_size)
    plan = plan_attention(
        document_starts[anchors], anchors, chain, options.tiles, drafter.device, options.dtype
    )
    rotation = rotation_of(drafter, positions[anchors.to(drafter.device)] + depth.to(drafter.device))
    embedding = drafter.mask_embedding.to(options.dtype)[None]
    fused = weights.linear(drafter.mask_hidden.view(1, -1).to(options.dtype), drafter.fc.weight)
    projection, residual = drafter.layer(0).first_input(embedding, fused, weights)
    projection, residual = (row.expand(len(chain), -1) for row in (projection, residual))
    for index, store in enumerate(stores):
        call = AttentionCall(drafter.config.heads, plan, rotation, store)
        attended = attend(projection, call)
        projection, residual = _after_attention(drafter, index, attended, residual, weights)
    return projection


def _after_attention(
    drafter: Drafter,
    index: int,
    attended: Tensor,
    residual: Tensor,
    weights: ComputeWeights,
    keep_feed_forward: bool = True,
) -> tuple[Tensor, Tensor]:
    """Finish layer `index` and begin the next: its projection, or after the last the normed output."""
    output, residual = drafter.layer(index).finish(attended, residual, weights, keep_feed_forward)
    if index + 1 == drafter.config.num_layers:
        return drafter.norm.add(output, residual)
    return drafter.layer(index + 1).later_input(output, residual, weights)


def rotation_of(drafter: Drafter, positions: Tensor) -> Rotation:
    angles = positions[:, None].float() * drafter.inverse_frequency
    return Rotation(angles.cos() * drafter.rotation_scale, angles.sin() * drafter.rotation_scale)


@dataclass(frozen=True)
class ChunkedLoss:
    """Head and loss of rows that predict what given slots predict."""

    drafter: Drafter
    teacher: TeacherHead
    batch: PackedBatch
    options: StepOptions
    sums: LossSums
    scale: float | None

    def gradient(self, hidden: Tensor, slots: Tensor, depths: Tensor) -> Tensor | None:
        """Add the rows' losses to the sums and the head's gradient to the head.

        Args:
            hidden: [R, H] normed output, outside any graph.
            slots: [R] slot whose prediction each row makes.
            depths: [R].

        Returns:
            Gradient by `hidden`, or None when none is wanted.
        """
        master = self.drafter.lm_head.weight
        head = self.drafter.compute_weights(self.options.dtype).of(master)
        reachable = self.drafter.in_draft_vocabulary[self.batch.predicted_ids[slots]]
        order = slots.argsort(stable=True)  # rows with one teacher side by side: it is computed once
        head_gradient, gradient = None, None
        if self.scale is not None:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            head_gradient = HeadGradient(master.grad, self.scale)
            gradient = torch.empty_like(hidden)
        for chunk in order.split(self.options.rows_per_chunk):
            predicting, teacher_row = slots[chunk].unique_consecutive(return_inverse=True)
            final = self.batch.final[predicting]
            targets = RowTargets(final, teacher_row, depths[chunk], reachable[chunk])
            found = head_loss(hidden[chunk], head, self.teacher, targets, self.sums, head_gradient)
            if found is not None and gradient is not None:
                gradient[chunk] = found
        return gradient
