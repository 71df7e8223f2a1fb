"""Hidden states as the trainer takes them: checked once, then one packed batch at a time.

Legend: T tokens of a document, H hidden size, V vocabulary of the target, Vd of the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from drafter.errors import CheckpointError, DataError
from drafter.loss import TeacherHead, best_tokens
from drafter.packing import Outline, PackedBatch, pack_documents
from drafter.shards import Document, HiddenStates, open_states
from drafter.target import Target
from drafter.vocabulary import choose_draft_vocabulary, count_tokens

MIN_SUPERVISED_TOKENS = 100  # below this a drafter would learn a few sentences by heart

_CHECKED_TOKENS = 512
_MIN_AGREEMENT = 0.5  # rounding costs a few percent; another norm or head leaves next to nothing


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Documents that hold at least one supervised prediction.

    Attributes:
        documents: their numbers in `states`, [D].
        max_length_tokens: documents are cut to this, ids, mask and states together.
        mask_token_id: the token that placeholders read; no document contains it. None: there is none.
    """

    states: HiddenStates
    target: Target
    documents: np.ndarray
    max_length_tokens: int
    mask_token_id: int | None

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document after the cut, [D]."""
        return np.minimum(self.states.lengths[self.documents], self.max_length_tokens)

    def batch(self, documents: Sequence[int]) -> PackedBatch:
        """Documents packed into one sequence, each isolated from the others.

        Raises:
            DataError: a state is NaN or infinite.
        """
        return pack_documents([_cut(self.states.document(i), self.max_length_tokens) for i in documents])

    def outline(self, documents: Sequence[int]) -> Outline:
        """What `batch` of the same documents predicts, without reading their states."""
        masks = (self.states.loss_mask(i)[: self.max_length_tokens] for i in documents)
        return Outline.of_masks(list(masks))

    def draft_vocabulary(self, size: int) -> torch.Tensor:
        """Target ids of the `size` tokens that the assistant wrote most often, ascending, [Vd] int64."""
        pairs = ((self.states.input_ids(int(i)), self.states.loss_mask(int(i))) for i in self.documents)
        counts = count_tokens(pairs, self.target.vocab_size)
        if self.mask_token_id is not None:
            counts[self.mask_token_id] = -1  # unseen tokens fill a vocabulary up; this one must not
        return choose_draft_vocabulary(counts, size)


def open_training_data(
    path: Path, target: Target, max_length_tokens: int, mask_token_id: int | None
) -> TrainingData:
    """Open hidden states for training and refuse what cannot be trained on.

    Raises:
        DataError: shards that are not as written, states of another target or size, a mask token that the data uses, ids outside the
            vocabulary, no or too few supervised tokens.
    """
    states = open_states(path, target.fingerprint)
    states.verify()  # seconds for gigabytes, against hours of training on bytes that a disk has changed
    if (states.record.hidden_size, states.record.vocab_size) != (target.hidden_size, target.vocab_size):
        raise DataError(
            f"{path}: hidden size {states.record.hidden_size}, vocabulary {states.record.vocab_size}",
            f"the target's {target.hidden_size} and {target.vocab_size}",
            "extract the states again with this target",
        )
    usable: list[int] = []
    num_supervised = 0
    for index in range(len(states)):
        input_ids = states.input_ids(index)[:max_length_tokens]
        _check_ids(input_ids, states, index, target, mask_token_id)
        supervised = int(states.loss_mask(index)[2:max_length_tokens].sum())
        num_supervised += supervised
        if supervised:
            usable.append(index)
    if num_supervised == 0:
        raise DataError(
            f"{path}: no token of its {len(states)} conversations is supervised (all loss masks are 0)",
            "answers of the assistant, marked in the loss mask",
            "check the chat template and the roles of the conversations, then extract again",
        )
    if num_supervised < MIN_SUPERVISED_TOKENS:
        raise DataError(
            f"{path}: {num_supervised} supervised tokens",
            f"at least {MIN_SUPERVISED_TOKENS}; a useful drafter needs some 100,000",
            "add conversations, or let answers be longer (extract --max-answer-tokens)",
        )
    return TrainingData(states, target, np.array(usable), max_length_tokens, mask_token_id)


def _check_ids(
    input_ids: torch.Tensor, states: HiddenStates, index: int, target: Target, mask_token_id: int | None
) -> None:
    if mask_token_id is not None and bool((input_ids == mask_token_id).any()):
        position = int((input_ids == mask_token_id).nonzero()[0, 0])
        raise DataError(
            f"conversation {states.ids[index]} contains the mask token {mask_token_id} at token {position}",
            "a mask token that no conversation uses: placeholders would look like that token",
            "drop that conversation, or choose a target whose tokenizer has an unused token",
        )
    if len(input_ids) and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < target.vocab_size:
        raise DataError(
            f"conversation {states.ids[index]}: token id {int(input_ids.max())}",
            f"ids below the target's vocabulary of {target.vocab_size}",
            "extract the states again with this target's tokenizer",
        )


def _cut(document: Document, max_length_tokens: int) -> Document:
    if len(document.input_ids) <= max_length_tokens:
        return document
    names = ("input_ids", "loss_mask", "auxiliary", "final")
    return replace(document, **{name: getattr(document, name)[:max_length_tokens] for name in names})


def check_teacher(teacher: TeacherHead, draft_ids: torch.Tensor, data: TrainingData) -> None:
    """Refuse a teacher that does not lead from the states to the tokens that the target wrote.

    Greedy answers are the best tokens of the target's own logits. An architecture whose norm or head works
    otherwise than `build_teacher` reads them shows here, and not after hours of training on another distribution.

    Args:
        draft_ids: [Vd] int64 target ids of the teacher's rows.

    Raises:
        CheckpointError: fewer than half of the answers' tokens are the teacher's best ones.
    """
    if not data.states.record.greedy_answers:
        return
    num_agreeing = num_checked = 0
    for number in data.documents:
        document = data.states.document(int(number))
        written_at = document.loss_mask.nonzero().squeeze(1)
        written_at = written_at[written_at > 0]
        written, final = document.input_ids[written_at], document.final[written_at - 1]
        usable = torch.isin(written, draft_ids.to(written.device))
        kept = usable.nonzero().squeeze(1)[: _CHECKED_TOKENS - num_checked]
        if len(kept):
            best = best_tokens(teacher.logits(final[kept].to(teacher.norm.device)))
            num_agreeing += int((draft_ids.to(best.device)[best].to(written.device) == written[kept]).sum())
        num_checked += len(kept)
        if num_checked == _CHECKED_TOKENS:
            break
    if num_agreeing < _MIN_AGREEMENT * num_checked:
        target = data.target
        raise CheckpointError(
            f"last norm and head of {target.path} ({target.config.get('model_type')}) lead to {num_agreeing} of "
            f"{num_checked} tokens that it wrote",
            "nearly all of its own greedy answers: its distribution is what a drafter is taught",
            "extract the states again if they are of other weights; else Fledge reads this architecture's norm or "
            "head wrongly, see docs/targets.md",
        )
