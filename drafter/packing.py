"""Whole documents become one packed sequence of drafter slots.

Shapes: T tokens of a document, H hidden size of the target, N slots of the batch, D documents.

The alignment lives here and nowhere else. Slot i of a document reads the embedding of t[i+1] and the
auxiliary states of t[i], and predicts t[i+2]; its teacher is the final state of t[i+1]:

    tokens          t0 t1 t2 t3 t4 t5      (t0 t1 prompt, t2..t5 answer)
    slot             0  1  2  3
    reads           t1 t2 t3 t4            embedding
    auxiliary of    t0 t1 t2 t3            RoPE position = slot
    final of        t1 t2 t3 t4            teacher
    predicts        t2 t3 t4 t5            all four supervised

A document of T tokens therefore has T - 2 slots; shorter documents have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor


class HasStates(Protocol):
    """What packing needs of a document: four tensors of one length T."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def loss_mask(self) -> Tensor: ...

    @property
    def auxiliary(self) -> Tensor: ...

    @property
    def final(self) -> Tensor: ...


class HasPredictions(Protocol):
    """What sampling chains needs of a packed sequence; `PackedBatch` and `Outline` say what the two are."""

    @property
    def supervised(self) -> Tensor: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Outline:
    """A packed sequence without its tokens and states: enough to know what it predicts.

    Attributes:
        supervised: [N] bool, whether the token that each slot predicts was written by the assistant.
        offsets: D + 1 bounds of the documents in slots.
    """

    supervised: Tensor
    offsets: tuple[int, ...]

    @classmethod
    def of_masks(cls, loss_masks: Sequence[Tensor]) -> Outline:
        """From the loss masks of documents of three tokens or more, each [T]."""
        supervised = [mask[2:].bool() for mask in loss_masks]
        return cls(torch.cat(supervised), (0, *accumulate(len(slots) for slots in supervised)))

    @property
    def sizes(self) -> list[int]:
        """Slots of each document."""
        return [stop - start for start, stop in pairwise(self.offsets)]


@dataclass(frozen=True)
class PackedBatch:
    """Slots of whole documents, one after the other. A document's slots never see another's.

    Attributes:
        input_ids: [N] int64, the token that each slot reads.
        predicted_ids: [N] int64, the token that each slot predicts.
        supervised: [N] bool, whether the predicted token was written by the assistant.
        auxiliary: [N, 3H], the target's auxiliary states that each slot reads.
        final: [N, H], the target's state before its last norm, from which the teacher is computed.
        positions: [N] int64, RoPE positions; they restart with each document.
        offsets: D + 1 bounds of the documents in slots.
    """

    input_ids: Tensor
    predicted_ids: Tensor
    supervised: Tensor
    auxiliary: Tensor
    final: Tensor
    positions: Tensor
    offsets: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return self.offsets[-1]

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def document_starts(self) -> Tensor:
        """First slot of the document that each slot belongs to, [N] int64 on the CPU."""
        lengths = torch.tensor(self.offsets).diff()
        return torch.tensor(self.offsets[:-1], dtype=torch.int64).repeat_interleave(lengths)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        tensors = {
            name: getattr(self, name).to(device)
            for name in ("input_ids", "predicted_ids", "supervised", "auxiliary", "final", "positions")
        }
        return PackedBatch(**tensors, offsets=self.offsets)


def num_slots_of(num_tokens: int) -> int:
    """Slots that a document of `num_tokens` tokens fills."""
    return max(num_tokens - 2, 0)


def pack_documents(documents: Sequence[HasStates]) -> PackedBatch:
    """Align and concatenate documents in the given order.

    Raises:
        ValueError: no document has a slot, or a document's tensors differ in length.
    """
    offsets = [0]
    for document in documents:
        length = len(document.input_ids)
        if not length == len(document.loss_mask) == len(document.auxiliary) == len(document.final):
            raise ValueError("input_ids, loss_mask, auxiliary and final of a document must have one length")
        offsets.append(offsets[-1] + num_slots_of(length))
    if offsets[-1] == 0:
        raise ValueError("no document has the three tokens that one slot needs")
    kept = [document for document in documents if len(document.input_ids) > 2]
    bounds = tuple(sorted(set(offsets)))
    return PackedBatch(
        input_ids=torch.cat([document.input_ids[1:-1].long() for document in kept]),
        predicted_ids=torch.cat([document.input_ids[2:].long() for document in kept]),
        supervised=torch.cat([document.loss_mask[2:].bool() for document in kept]),
        auxiliary=torch.cat([document.auxiliary[:-2] for document in kept]),
        final=torch.cat([document.final[1:-1] for document in kept]),
        positions=torch.cat([torch.arange(num_slots_of(len(document.input_ids))) for document in kept]),
        offsets=bounds,
    )
