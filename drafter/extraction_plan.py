"""What an extraction consists of, whose directory it writes to, and whether the disk suffices."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafter.chat_template import ChatTemplate
from drafter.config import ExtractSettings
from drafter.conversations import DATASET_FILE, load_conversations
from drafter.errors import DataError
from drafter.files import digest_of, write_text_atomically
from drafter.records import Conversation, DatasetRecord
from drafter.state_server import WINDOW_MARGIN_TOKENS
from drafter.target import Target, load_target

logger = logging.getLogger(__name__)

_PLAN_FILE = "plan.json"
_BYTES_PER_STATE = 2  # bf16
_TURN_OVERHEAD_TOKENS = 16
_RESERVE_BYTES = 256 * 2**20  # left free for everybody else on the disk


@dataclass(frozen=True)
class Plan:
    """What an extraction consists of."""

    settings: ExtractSettings
    target: Target
    dataset: DatasetRecord
    layers: tuple[int, int, int]
    window: int
    parts: tuple[tuple[Conversation, ...], ...]

    @property
    def digest(self) -> str:
        """Over whatever changes the states or their division into shards."""
        settings = self.settings
        choices = {
            "split",
            "answers",
            "extractor",
            "max_answer_tokens",
            "max_conversations",
            "conversations_per_shard",
        }
        if settings.temperature > 0 and settings.answers == "regenerate":
            choices |= {"temperature", "seed"}
        own = settings.model_dump(mode="json", include=choices)
        own["dtype"] = settings.server.dtype
        return digest_of([own, self.layers, self.window, self.dataset.digest, self.target.fingerprint])

    @property
    def num_in_flight(self) -> int:
        """Conversations that are worked on at a time."""
        settings = self.settings
        return settings.concurrency * settings.num_servers if settings.extractor == "vllm" else 1

    @property
    def conversations(self) -> Iterator[tuple[int, Conversation]]:
        """(shard, conversation), in order."""
        return ((index, conversation) for index, part in enumerate(self.parts) for conversation in part)


def make_plan(settings: ExtractSettings) -> Plan:
    """Read target and dataset, and settle layers, window and shards.

    Raises:
        DataError: nothing to extract, no answers where they have to be given, layers out of order.
    """
    target = load_target(settings.target)
    dataset: DatasetRecord = DatasetRecord.load(settings.dataset / DATASET_FILE)
    conversations = load_conversations(settings.dataset, settings.split)[: settings.max_conversations]
    if not conversations:
        raise DataError(
            f"{settings.dataset} has no conversation for {settings.split}",
            "at least one",
            "prepare with a larger evaluation_share, or with a source of use=evaluation",
        )
    without_answer = sum(all(m.role != "assistant" for m in c.messages) for c in conversations)
    if settings.answers == "given" and without_answer:
        raise DataError(
            f"{without_answer} of {len(conversations)} conversations bring no answer",
            "answers in the data, with answers=given",
            "set answers=regenerate, so that the target writes them",
        )
    layers = settings.auxiliary_layers or target.default_auxiliary_layers
    if not 0 <= layers[0] < layers[1] < layers[2] < target.num_layers:
        raise DataError(
            f"auxiliary_layers {layers}",
            f"three ascending layer ids from 0 to {target.num_layers - 1}",
            "leave the setting out for (2, L/2, L-3)",
        )
    positions = min(target.max_position_embeddings, settings.server.max_model_len_tokens or 2**31)
    size = settings.conversations_per_shard
    return Plan(
        settings=settings,
        target=target,
        dataset=dataset,
        layers=layers,
        window=min(settings.max_length_tokens, positions - WINDOW_MARGIN_TOKENS),
        parts=tuple(tuple(conversations[i : i + size]) for i in range(0, len(conversations), size)),
    )


def claim(output: Path, digest: str) -> None:
    """Make `output` this plan's.

    Raises:
        DataError: it is another's.
    """
    plan_file = output / _PLAN_FILE
    if plan_file.exists():
        found = _digest_in(plan_file)
        if found != digest:
            raise DataError(
                f"{output} holds states of other data or settings (plan {found}, now {digest})",
                "a directory of this extraction's own",
                "choose another output, or delete the directory",
            )
    output.mkdir(parents=True, exist_ok=True)
    write_text_atomically(plan_file, json.dumps({"digest": digest}) + "\n")


def _digest_in(plan_file: Path) -> str:
    try:
        return str(json.loads(plan_file.read_text(encoding="utf-8"))["digest"])
    except (ValueError, LookupError, TypeError):
        return "unreadable"


def check_disk(
    plan: Plan, template: ChatTemplate, conversations: Sequence[Conversation], reserved_bytes: int = 0
) -> int:
    """Say what the run needs at most, and refuse where there is not that much; returns those bytes.

    Args:
        reserved_bytes: what others will have taken of the disk by then.

    Raises:
        DataError: too little room.
    """
    num_tokens = sum(_most_tokens(plan, template, conversation) for conversation in conversations)
    bytes_per_token = 4 * plan.target.hidden_size * _BYTES_PER_STATE + 5
    # A shard and the conversations in flight stand in the spool as well.
    in_spool = min(plan.settings.conversations_per_shard + plan.num_in_flight, len(conversations))
    needed = num_tokens * bytes_per_token
    needed += needed * in_spool // max(len(conversations), 1) + _RESERVE_BYTES
    free = max(shutil.disk_usage(plan.settings.output).free - reserved_bytes, 0)
    text = f"this needs up to {needed / 1e9:.1f} GB for {num_tokens} tokens; {free / 1e9:.1f} GB are free"
    logger.info("extracting %d conversations: %s", len(conversations), text)
    if needed > free:
        raise DataError(
            f"{plan.settings.output}: {text}",
            "room for all states",
            "free disk space, choose another output, or lower max_conversations or max_answer_tokens",
        )
    return needed


def _most_tokens(plan: Plan, template: ChatTemplate, conversation: Conversation) -> int:
    """An upper bound of a conversation's tokens."""
    if plan.settings.answers == "given":
        return min(plan.window, len(template.encode(conversation.messages).input_ids))
    asked = [m for m in conversation.messages if m.role != "assistant"]
    first = next(i for i, m in enumerate(asked) if m.role == "user") + 1
    num_tokens = len(template.encode_prompt(asked[:first]).input_ids) + plan.settings.max_answer_tokens
    for message in asked[first:]:
        num_tokens += template.num_tokens(message.content) + _TURN_OVERHEAD_TOKENS
        num_tokens += plan.settings.max_answer_tokens
    return min(plan.window, num_tokens)
