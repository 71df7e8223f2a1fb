"""What an optimizer step works on, and how its documents are divided over several processes.

Documents of a packed sequence never see each other, so a step may be cut between any two of them: each process
(a *rank*) computes the gradients of its documents, and their sum is the whole step's. What is drawn at random
is drawn for the whole step by every rank, from loss masks alone; the states of other ranks' documents are
never read.

Legend: D documents of a step, over all its packed sequences; n slots of a document, s of them supervised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from drafter.chains import Chains, sample_chains
from drafter.config import TrainSettings
from drafter.model import DrafterConfig
from drafter.packing import Outline, PackedBatch
from drafter.sampler import PackedSequence, pack_in_order
from drafter.training_data import TrainingData
from drafter.two_stream import count_supervised


def operations(
    config: DrafterConfig, num_slots: int, num_supervised: int, num_placeholders: float, num_pairs: float
) -> float:
    """Floating-point operations of the gradients of one document, as the two-stream step needs them.

    Args:
        num_placeholders: of all its chains.
        num_pairs: of a row and a key that it sees, in both streams: what grows with the square of the length.
    """
    size, heads = config.hidden_size, config.heads
    projections = size * (heads.query_width + 2 * heads.kv_width)
    finish = heads.query_width * size + 3 * size * config.intermediate_size
    layers = config.num_layers * (projections + finish)
    head = size * config.draft_vocab_size
    # Layer 0 reads twice the width; for placeholders it is one row for all of them: nothing to count. Of the
    # last layer only supervised rows are finished.
    real = num_slots * (layers + projections) - (num_slots - num_supervised) * finish + num_supervised * head
    drafted = num_placeholders * (layers - projections + head)
    # Nothing wants the gradient by the target's states or by its final state.
    dense = 3 * (real + drafted) + 2 * num_slots * 3 * size * size + num_supervised * head
    attention = 6 * config.num_layers * num_pairs * heads.query_width
    return 2.0 * (dense + attention)


def divide(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Numbers of the documents of each rank, ascending: the dearest first, each to who has least so far.

    The dearest rank then has at most 4/3 of the least that is possible (Graham 1969).

    Example:
        costs 5, 4, 3, 3 on two ranks: [0, 3] and [1, 2].
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for document in sorted(range(len(costs)), key=lambda document: (-costs[document], document)):
        rank = loads.index(min(loads))
        shares[rank].append(document)
        loads[rank] += costs[document]
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class StepWork:
    """One optimizer step, as one rank sees it.

    Attributes:
        outlines: of every packed sequence of the step, whoever computes its documents.
        own: numbers of the rank's documents among the D, for each of its batches, ascending.
        batches: these documents, with their states.
    """

    outlines: tuple[Outline, ...]
    own: tuple[tuple[int, ...], ...]
    batches: tuple[PackedBatch, ...]

    @property
    def num_sequences(self) -> int:
        return len(self.outlines)

    @property
    def num_slots(self) -> int:
        return sum(outline.offsets[-1] for outline in self.outlines)

    def sample(self, settings: TrainSettings, generator: torch.Generator) -> tuple[Chains, torch.Tensor]:
        """Chains of the whole step, the same on every rank, and its supervised predictions per depth [K]."""
        shape = (settings.num_depths, settings.retention, settings.retention_floor)
        parts = [sample_chains(outline, *shape, generator) for outline in self.outlines]
        counts = [count_supervised(*pair) for pair in zip(self.outlines, parts, strict=True)]
        ends = accumulate((outline.offsets[-1] for outline in self.outlines), initial=0)
        return Chains.joined(parts, list(ends)[:-1]), torch.stack(counts).sum(0)

    def own_chains(self, chains: Chains) -> Iterator[tuple[PackedBatch, Chains]]:
        """Each batch of this rank, with its documents' share of the step's chains."""
        sizes = [size for outline in self.outlines for size in outline.sizes]
        offsets = list(accumulate(sizes, initial=0))
        for documents, batch in zip(self.own, self.batches, strict=True):
            yield batch, chains.of_documents(offsets, documents)


@dataclass(frozen=True)
class StepLoader:
    """Reads what a rank needs of a step.

    Attributes:
        rank: of `num_ranks`, from 0.
    """

    data: TrainingData
    config: DrafterConfig
    settings: TrainSettings
    rank: int = 0
    num_ranks: int = 1

    def load(self, sequences: Sequence[PackedSequence]) -> StepWork:
        """The step of these packed sequences.

        Raises:
            DataError: a state of the rank's documents is NaN or infinite.
        """
        documents = [document for sequence in sequences for document in sequence.documents]
        outlines = tuple(self.data.outline(sequence.documents) for sequence in sequences)
        costs = [cost for outline in outlines for cost in self.costs(outline)]
        own = divide(costs, self.num_ranks)[self.rank]
        lengths = [size + 2 for outline in outlines for size in outline.sizes]
        packed = pack_in_order(own, lengths, self.settings.max_length_tokens)
        batches = tuple(self.data.batch([documents[number] for number in numbers]) for numbers in packed)
        return StepWork(outlines, tuple(packed), batches)

    def costs(self, outline: Outline) -> Iterator[float]:
        """Expected operations of each document of a packed sequence."""
        settings = self.settings
        depths = range(1, settings.num_depths)
        per_anchor = sum(max(settings.retention**depth, settings.retention_floor) for depth in depths)
        for slots in outline.supervised.split(outline.sizes):
            num_slots, num_supervised = len(slots), int(slots.sum())
            num_placeholders = num_supervised * per_anchor
            num_pairs = (num_slots + 1) / 2 * (num_slots + num_placeholders)
            yield operations(self.config, num_slots, num_supervised, num_placeholders, num_pairs)
