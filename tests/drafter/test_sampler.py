"""The order of documents: complete, packed within bounds, and recomputed the same after a resume."""

from __future__ import annotations

import numpy as np
import pytest

from drafter.sampler import PackingPlan, pack_epoch

LENGTHS = np.random.default_rng(0).integers(3, 60, size=200)


def plan(num_epochs: float = 2, seed: int = 0) -> PackingPlan:
    return PackingPlan(
        LENGTHS, np.arange(200) + 1000, max_length_tokens=100, num_epochs=num_epochs, seed=seed
    )


def test_each_epoch_takes_every_document_once_within_the_length() -> None:
    sequences = pack_epoch(LENGTHS, 100, seed=3, epoch=1)
    assert sorted(document for sequence in sequences for document in sequence) == list(range(200))
    assert max(LENGTHS[list(sequence)].sum() for sequence in sequences) <= 100


def test_a_document_longer_than_a_sequence_is_alone_in_one() -> None:
    sequences = pack_epoch(np.array([5, 5, 300]), 10, seed=0, epoch=0)
    assert (2,) in sequences


def test_epochs_differ_in_order_and_seeds_too() -> None:
    orders = {tuple(pack_epoch(LENGTHS, 100, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("start", [0, 7, 70, 111])
def test_a_plan_continues_anywhere_as_if_it_had_run_from_the_beginning(start: int) -> None:
    whole = list(plan().from_sequence(0))
    assert list(plan().from_sequence(start)) == whole[start:]
    assert len(whole) == len(plan())


def test_documents_keep_the_numbers_of_their_caller() -> None:
    assert {document for s in plan(1).from_sequence(0) for document in s.documents} == set(range(1000, 1200))


def test_a_fraction_of_an_epoch_ends_within_it() -> None:
    one, half_more = len(plan(1)), len(plan(1.5))
    assert half_more - one == pytest.approx(len(list(plan(2).from_sequence(one))) / 2, abs=1)
    assert plan(1.5).epochs_at(half_more) == pytest.approx(1.5, abs=0.02)
    assert plan(2).epochs_at(one) == 1.0
    assert plan(2).epochs_at(len(plan(2))) == 2.0


def test_less_than_one_epoch_still_trains() -> None:
    assert len(plan(0.001)) == 1
