"""The order of documents and how they are packed: a pure function of lengths, seed and epoch.

Nothing here remembers anything: an epoch's plan is computed again from `(lengths, seed, epoch)`, so the
state of the sampler is one number, the sequences already taken, and a resumed run continues mid-epoch.

Legend: D documents, S packed sequences of one epoch, T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedSequence:
    """The documents of one packed sequence.

    Attributes:
        epoch: which pass over the data, from 0.
        index: place within the epoch, from 0.
        documents: document numbers, in order.
    """

    epoch: int
    index: int
    documents: tuple[int, ...]


def pack_epoch(lengths: np.ndarray, max_length_tokens: int, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """Shuffle the documents of one epoch and put neighbours together until the next would not fit.

    Sequences are never padded, so a gap costs nothing but a little unevenness; a cleverer packing
    would trade randomness of the order for it. Documents longer than `max_length_tokens` are alone
    in their sequence, where the trainer cuts them.

    Example:
        lengths [5, 5, 5, 20], at most 10 tokens -> such as [(2, 0), (3,), (1,)].

    Args:
        lengths: tokens of each document, [D].

    Returns:
        S tuples of document numbers; each document appears exactly once.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    return pack_in_order(order.tolist(), lengths, max_length_tokens)


def pack_in_order(
    documents: Sequence[int], lengths: Sequence[int] | np.ndarray, max_length_tokens: int
) -> list[tuple[int, ...]]:
    """Put neighbours together until the next would not fit; `documents` are numbers into `lengths`."""
    sequences: list[tuple[int, ...]] = []
    current: list[int] = []
    room = max_length_tokens
    for document in documents:
        length = min(int(lengths[document]), max_length_tokens)
        if current and length > room:
            sequences.append(tuple(current))
            current, room = [], max_length_tokens
        current.append(document)
        room -= length
    if current:
        sequences.append(tuple(current))
    return sequences


class PackingPlan:
    """All packed sequences of a training, addressed by their number from 0.

    Args:
        lengths: tokens of each document, [D].
        documents: the numbers by which the caller knows these documents, [D].
        max_length_tokens: tokens of one packed sequence.
        num_epochs: passes over the data; a fraction ends within an epoch.
        seed: of the order.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        documents: Sequence[int] | np.ndarray,
        max_length_tokens: int,
        num_epochs: float,
        seed: int,
    ) -> None:
        if len(lengths) != len(documents):
            raise ValueError(f"{len(lengths)} lengths for {len(documents)} documents")
        self._lengths = np.minimum(np.asarray(lengths, dtype=np.int64), max_length_tokens)
        self._documents = np.asarray(documents, dtype=np.int64)
        self._max_length_tokens = max_length_tokens
        self._seed = seed
        whole = int(num_epochs)
        sizes = [len(self._epoch(epoch)) for epoch in range(whole)]
        if num_epochs > whole:
            last = len(self._epoch(whole))
            sizes.append(max(1, round((num_epochs - whole) * last)))
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    def __len__(self) -> int:
        """Packed sequences of the whole training."""
        return int(self._starts[-1])

    @property
    def num_tokens_per_epoch(self) -> int:
        return int(self._lengths.sum())

    def from_sequence(self, start: int) -> Iterator[PackedSequence]:
        """Yield sequences `start`, `start + 1`, ... to the end of the training."""
        for epoch in range(len(self._starts) - 1):
            first, end = int(self._starts[epoch]), int(self._starts[epoch + 1])
            if end <= start:
                continue
            plan = self._epoch(epoch)
            for index in range(max(start - first, 0), end - first):
                documents = tuple(int(self._documents[number]) for number in plan[index])
                yield PackedSequence(epoch, index, documents)

    def epochs_at(self, sequence: int) -> float:
        """Passes over the data when `sequence` sequences have been taken, e.g. 1.5."""
        epoch = int(np.searchsorted(self._starts, sequence, side="right")) - 1
        if epoch >= len(self._starts) - 1:
            epoch = len(self._starts) - 2
        return epoch + (sequence - int(self._starts[epoch])) / len(self._epoch(epoch))

    def _epoch(self, epoch: int) -> list[tuple[int, ...]]:
        if getattr(self, "_cached_epoch", None) != epoch:
            self._cached_plan = pack_epoch(self._lengths, self._max_length_tokens, self._seed, epoch)
            self._cached_epoch = epoch
        return self._cached_plan
