"""One conversation, turn by turn: the target answers, and the states of the whole come with its last pass.

T tokens of a conversation, H the target's hidden size. Whoever computes (vLLM, or transformers as the
reference) is an `Extractor`; what a conversation is made of is decided here, once for both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drafter.chat_template import ChatTemplate, Tokens
from drafter.config import ExtractSettings
from drafter.records import Conversation, Message


@dataclass(frozen=True)
class Answer:
    """What the target wrote.

    Attributes:
        ids: its tokens, the end-of-turn token included if it got that far.
        is_complete: it ended by itself rather than at the limit.
        states: file of the states of prompt and answer without its last token, or None if not asked for.
    """

    ids: tuple[int, ...]
    is_complete: bool
    states: Path | None


class Extractor(Protocol):
    """Answers prompts and keeps hidden states."""

    async def answer(self, prompt: tuple[int, ...], max_tokens: int, seed: int, keep_states: bool) -> Answer:
        """Write an answer of 1 to `max_tokens` tokens."""

    async def states(self, ids: tuple[int, ...]) -> Path:
        """File with `hidden_states [T, 4, H]` and `token_ids [T]` of given tokens."""


@dataclass(frozen=True)
class Extracted:
    """A conversation whose states lie in a file; `tokens` may be one longer than the states (see shards)."""

    tokens: Tokens
    states: Path


@dataclass(frozen=True)
class Skipped:
    """A conversation left out, and why."""

    reason: str


class ConversationReader:
    """Turns conversations into tokens with states, by the settings of an extraction.

    Args:
        window: most tokens of one conversation.
    """

    def __init__(
        self, extractor: Extractor, template: ChatTemplate, settings: ExtractSettings, window: int
    ) -> None:
        self._extractor = extractor
        self._template = template
        self._settings = settings
        self._window = window

    async def read(self, conversation: Conversation) -> Extracted | Skipped:
        """Answers and states of one conversation."""
        if self._settings.answers == "given":
            return await self._read_given(conversation.messages)
        return await self._regenerate(conversation)

    async def _read_given(self, messages: tuple[Message, ...]) -> Extracted | Skipped:
        while messages and messages[-1].role == "user":
            messages = messages[:-1]  # nobody answered, so it teaches nothing
        if not messages:
            return Skipped("no answer to keep")
        tokens = self._template.encode(messages).truncated(self._window)
        if tokens.num_supervised == 0:
            return Skipped("no token of an answer within the window")
        return Extracted(tokens, await self._extractor.states(tokens.input_ids))

    async def _regenerate(self, conversation: Conversation) -> Extracted | Skipped:
        """Ask the user's turns one after the other.

        An empty answer or a full window ends the conversation at the turn before; an answer cut by
        `max_answer_tokens` stays, but the end-of-turn token that the template then adds is not the target's.
        """
        asked = [m for m in conversation.messages if m.role != "assistant"]
        last_turn = len(asked) - 1
        said: list[Message] = []
        is_complete: list[bool] = []
        for turn, message in enumerate(asked):
            said.append(message)
            if message.role == "system":
                continue
            prompt = self._template.encode_prompt(said)
            max_tokens = min(self._settings.max_answer_tokens, self._window - len(prompt.input_ids))
            if max_tokens < 1:
                return await self._read_so_far(said[:-1], is_complete, "the prompt fills the window")
            seed = _seed_of(self._settings.seed, conversation.id, turn)
            answer = await self._extractor.answer(prompt.input_ids, max_tokens, seed, turn == last_turn)
            text = self._template.decode(answer.ids)
            if not text.strip():
                if answer.states is not None:
                    answer.states.unlink(missing_ok=True)
                return await self._read_so_far(said[:-1], is_complete, "the target's answer is empty")
            if turn == last_turn:
                assert answer.states is not None
                return Extracted(
                    _with_answer(_without_added_ends(prompt, is_complete), answer.ids), answer.states
                )
            said.append(Message(role="assistant", content=text))
            is_complete.append(answer.is_complete)
        return Skipped("no user turn")

    async def _read_so_far(
        self, said: list[Message], is_complete: list[bool], reason: str
    ) -> Extracted | Skipped:
        """States of the turns that were answered, in a pass of their own."""
        if not is_complete:
            return Skipped(reason)
        tokens = _without_added_ends(self._template.encode(said), is_complete).truncated(self._window)
        if tokens.num_supervised == 0:
            return Skipped(reason)
        return Extracted(tokens, await self._extractor.states(tokens.input_ids))


def _without_added_ends(tokens: Tokens, is_complete: list[bool]) -> Tokens:
    """Take the template's end-of-turn token out of the spans of answers that were cut."""
    spans = tuple(
        (start, end if complete else max(end - 1, start))
        for (start, end), complete in zip(tokens.answer_spans, is_complete, strict=True)
    )
    return Tokens(tokens.input_ids, spans, tokens.num_cut)


def _with_answer(prompt: Tokens, answer: tuple[int, ...]) -> Tokens:
    start = len(prompt.input_ids)
    ids = prompt.input_ids + answer
    return Tokens(ids, (*prompt.answer_spans, (start, len(ids))), prompt.num_cut)


def _seed_of(seed: int, conversation_id: str, turn: int) -> int:
    """A seed that depends on the conversation, so that a repeated request gives the same answer."""
    digest = hashlib.sha256(f"{seed}:{conversation_id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF
