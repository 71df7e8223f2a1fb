"""The draft vocabulary: which of the target's tokens the drafter can propose.

Shapes: T tokens, V vocabulary of the target, Vd draft vocabulary. vLLM reads it as `d2t`, the offset of
each draft id: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def count_tokens(documents: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """Count the tokens that the assistant wrote.

    Args:
        documents: pairs of token ids [T] and loss mask [T].
        vocab_size: V.

    Returns:
        [V] int64.

    Raises:
        ValueError: a token id lies outside the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for input_ids, loss_mask in documents:
        written = input_ids[loss_mask.bool()].long()
        if len(written) and not 0 <= int(written.min()) <= int(written.max()) < vocab_size:
            raise ValueError(f"token id {int(written.max())} outside a vocabulary of {vocab_size}")
        counts += torch.bincount(written, minlength=vocab_size)
    return counts


def choose_draft_vocabulary(counts: Tensor, draft_vocab_size: int) -> Tensor:
    """The most frequent tokens, ascending by id, [Vd] int64. Ties go to the lower id.

    Low ids break ties because byte-pair vocabularies list frequent merges first.
    """
    size = min(draft_vocab_size, len(counts))
    most_frequent = torch.sort(counts, descending=True, stable=True).indices[:size]
    return most_frequent.sort().values


def offsets_from_ids(draft_ids: Tensor) -> Tensor:
    """`d2t` [Vd] of ascending target ids [Vd]."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def ids_from_offsets(d2t: Tensor) -> Tensor:
    """Target ids [Vd] of `d2t` [Vd]."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
