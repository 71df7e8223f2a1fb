"""How the documents of a step are divided: every one once, evenly by cost, and with the chains they would have anyway."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter.chains import Chains
from drafter.config import DrafterSettings, TrainSettings
from drafter.model import DrafterConfig
from drafter.sampler import PackedSequence
from drafter.starting_drafter import begin
from drafter.step_work import StepLoader, StepWork, divide, operations
from drafter.target import load_target
from tests.drafter.tiny import training_settings


def test_the_dearest_documents_are_dealt_out_first() -> None:
    assert divide([5, 4, 3, 3], 2) == [[0, 3], [1, 2]]
    assert divide([1.0, 1.0], 3) == [[0], [1], []]
    assert divide([3.0], 1) == [[0]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_shares_are_even_and_complete(num_ranks: int) -> None:
    costs = (torch.rand(200, generator=torch.Generator().manual_seed(0)) ** 3).tolist()
    shares = divide(costs, num_ranks)
    assert sorted(number for share in shares for number in share) == list(range(200))
    loads = [sum(costs[number] for number in share) for share in shares]
    assert max(loads) < 1.02 * sum(costs) / num_ranks


def test_a_document_of_twice_the_length_costs_more_than_two(tiny_target: Path) -> None:
    config = _config(tiny_target)
    short = operations(config, 1000, 1000, 2000, 1_500_000)
    long = operations(config, 2000, 2000, 4000, 6_000_000)
    assert 2 * short < long < 4 * short


def test_chains_move_with_their_documents() -> None:
    chains = Chains(torch.tensor([1, 5, 7]), torch.tensor([1, 2, 1]), num_depths=4)
    moved = chains.of_documents((0, 3, 7, 9), (0, 2))
    assert moved.anchors.tolist() == [1, 3]
    assert moved.lengths.tolist() == [1, 1]
    assert chains.of_documents((0, 3, 7, 9), (1,)).anchors.tolist() == [2]


@pytest.fixture(scope="module")
def settings(tiny_states: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    return training_settings(tiny_states, tiny_target, tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def shares(settings: TrainSettings, tiny_target: Path) -> dict[int, list[StepWork]]:
    """A step of two packed sequences, as one, two and six ranks see it."""
    drafter, data = begin(settings, load_target(tiny_target))
    sequences = [PackedSequence(0, 0, (4, 0, 9)), PackedSequence(0, 1, (7, 2))]
    loaders = {n: [StepLoader(data, drafter.config, settings, r, n) for r in range(n)] for n in (1, 2, 6)}
    return {n: [loader.load(sequences) for loader in found] for n, found in loaders.items()}


def test_one_rank_computes_what_was_packed(shares: dict[int, list[StepWork]]) -> None:
    (work,) = shares[1]
    assert [batch.offsets for batch in work.batches] == [outline.offsets for outline in work.outlines]
    assert all(
        torch.equal(batch.supervised, outline.supervised)
        for batch, outline in zip(work.batches, work.outlines, strict=True)
    )


@pytest.mark.parametrize("num_ranks", [2, 6])
def test_chains_do_not_depend_on_the_number_of_ranks(
    shares: dict[int, list[StepWork]], settings: TrainSettings, num_ranks: int
) -> None:
    def predictions(work: StepWork) -> list[tuple[int, ...]]:
        """What the chain of each anchor predicts, the anchor's own prediction first."""
        chains, supervised = work.sample(settings, torch.Generator().manual_seed(3))
        totals.append(supervised.tolist())
        return [
            tuple(batch.predicted_ids[anchor : anchor + length + 1].tolist())
            for batch, own in work.own_chains(chains)
            for anchor, length in zip(own.anchors.tolist(), own.lengths.tolist(), strict=True)
        ]

    totals: list[list[int]] = []
    whole = predictions(shares[1][0])
    parts = [chain for work in shares[num_ranks] for chain in predictions(work)]
    assert sorted(parts) == sorted(whole)
    assert all(total == totals[0] for total in totals), "the normalizer is the whole step's"
    assert any(not work.batches for work in shares[num_ranks]) == (num_ranks == 6)


def _config(target: Path) -> DrafterConfig:
    return DrafterConfig.from_target(load_target(target), DrafterSettings(), 263, (1, 2, 3))
