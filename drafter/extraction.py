"""`extract`: the target's hidden states of a dataset, on its own answers or on those given.

Conversations go through the extractor in order, many at a time; whenever all of a shard are finished it is
packed. A run that was killed continues with the conversations that are neither packed nor spooled.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from drafter.answering import ConversationReader, Extractor
from drafter.chat_template import load_chat_template
from drafter.config import ExtractSettings
from drafter.errors import DataError
from drafter.extraction_plan import Plan, check_disk, claim, make_plan
from drafter.progress import track
from drafter.records import Conversation, ShardRecord, StatesRecord
from drafter.shards import MANIFEST, finished_shard, open_states
from drafter.state_server import start_extractor
from drafter.state_spool import Spool


def extract(settings: ExtractSettings) -> StatesRecord:
    """Write the states of one side of a dataset, or of both; complete ones are returned at once.

    Returns:
        The record of `output`; with `evaluation_output` the other side's is its manifest.

    Raises:
        DataError: a dataset that cannot be used, states that are not finite, a full disk.
        ServerError: no vLLM, or a server that dies.
    """
    plans = [make_plan(one) for one in settings.sides]
    missing = [_claim(plan) for plan in plans]
    unfinished = [(p, m) for p, m in zip(plans, missing, strict=True) if m or not _manifest(p).exists()]
    if unfinished:
        asyncio.run(_extract(unfinished))
    record: StatesRecord = StatesRecord.load(settings.output / MANIFEST)
    return record


def _claim(plan: Plan) -> list[int]:
    """Make the output this plan's; its shards that are not there yet. A manifest that misses some goes."""
    output = plan.settings.output
    claim(output, plan.digest)
    missing = [index for index in range(len(plan.parts)) if finished_shard(output, index) is None]
    if missing:
        _manifest(plan).unlink(missing_ok=True)
    return missing


def _manifest(plan: Plan) -> Path:
    return plan.settings.output / MANIFEST


async def _extract(unfinished: list[tuple[Plan, list[int]]]) -> None:
    """All sides through one extractor, so that it is as busy at the end of one as within it."""
    started_at = time.monotonic()
    reserved_bytes = 0
    sides = []
    for plan, missing in unfinished:
        sides.append(_Side(plan, missing))
        reserved_bytes += sides[-1].check_disk(reserved_bytes)
    num_tokens, reading_s = 0, 0.0
    if any(side.missing for side in sides):
        # It writes to one spool; states move from there to their own side's.
        async with _extractor(sides[0].plan, sides[0].spool.raw) as extractor:
            reading_since = time.monotonic()
            num_tokens = await _read_all(extractor, sides)
            reading_s = time.monotonic() - reading_since
            for side in sides:
                await side.packer.pack_rest()
    for side in sides:
        side.finish(time.monotonic() - started_at, num_tokens / max(reading_s, 1e-9))


class _Side:
    """What is missing of one split, and its way to a manifest.

    Args:
        missing: shards that are not there yet.
    """

    def __init__(self, plan: Plan, missing: list[int]) -> None:
        self.plan = plan
        self.missing = missing
        self.spool = Spool(plan.settings.output)
        self.template = load_chat_template(plan.settings.target)
        self.todo = [
            (index, conversation)
            for index, conversation in plan.conversations
            if index in missing and not self.spool.is_done(conversation)
        ]
        self.packer = _Packer(plan, self.spool, missing, self.todo)

    def check_disk(self, reserved_bytes: int) -> int:
        """Bytes that it may take; `reserved_bytes` are what others will have taken by then.

        Raises:
            DataError: too little room.
        """
        if not self.missing:
            return 0
        return check_disk(self.plan, self.template, [c for _, c in self.todo], reserved_bytes)

    def finish(self, elapsed_s: float, tokens_per_s: float) -> None:
        """Write the manifest: every shard is packed."""
        self.spool.remove()
        output = self.plan.settings.output
        record = _make_manifest(self.plan, elapsed_s, tokens_per_s)
        record.save(_manifest(self.plan))
        open_states(output, self.plan.target.fingerprint)
        _remove_leftovers(output, record)


async def _read_all(extractor: Extractor, sides: list[_Side]) -> int:
    """Every conversation that is left, one side after the other, many at a time; returns the number of tokens."""
    num_tokens = 0
    started_at = time.monotonic()
    todo = ((side, index, conversation) for side in sides for index, conversation in side.todo)

    async def work() -> None:
        nonlocal num_tokens
        for side, index, conversation in todo:
            reader = ConversationReader(extractor, side.template, side.plan.settings, side.plan.window)
            result = await reader.read(conversation)
            # Not `num_tokens += await ...`, which adds to what it was before waiting.
            num_read = await asyncio.to_thread(side.spool.put, conversation, result)
            num_tokens += num_read
            await side.packer.finished(index)
            progress.note(f"{num_tokens / (time.monotonic() - started_at):.0f} tokens/s")
            progress.advance()

    with track(sum(len(side.todo) for side in sides), "extracting", "conversations") as progress:
        workers = [asyncio.create_task(work()) for _ in range(sides[0].plan.num_in_flight)]
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
