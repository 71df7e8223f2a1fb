"""Held-out prompts as the server gets them: rendered through the target's chat template, as text. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from drafter.chat_template import load_chat_template
from drafter.config import EvaluateSettings
from drafter.conversations import load_conversations
from drafter.errors import DataError
from drafter.files import digest_of
from drafter.records import Conversation, Message


@dataclass(frozen=True)
class HeldOutPrompt:
    """A conversation up to its last assistant turn, ending where the target starts to write."""

    conversation_id: str
    domain: str
    text: str
    num_tokens: int


def choose_prompts(settings: EvaluateSettings, window_tokens: int) -> dict[str, tuple[HeldOutPrompt, ...]]:
    """Up to `prompts_per_domain` prompts of each domain, chosen by a hash so that the file's order is no bias.

    Conversations whose prompt and answer do not fit the window are passed over.

    Args:
        window_tokens: most tokens of prompt and answer together.

    Raises:
        DataError: nothing is held out, or nothing fits.
    """
    by_domain: dict[str, list[Conversation]] = {}
    for conversation in load_conversations(settings.dataset, "evaluation"):
        by_domain.setdefault(conversation.domain, []).append(conversation)
    template = load_chat_template(settings.target)
    chosen: dict[str, tuple[HeldOutPrompt, ...]] = {}
    for domain, conversations in sorted(by_domain.items()):
        conversations.sort(key=lambda one: digest_of([settings.seed, one.id]))
        prompts: list[HeldOutPrompt] = []
        for conversation in conversations:
            if len(prompts) == settings.prompts_per_domain:
                break
            messages = _without_answer(conversation)
            text = template.render(messages, add_generation_prompt=True) if messages else ""
            num_tokens = template.num_tokens(text)
            if text and num_tokens + settings.max_answer_tokens <= window_tokens:
                prompts.append(HeldOutPrompt(conversation.id, domain, text, num_tokens))
        if prompts:
            chosen[domain] = tuple(prompts)
    if not chosen:
        raise DataError(
            f"the evaluation split of {settings.dataset} holds {sum(map(len, by_domain.values()))} conversations, none of "
            f"which leaves room for {settings.max_answer_tokens} answer tokens within {window_tokens}",
            "held-out conversations that fit the window",
            "prepare with evaluation_share above 0 (or a source with use=evaluation), or lower max_answer_tokens",
        )
    return chosen


def _without_answer(conversation: Conversation) -> tuple[Message, ...]:
    """The turns before the last assistant turn: the target writes that one itself."""
    messages = conversation.messages
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    return messages
