"""Held-out prompts as the server gets them: rendered through the target's chat template, as text. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drafter.config import EvaluateSettings
from drafter.errors import DataError
from drafter.files import digest_of
from drafter.records import Conversation

FILE_NAME = "evaluation.jsonl"


@dataclass(frozen=True)
class HeldOutPrompt:
    """A conversation up to its last assistant turn, ending where the target starts to write."""

    conversation_id: str
    domain: str
    text: str
    num_tokens: int


def read_held_out(dataset: Path) -> Iterator[Conversation]:
    """The evaluation split that `prepare` wrote.

    Raises:
        DataError: there is no such file.
    """
    path = dataset / FILE_NAME
    if not path.exists():
        raise DataError(
            f"{path} does not exist", "a prepared dataset", "run `python -m drafter prepare` with this output"
        )
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield Conversation.model_validate_json(line)


def choose_prompts(settings: EvaluateSettings, window_tokens: int) -> dict[str, tuple[HeldOutPrompt, ...]]:
    """Up to `prompts_per_domain` prompts of each domain, chosen by a hash so that the file's order is no bias.

    Conversations whose prompt and answer do not fit the window are passed over.

    Args:
        window_tokens: most tokens of prompt and answer together.

    Raises:
        DataError: nothing is held out, or nothing fits.
    """
    from transformers import AutoTokenizer  # takes seconds; `--help` should not

    by_domain: dict[str, list[Conversation]] = {}
    for conversation in read_held_out(settings.dataset):
        by_domain.setdefault(conversation.domain, []).append(conversation)
    tokenizer = AutoTokenizer.from_pretrained(settings.target, trust_remote_code=False, local_files_only=True)
    chosen: dict[str, tuple[HeldOutPrompt, ...]] = {}
    for domain, conversations in sorted(by_domain.items()):
        conversations.sort(key=lambda one: digest_of([settings.seed, one.id]))
        prompts: list[HeldOutPrompt] = []
        for conversation in conversations:
            if len(prompts) == settings.prompts_per_domain:
                break
            text = _render(tokenizer, conversation)
            num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0
            if text and num_tokens + settings.max_answer_tokens <= window_tokens:
                prompts.append(HeldOutPrompt(conversation.id, domain, text, num_tokens))
        if prompts:
            chosen[domain] = tuple(prompts)
    if not chosen:
        raise DataError(
            f"{settings.dataset / FILE_NAME} holds {sum(map(len, by_domain.values()))} conversations, none of "
            f"which leaves room for {settings.max_answer_tokens} answer tokens within {window_tokens}",
            "held-out conversations that fit the window",
            "prepare with evaluation_share above 0 (or a source with use=evaluation), or lower max_answer_tokens",
        )
    return chosen


def _render(tokenizer: object, conversation: Conversation) -> str:
    """The conversation before its last assistant turn, with the header of that turn; empty without one."""
    messages = [message.model_dump() for message in conversation.messages]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        return ""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))  # type: ignore[attr-defined]
