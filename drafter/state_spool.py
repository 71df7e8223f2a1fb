"""Finished conversations on their way into a shard: bounded disk, and nothing computed twice after a kill.

`.spool/raw` is where the extractor writes; a finished conversation moves to `.spool/done` as `<id>.safetensors`
and `<id>.json`, the latter written last. Packing a shard empties its share of `done`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import load_file

from drafter.answering import Extracted, Skipped
from drafter.errors import DataError
from drafter.records import Conversation, Record, ShardRecord
from drafter.shards import Document, write_shard


class Spooled(Record):
    """One finished conversation."""

    input_ids: tuple[int, ...]
    answer_spans: tuple[tuple[int, int], ...]
    num_cut: int = 0
    skipped: str | None = Field(default=None, description="Why it has no states.")


class Spool:
    """The spool of one extraction.

    Args:
        output: directory of the states; the spool is a hidden folder in it, on the same file system.
    """

    def __init__(self, output: Path) -> None:
        self._root = output / ".spool"
        self.raw = self._root / "raw"
        self._done = self._root / "done"
        shutil.rmtree(self.raw, ignore_errors=True)  # of requests that were cut short
        self.raw.mkdir(parents=True)
        self._done.mkdir(exist_ok=True)

    def is_done(self, conversation: Conversation) -> bool:
        """Whether the conversation needs no work any more."""
        return self._record(conversation).is_file()

    def put(self, conversation: Conversation, result: Extracted | Skipped) -> int:
        """Keep a finished conversation; returns its number of tokens."""
        if isinstance(result, Skipped):
            record = Spooled(input_ids=(), answer_spans=(), skipped=result.reason)
        else:
            result.states.rename(self._states(conversation))
            tokens = result.tokens
            record = Spooled(
                input_ids=tokens.input_ids, answer_spans=tokens.answer_spans, num_cut=tokens.num_cut
            )
        record.save(self._record(conversation))
        return len(record.input_ids)

    def pack(
        self, directory: Path, index: int, conversations: Sequence[Conversation], metadata: dict[str, str]
    ) -> ShardRecord:
        """Write shard `index` from the finished conversations and drop them from the spool.

        Raises:
            DataError: states that are not finite or do not belong to the tokens.
        """
        spooled = [(c, Spooled.load(self._record(c))) for c in conversations]
        documents = [self._document(c, s) for c, s in spooled if s.skipped is None]
        counts = {
            "num_truncated": sum(s.num_cut > 0 for _, s in spooled),
            "num_skipped": len(spooled) - len(documents),
        }
        record = write_shard(directory, index, documents, metadata, **counts)
        for conversation in conversations:
            self._states(conversation).unlink(missing_ok=True)
            self._record(conversation).unlink(missing_ok=True)
        return record

    def remove(self) -> None:
        """Delete the spool."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _document(self, conversation: Conversation, spooled: Spooled) -> Document:
        tensors = load_file(self._states(conversation))
        ids = torch.tensor(spooled.input_ids, dtype=torch.int64)
        states = tensors["hidden_states"].flatten(1)  # [T, 4H], the three auxiliary layers first
        num_states = len(states)
        if not torch.equal(tensors["token_ids"].long(), ids[:num_states]) or len(ids) - num_states > 1:
            raise DataError(
                f"conversation {conversation.id}: states of {num_states} other tokens than its {len(ids)} own",
                "states of the conversation's tokens, the last one perhaps left out",
                "delete the .spool folder of the output and run again",
            )
        if len(ids) > num_states:
            # The last sampled token was never read. It is kept as a target of prediction (often the
            # end of the turn); no slot reads the state at the last position.
            states = torch.cat([states, states.new_zeros(1, states.shape[1])])
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in spooled.answer_spans:
            mask[start:end] = True
        split = states.shape[1] // 4 * 3
        return Document(conversation.id, conversation.domain, ids, mask, states[:, :split], states[:, split:])

    def _states(self, conversation: Conversation) -> Path:
        return self._done / f"{conversation.id}.safetensors"

    def _record(self, conversation: Conversation) -> Path:
        return self._done / f"{conversation.id}.json"
