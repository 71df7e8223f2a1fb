"""How whole documents become one packed sequence of slots."""

from __future__ import annotations

import pytest
import torch

from drafter.chains import Chains, chain_limits
from drafter.packing import pack_documents
from tests.reference.random_drafters import RandomDocument, random_batch, random_document


def _numbered_document(num_tokens: int, num_prompt: int, start: int = 0) -> RandomDocument:
    """Token i is `start + i`, its states hold that number: what a slot reads can be read off."""
    ids = torch.arange(start, start + num_tokens)
    return RandomDocument(
        input_ids=ids,
        loss_mask=torch.arange(num_tokens) >= num_prompt,
        auxiliary=ids[:, None].float().repeat(1, 3) + 0.25,
        final=ids[:, None].float() + 0.5,
    )


def test_alignment_of_the_design_example() -> None:
    """t0 t1 a prompt, t2..t5 the answer: slots 0..3 predict t2..t5, the chain of anchor 0 t3, t4, t5."""
    batch = pack_documents([_numbered_document(6, num_prompt=2)])
    assert batch.input_ids.tolist() == [1, 2, 3, 4]
    assert batch.auxiliary[:, 0].tolist() == [0.25, 1.25, 2.25, 3.25]
    assert batch.final[:, 0].tolist() == [1.5, 2.5, 3.5, 4.5]
    assert batch.predicted_ids.tolist() == [2, 3, 4, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3]
    assert batch.supervised.tolist() == [True, True, True, True]
    limits = chain_limits(batch.supervised, batch.offsets)
    assert limits.tolist() == [3, 2, 1, 0]
    chain = Chains(torch.tensor([0]), limits[:1], num_depths=4)
    _, depth = chain.elements()
    assert batch.predicted_ids[0 + depth].tolist() == [3, 4, 5]
    assert batch.final[0 + depth, 0].tolist() == [2.5, 3.5, 4.5]


def test_supervision_follows_the_predicted_token_not_the_read_one() -> None:
    batch = pack_documents([_numbered_document(8, num_prompt=5)])
    assert batch.predicted_ids[batch.supervised].tolist() == [5, 6, 7]
    assert batch.input_ids[batch.supervised].tolist() == [4, 5, 6]


def test_documents_keep_to_themselves() -> None:
    batch = pack_documents([_numbered_document(5, 0), _numbered_document(6, 0, start=100)])
    assert batch.offsets == (0, 3, 7)
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.predicted_ids.tolist() == [2, 3, 4, 102, 103, 104, 105]
    assert batch.document_starts().tolist() == [0, 0, 0, 3, 3, 3, 3]


def test_documents_without_a_slot_leave_no_trace() -> None:
    batch = pack_documents([_numbered_document(2, 0), _numbered_document(4, 0), _numbered_document(1, 0)])
    assert batch.offsets == (0, 2)
    assert batch.num_documents == 1


def test_a_batch_without_any_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="three tokens"):
        pack_documents([_numbered_document(2, 0)])


def test_tensors_of_different_length_are_refused() -> None:
    document = random_document(9, seed=0)
    short = RandomDocument(document.input_ids, document.loss_mask[:-1], document.auxiliary, document.final)
    with pytest.raises(ValueError, match="one length"):
        pack_documents([short])


def test_a_batch_moves_as_a_whole() -> None:
    batch = random_batch((9, 5)).to("meta")
    assert {batch.input_ids.device.type, batch.final.device.type, batch.positions.device.type} == {"meta"}
