"""Conditional drop-token sampling (COD, PARD, arXiv 2504.18583): how deep each anchor's chain goes.

Shapes: N slots, C chains, K depths.

A chain starts from an anchor slot a and holds placeholders at depths 1..m; the one at depth d predicts
what slot a+d predicts. Depth d keeps a share max(r**d, floor) of the eligible anchors, and a chain
reaches depth d only through depth d-1. So only the *lengths* of chains are random.

An anchor is eligible when its own prediction is supervised; its chain goes on while what it predicts is
supervised and in the same document. Nothing else can enter: no slot -1, no other document, no
unsupervised target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.packing import HasPredictions


@dataclass(frozen=True)
class Chains:
    """Chains of one packed batch, on the CPU.

    Attributes:
        anchors: [C] int64 slots, ascending.
        lengths: [C] int64, 1..K-1 placeholders each.
        num_depths: K, depth 0 included.
    """

    anchors: Tensor
    lengths: Tensor
    num_depths: int

    @property
    def num_chains(self) -> int:
        return len(self.anchors)

    @property
    def num_placeholders(self) -> int:
        return int(self.lengths.sum())

    def segment(self, start: int, stop: int) -> Chains:
        """Chains `start` to `stop` (exclusive)."""
        return Chains(self.anchors[start:stop], self.lengths[start:stop], self.num_depths)

    @classmethod
    def joined(cls, parts: Sequence[Chains], starts: Sequence[int]) -> Chains:
        """The chains of sequences that follow each other, in the slots of the whole.

        Args:
            starts: first slot of each sequence, ascending.
        """
        anchors = [chains.anchors + start for chains, start in zip(parts, starts, strict=True)]
        return cls(torch.cat(anchors), torch.cat([c.lengths for c in parts]), parts[0].num_depths)

    def of_documents(self, offsets: Sequence[int], documents: Sequence[int]) -> Chains:
        """The chains of some documents, in the slots of the sequence that these documents make.

        Args:
            offsets: D + 1 bounds of all documents in slots.
            documents: numbers below D, ascending.

        Example:
            documents of 3, 4 and 2 slots, anchors 1, 5, 7; of documents (0, 2): anchors 1, 3.
        """
        bounds, chosen = torch.tensor(offsets), torch.tensor(documents)
        sizes = bounds.diff()[chosen]
        moves = torch.zeros(len(bounds) - 1, dtype=torch.int64)
        moves[chosen] = sizes.cumsum(0) - sizes - bounds[chosen]
        owners = torch.searchsorted(bounds, self.anchors, right=True) - 1
        kept = torch.isin(owners, chosen)
        return Chains(self.anchors[kept] + moves[owners[kept]], self.lengths[kept], self.num_depths)

    def segments(self, num_chains: int) -> Iterator[Chains]:
        """All chains, so many at a time."""
        for start in range(0, self.num_chains, num_chains):
            yield self.segment(start, start + num_chains)

    def elements(self) -> tuple[Tensor, Tensor]:
        """Index of the chain and depth of each placeholder, chain after chain, shallow first.

        Returns:
            chain [P] int64, depth [P] int64 (1..K-1).
        """
        chain = torch.arange(self.num_chains).repeat_interleave(self.lengths)
        first = self.lengths.cumsum(0) - self.lengths
        return chain, torch.arange(len(chain)) - first[chain] + 1


def chain_limits(supervised: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """The longest chain each slot could anchor, [N] int64: supervised slots that follow it without a gap.

    Slots whose own prediction is unsupervised anchor nothing.
    """
    supervised = supervised.cpu()
    slots = torch.arange(len(supervised))
    stops = torch.cat([torch.where(~supervised)[0], torch.tensor(offsets[1:])]).unique()
    next_stop = stops[torch.searchsorted(stops, slots, right=True)]
    return torch.where(supervised, next_stop - slots - 1, 0)


def sample_chains(
    batch: HasPredictions,
    num_depths: int,
    retention: float,
    retention_floor: float,
    generator: torch.Generator,
) -> Chains:
    """Draw the chains of one batch.

    Each eligible anchor gets a stratified uniform number u, and its chain reaches depth d when
    u < max(r**d, floor). The shares are met to within one anchor, not only on average.

    Args:
        num_depths: K; placeholders have depths 1..K-1.
        retention: r of COD.
        retention_floor: smallest share kept at any depth.
        generator: CPU generator; the only source of randomness.

    Raises:
        ValueError: `num_depths` below 1, or a share outside [0, 1].
    """
    if num_depths < 1:
        raise ValueError(f"num_depths must be at least 1, not {num_depths}")
    if not (0 <= retention <= 1 and 0 <= retention_floor <= 1):
        raise ValueError(f"shares must lie in [0, 1]: retention {retention}, floor {retention_floor}")
    limits = chain_limits(batch.supervised, batch.offsets)
    eligible = torch.where(batch.supervised.cpu())[0]
    count = len(eligible)
    order = torch.randperm(count, generator=generator)
    uniform = (order + torch.rand(count, generator=generator, dtype=torch.float64)) / max(count, 1)
    depths = torch.arange(1, num_depths, dtype=torch.float64)
    shares = torch.clamp(retention**depths, min=retention_floor)
    reached = (uniform[:, None] < shares[None, :]).sum(dim=1)
    lengths = torch.minimum(reached, limits[eligible])
    kept = lengths > 0
    return Chains(eligible[kept], lengths[kept], num_depths)
