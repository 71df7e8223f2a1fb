"""`extract`: the target's hidden states of a dataset, on its own answers or on those given.

Conversations go through the extractor in order, many at a time; whenever all of a shard are finished it is
packed. A run that was killed continues with the conversations that are neither packed nor spooled.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from drafter.answering import ConversationReader, Extractor
from drafter.chat_template import load_chat_template
from drafter.config import ExtractSettings
from drafter.errors import DataError
from drafter.extraction_plan import Plan, check_disk, claim, make_plan
from drafter.progress import Progress, track
from drafter.records import Conversation, ShardRecord, StatesRecord
from drafter.shards import MANIFEST, finished_shard, open_states
from drafter.state_server import start_extractor
from drafter.state_spool import Spool


def extract(settings: ExtractSettings) -> StatesRecord:
    """Write the states of one side of a dataset; complete ones are returned at once.

    Raises:
        DataError: a dataset that cannot be used, states that are not finite, a full disk.
        ServerError: no vLLM, or a server that dies.
    """
    started_at = time.monotonic()
    plan = make_plan(settings)
    manifest = settings.output / MANIFEST
    claim(settings.output, plan.digest)
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


async def _extract_shards(plan: Plan, missing: list[int]) -> tuple[int, float]:
    """Compute and pack the missing shards; returns tokens written and the seconds that took."""
    settings = plan.settings
    template = load_chat_template(settings.target)
    spool = Spool(settings.output)
    todo = [(i, c) for i, c in plan.conversations if i in set(missing) and not spool.is_done(c)]
    check_disk(plan, template, [c for _, c in todo])
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
        self, plan: Plan, spool: Spool, missing: list[int], todo: list[tuple[int, Conversation]]
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


def _extractor(plan: Plan, raw: Path) -> AbstractAsyncContextManager[Extractor]:
    layers = (*plan.layers, plan.target.num_layers)
    if plan.settings.extractor == "vllm":
        return start_extractor(plan.settings, plan.target, layers, raw, plan.window)
    from drafter.reference_extraction import load_reference

    return load_reference(plan.settings, plan.target, layers, raw)


def _make_manifest(plan: Plan, elapsed_s: float, tokens_per_s: float) -> StatesRecord:
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
