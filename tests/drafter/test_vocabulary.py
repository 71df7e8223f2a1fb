"""The draft vocabulary and its `d2t` offsets."""

from __future__ import annotations

import pytest
import torch

from drafter.vocabulary import choose_draft_vocabulary, count_tokens, ids_from_offsets, offsets_from_ids


def test_only_the_assistants_tokens_count() -> None:
    ids = torch.tensor([5, 5, 5, 2, 2, 7])
    mask = torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.bool)
    counts = count_tokens([(ids, mask), (torch.tensor([7]), torch.tensor([True]))], vocab_size=10)
    assert counts.tolist() == [0, 0, 2, 0, 0, 1, 0, 1, 0, 0]


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token id 12"):
        count_tokens([(torch.tensor([12]), torch.tensor([True]))], vocab_size=10)


def test_the_most_frequent_tokens_are_chosen_ascending_and_ties_go_to_low_ids() -> None:
    counts = torch.tensor([0, 9, 0, 4, 4, 4, 11])
    assert choose_draft_vocabulary(counts, 4).tolist() == [1, 3, 4, 6]


def test_a_draft_vocabulary_is_clipped_to_the_targets() -> None:
    assert choose_draft_vocabulary(torch.tensor([3, 0, 1]), 10).tolist() == [0, 1, 2]


def test_offsets_are_target_id_minus_draft_id() -> None:
    ids = torch.tensor([1, 3, 4, 9])
    assert offsets_from_ids(ids).tolist() == [1, 2, 2, 6]
    assert torch.equal(ids_from_offsets(offsets_from_ids(ids)), ids)
