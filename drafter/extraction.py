"""`extract`: the target's hidden states of a dataset, on its own answers or on those given.

Conversations go through the extractor in order, many at a time; whenever all of a shard are finished it is
packed. A run that was killed continues with the conversations that are neither packed nor spooled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from drafter.answering import ConversationReader, Extractor
from drafter.chat_template import ChatTemplate, load_chat_template
from drafter.config import ExtractSettings
from drafter.conversations import DATASET_FILE, load_conversations
from drafter.errors import DataError
from drafter.files import digest_of, write_text_atomically
from drafter.progress import Progress, track
from drafter.records import Conversation, DatasetRecord, ShardRecord, StatesRecord
from drafter.shards import MANIFEST, finished_shard, open_states
from drafter.state_server import WINDOW_MARGIN_TOKENS, start_extractor
from drafter.state_spool import Spool
from drafter.target import Target, load_target

logger = logging.getLogger(__name__)

_PLAN = "plan.json"
_BYTES_PER_STATE = 2  # bf16
_TURN_OVERHEAD_TOKENS = 16
_RESERVE_BYTES = 256 * 2**20  # left free for everybody else on the disk


@dataclass(frozen=True)
class _Plan:
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
    def conversations(self) -> Iterator[tuple[int, Conversation]]:
        """(shard, conversation), in order."""
        return ((index, conversation) for index, part in enumerate(self.parts) for conversation in part)


def extract(settings: ExtractSettings) -> StatesRecord:
    """Write the states of one side of a dataset; complete ones are returned at once.

    Raises:
        DataError: a dataset that cannot be used, states that are not finite, a full disk.
        ServerError: no vLLM, or a server that dies.
    """
    started_at = time.monotonic()
    plan = _make_plan(settings)
    manifest = settings.output / MANIFEST
    _claim(settings.output, plan.digest)
    missing = [i for i in range(len(plan.parts)) if finished_shard(settings.output, i) is None]
    if manifest.exists() and not missing:
        record: StatesRecord = StatesRecord.load(manifest)
        return record
    manifest.unlink(missing_ok=True)
    num_tokens, working_s = asyncio.run(_extract_shards(plan, missing)) if missing else (0, 0.0)
    record = _make_manifest(plan, time.monotonic() - started_at, num_tokens / max(working_s, 1e-9))
    record.save(manifest)
    open_states(settings.output, plan.target.fingerprint)
    _remove_leftovers(settings.output, record)
    return record


def _make_plan(settings: ExtractSettings) -> _Plan:
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
    return _Plan(
        settings=settings,
        target=target,
        dataset=dataset,
        layers=layers,
        window=min(settings.max_length_tokens, positions - WINDOW_MARGIN_TOKENS),
        parts=tuple(tuple(conversations[i : i + size]) for i in range(0, len(conversations), size)),
    )


def _claim(output: Path, digest: str) -> None:
    """Make `output` this plan's, or find that it is another's."""
    plan_file = output / _PLAN
    if plan_file.exists():
        found = json.loads(plan_file.read_text()).get("digest")
        if found != digest:
            raise DataError(
                f"{output} holds states of other data or settings (plan {found}, now {digest})",
                "a directory of this extraction's own",
                "choose another output, or delete the directory",
            )
    output.mkdir(parents=True, exist_ok=True)
    write_text_atomically(plan_file, json.dumps({"digest": digest}) + "\n")


async def _extract_shards(plan: _Plan, missing: list[int]) -> tuple[int, float]:
    """Compute and pack the missing shards; returns tokens written and the seconds that took."""
    settings = plan.settings
    template = load_chat_template(settings.target)
    spool = Spool(settings.output)
    todo = [(i, c) for i, c in plan.conversations if i in set(missing) and not spool.is_done(c)]
    _check_disk(plan, template, [c for _, c in todo])
    packer = _Packer(plan, spool, missing, todo)
    async with _extractor(plan, spool.raw) as extractor:
        started_at = time.monotonic()
        reader = ConversationReader(extractor, template, settings, plan.window)
        with track(len(todo), "extracting", "conversations") as progress:
            num_tokens = await _read_all(reader, spool, packer, iter(todo), progress)
        await packer.pack_rest()
    spool.remove()
    return num_tokens, time.monotonic() - started_at


async def _read_all(
    reader: ConversationReader,
    spool: Spool,
    packer: _Packer,
    todo: Iterator[tuple[int, Conversation]],
    progress: Progress,
) -> int:
    """Work through `todo` with as many conversations at a time as the settings say."""
    num_tokens = 0
    started_at = time.monotonic()

    async def work() -> None:
        nonlocal num_tokens
        for index, conversation in todo:
            result = await reader.read(conversation)
            num_tokens += await asyncio.to_thread(spool.put, conversation, result)
            await packer.finished(index)
            progress.note(f"{num_tokens / (time.monotonic() - started_at):.0f} tokens/s")
            progress.advance()

    workers = [asyncio.create_task(work()) for _ in range(packer.concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:  # the first error, or Ctrl-C, ends all
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return num_tokens


class _Packer:
    """Packs a shard as soon as its last conversation is finished."""

    def __init__(
        self, plan: _Plan, spool: Spool, missing: list[int], todo: list[tuple[int, Conversation]]
    ) -> None:
        self._plan = plan
        self._spool = spool
        self._left = dict.fromkeys(missing, 0)
        for index, _ in todo:
            self._left[index] += 1
        self._lock = asyncio.Lock()
        self.concurrency = plan.settings.concurrency if plan.settings.extractor == "vllm" else 1

    async def finished(self, index: int) -> None:
        """One more conversation of shard `index` is spooled."""
        self._left[index] -= 1
        if self._left[index] == 0:
            await self._pack(index)

    async def pack_rest(self) -> None:
        """Pack shards whose conversations were all spooled by a run before."""
        for index in list(self._left):
            await self._pack(index)

    async def _pack(self, index: int) -> None:
        plan = self._plan
        metadata = {
            "target_fingerprint": plan.target.fingerprint,
            "auxiliary_layers": json.dumps(plan.layers),
        }
        async with self._lock:  # one at a time: a shard is in memory while it is packed
            if self._left.pop(index, None) is None:
                return
            await asyncio.to_thread(
                self._spool.pack, plan.settings.output, index, plan.parts[index], metadata
            )


def _extractor(plan: _Plan, raw: Path) -> AbstractAsyncContextManager[Extractor]:
    layers = (*plan.layers, plan.target.num_layers)
    if plan.settings.extractor == "vllm":
        return start_extractor(plan.settings, plan.target, layers, raw, plan.window)
    from drafter.reference_extraction import load_reference

    return load_reference(plan.settings, plan.target, layers, raw)


def _check_disk(plan: _Plan, template: ChatTemplate, conversations: list[Conversation]) -> None:
    """Say what the run needs at most, and refuse where there is not that much.

    Raises:
        DataError: too little room.
    """
    num_tokens = sum(_most_tokens(plan, template, conversation) for conversation in conversations)
    bytes_per_token = 4 * plan.target.hidden_size * _BYTES_PER_STATE + 5
    # A shard and the conversations in flight stand in the spool as well.
    in_spool = min(plan.settings.conversations_per_shard + plan.settings.concurrency, len(conversations))
    needed = num_tokens * bytes_per_token
    needed += needed * in_spool // max(len(conversations), 1) + _RESERVE_BYTES
    free = shutil.disk_usage(plan.settings.output).free
    text = f"this needs up to {needed / 1e9:.1f} GB for {num_tokens} tokens; {free / 1e9:.1f} GB are free"
    logger.info("extracting %d conversations: %s", len(conversations), text)
    if needed > free:
        raise DataError(
            f"{plan.settings.output}: {text}",
            "room for all states",
            "free disk space, choose another output, or lower max_conversations or max_answer_tokens",
        )


def _most_tokens(plan: _Plan, template: ChatTemplate, conversation: Conversation) -> int:
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


def _make_manifest(plan: _Plan, elapsed_s: float, tokens_per_s: float) -> StatesRecord:
    shards: list[ShardRecord] = []
    for index in range(len(plan.parts)):
        shard = finished_shard(plan.settings.output, index)
        assert shard is not None, f"shard {index} was packed"
        shards.append(shard)
    num_conversations = sum(s.num_conversations for s in shards)
    num_skipped = sum(s.num_skipped for s in shards)
    if num_conversations == 0:
        raise DataError(
            f"{plan.settings.dataset}: all {num_skipped} conversations were left out (empty answers, or prompts "
            f"that fill the window of {plan.window} tokens)",
            "conversations that the target answers",
            "raise max_length_tokens, or look at what the target answers to these prompts",
        )
    settings = plan.settings
    return StatesRecord(
        digest=plan.digest,
        path=str(settings.output),
        split=settings.split,
        dataset_digest=plan.dataset.digest,
        target_fingerprint=plan.target.fingerprint,
        auxiliary_layers=plan.layers,
        hidden_size=plan.target.hidden_size,
        vocab_size=plan.target.vocab_size,
        dtype="bfloat16",
        shards=tuple(s for s in shards if s.num_conversations),
        num_conversations=num_conversations,
        num_tokens=sum(s.num_tokens for s in shards),
        num_supervised_tokens=sum(s.num_supervised_tokens for s in shards),
        num_truncated=sum(s.num_truncated for s in shards),
        num_skipped=num_skipped,
        greedy_answers=settings.answers == "regenerate" and settings.temperature == 0,
        elapsed_s=elapsed_s,
        tokens_per_s=tokens_per_s,
    )


def _remove_leftovers(output: Path, record: StatesRecord) -> None:
    """Delete shards that a kill left without a record."""
    listed = {shard.file for shard in record.shards}
    for file in output.glob("shard-*.safetensors"):
        if file.name not in listed:
            file.unlink()
