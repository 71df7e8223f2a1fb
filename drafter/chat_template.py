"""Token ids and loss mask of a conversation, under the target's own chat template.

T tokens of one conversation. The mask comes from rendering the conversation turn by turn: what the template
adds between "everything before this answer, with the generation prompt" and "everything up to this answer"
is the assistant's. Nothing is searched for in the text, so content that looks like a template is harmless.

    messages            user "Hi", assistant "Hello"
    before the answer   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    with the answer     ...                                                     Hello<|im_end|>\\n
    loss mask           0 ...                                                   1    1         0

The newline after the end-of-turn token is the template's, not the model's: the mask stops at that token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from drafter.errors import CheckpointError, DataError
from drafter.records import Message
from drafter.target import load_target


@dataclass(frozen=True)
class Tokens:
    """Token ids of one conversation, and which of them the assistant wrote.

    Attributes:
        answer_spans: one (start, end) of token positions per assistant turn, its end-of-turn token included.
        num_cut: tokens that truncation took off the end.
    """

    input_ids: tuple[int, ...]
    answer_spans: tuple[tuple[int, int], ...]
    num_cut: int = 0

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """[T], true where the assistant wrote the token."""
        mask = [False] * len(self.input_ids)
        for start, end in self.answer_spans:
            mask[start:end] = [True] * (end - start)
        return tuple(mask)

    @property
    def num_supervised(self) -> int:
        """Tokens that the assistant wrote."""
        return sum(end - start for start, end in self.answer_spans)

    def truncated(self, max_length_tokens: int) -> Tokens:
        """The first `max_length_tokens`, ids and mask together."""
        kept = min(len(self.input_ids), max_length_tokens)
        spans = tuple((start, min(end, kept)) for start, end in self.answer_spans if start < kept)
        return Tokens(self.input_ids[:kept], spans, self.num_cut + len(self.input_ids) - kept)


class ChatTemplate:
    """The chat template of a target together with its tokenizer."""

    def __init__(self, path: Path, tokenizer: Any, end_of_turn_ids: frozenset[int]) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._end_of_turn_ids = end_of_turn_ids

    def encode(self, messages: Sequence[Message]) -> Tokens:
        """Ids and loss mask of a whole conversation.

        Raises:
            DataError: the template refuses the conversation, or rewrites earlier turns.
        """
        return self._tokenize(self.render(messages), messages)

    def encode_prompt(self, messages: Sequence[Message]) -> Tokens:
        """Ids and mask of everything the target reads before it writes the next answer.

        The mask marks earlier answers of the conversation.

        Raises:
            DataError: as in `encode`.
        """
        return self._tokenize(self.render(messages, add_generation_prompt=True), messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def decode_exactly(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def num_tokens(self, text: str) -> int:
        """Length of a piece of text in tokens."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as text.

        Raises:
            DataError: the template refuses the conversation.
        """
        import jinja2

        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"the chat template of {self.path} refuses the conversation: {error}",
                "roles in an order that the template accepts",
                "change the conversation, or drop it with on_problem=drop",
            ) from None

    def _answer_span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Characters of `text` that answer `index` adds, by rendering the conversation before and with it."""
        before = self.render(messages[:index], add_generation_prompt=True)
        with_answer = self.render(messages[: index + 1])
        for prefix in (before, with_answer):
            if not text.startswith(prefix):
                raise DataError(
                    f"the chat template of {self.path} rewrites earlier turns: turn {index + 1} of "
                    f"{len(messages)} renders differently once later turns follow",
                    "a template under which a conversation's beginning stays as it was rendered",
                    "give the target a chat_template.jinja that keeps earlier turns (e.g. their reasoning), or "
                    "leave conversations of several turns out with on_problem=drop",
                )
        return len(before), len(with_answer)

    def _tokenize(self, text: str, messages: Sequence[Message]) -> Tokens:
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoding["input_ids"]
        starts = [start for start, _ in encoding["offset_mapping"]]
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            first_character, end_character = self._answer_span(messages, index, text)
            # Tokens are in the order of the text; one that straddles the beginning is the prompt's.
            start, end = bisect_left(starts, first_character), bisect_left(starts, end_character)
            # What follows the end-of-turn token is written by the template.
            ends = [i for i in range(start, end) if ids[i] in self._end_of_turn_ids]
            spans.append((start, ends[-1] + 1 if ends else end))
        return Tokens(tuple(ids), tuple(spans))


@lru_cache(maxsize=4)
def load_chat_template(path: Path) -> ChatTemplate:
    """Load tokenizer and chat template of a target.

    Raises:
        CheckpointError: no fast tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer

    target = load_target(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the tokenizer does not load: {error}",
            "a tokenizer beside the model (tokenizer.json)",
            "save it there with tokenizer.save_pretrained",
        ) from None
    if not tokenizer.chat_template:
        raise CheckpointError(
            f"{path}: the tokenizer has no chat template",
            "a chat template (chat_template.jinja, or chat_template in tokenizer_config.json)",
            "use the instruct version of the target, or add its chat template",
        )
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"{path}: a slow tokenizer", "a fast one (tokenizer.json), which maps tokens to characters",
            "convert it: AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)",
        )  # fmt: skip
    end_of_turn = target.eos_token_ids | ({tokenizer.eos_token_id} - {None})
    return ChatTemplate(path, tokenizer, frozenset(end_of_turn))
