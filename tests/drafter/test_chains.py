"""COD chains, and the faults that other samplers have."""

from __future__ import annotations

import pytest
import torch

from drafter.chains import Chains, chain_limits, sample_chains
from drafter.packing import PackedBatch, pack_documents
from tests.reference.random_drafters import RandomDocument, random_batch, random_document


def _sample(batch: PackedBatch, seed: int = 0, **changes: float) -> Chains:
    values = {"num_depths": 6, "retention": 0.8, "retention_floor": 0.0, **changes}
    return sample_chains(
        batch,
        int(values["num_depths"]),
        values["retention"],
        values["retention_floor"],
        torch.Generator().manual_seed(seed),
    )


def _fully_supervised(num_tokens: int) -> PackedBatch:
    document = random_document(num_tokens, seed=3)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    return pack_documents([RandomDocument(document.input_ids, mask, document.auxiliary, document.final)])


def _predictions(chains: Chains) -> torch.Tensor:
    """Slot whose prediction each placeholder makes."""
    chain, depth = chains.elements()
    return chains.anchors[chain] + depth


def test_no_anchor_before_the_first_slot() -> None:
    """A supervised first position must not give an anchor of -1."""
    batch = _fully_supervised(40)
    assert bool(batch.supervised[0])
    for seed in range(20):
        chains = _sample(batch, seed, retention=1.0)
        assert int(chains.anchors.min()) >= 0
        assert int(chains.anchors[0]) == 0  # slot 0 is as good an anchor as any


def test_chains_stay_inside_their_document() -> None:
    batch = random_batch((20, 7, 33, 5), supervised_share=1.0)
    starts = batch.document_starts()
    for seed in range(20):
        chains = _sample(batch, seed, retention=1.0, num_depths=12)
        chain, _ = chains.elements()
        predictions = _predictions(chains)
        assert int(predictions.max()) < batch.num_slots
        assert torch.equal(starts[predictions], starts[chains.anchors[chain]])


def test_every_prediction_of_a_chain_is_supervised() -> None:
    """The mask is that of the predicted token: it moves with the targets."""
    batch = random_batch((60, 50, 40), supervised_share=0.7)
    for seed in range(20):
        chains = _sample(batch, seed, retention=1.0, num_depths=8)
        assert bool(batch.supervised[_predictions(chains)].all())
        assert bool(batch.supervised[chains.anchors].all())


def test_chains_are_nested() -> None:
    """Whoever reaches depth d has every depth before it, once, in order."""
    chains = _sample(random_batch((80, 70)))
    chain, depth = chains.elements()
    for index, length in enumerate(chains.lengths.tolist()):
        assert depth[chain == index].tolist() == list(range(1, length + 1))
    assert bool((chains.anchors.diff() > 0).all())


def test_limits_count_the_supervised_run_after_each_slot() -> None:
    supervised = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    assert chain_limits(supervised, (0, 5, 9)).tolist() == [1, 0, 0, 1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(("retention", "floor"), [(0.7, 0.0), (0.8, 0.3), (1.0, 0.0), (0.5, 0.5)])
def test_depth_d_keeps_its_share_of_the_eligible_anchors(retention: float, floor: float) -> None:
    batch = _fully_supervised(4002)
    chains = _sample(batch, retention=retention, retention_floor=floor, num_depths=8)
    for depth in range(1, 8):
        share = float((chains.lengths >= depth).sum()) / int(batch.supervised.sum())
        assert share == pytest.approx(max(retention**depth, floor), abs=0.004)


def test_lengths_do_not_depend_on_where_the_anchor_stands() -> None:
    lengths = torch.zeros(200)
    batch = _fully_supervised(202)
    for seed in range(400):
        chains = _sample(batch, seed, retention=0.7, num_depths=4)
        lengths[chains.anchors] += chains.lengths
    halves = lengths[:190].view(2, 95).mean(1) / 400
    assert float(halves.diff().abs()) < 0.03


def test_one_seed_gives_one_set_of_chains() -> None:
    batch = random_batch((60, 50))
    first, again, other = _sample(batch, 1), _sample(batch, 1), _sample(batch, 2)
    assert torch.equal(first.anchors, again.anchors)
    assert torch.equal(first.lengths, again.lengths)
    assert first.lengths.tolist() != other.lengths.tolist()


def test_one_depth_has_no_chains() -> None:
    assert _sample(random_batch((30,)), num_depths=1).num_chains == 0


def test_nothing_supervised_has_no_chains() -> None:
    assert _sample(random_batch((30,), supervised_share=0.0)).num_placeholders == 0


def test_shares_outside_zero_and_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"retention 1\.5"):
        _sample(random_batch((30,)), retention=1.5)
