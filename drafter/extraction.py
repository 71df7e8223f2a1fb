"""`extract`: the target's hidden states of a dataset, on its own answers or on those given.

Conversations go through the extractor in order, many at a time; whenever all of a shard are finished it is
packed. A run that was killed continues with the conversations that are neither packed nor spooled.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
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
    """Write the states of one side of a dataset, or of both; complete ones are returned at once.

    Returns:
        The record of `output`; with `evaluation_output` the other side's is its manifest.

    Raises:
        DataError: a dataset that cannot be used, states that are not finite, a full disk.
        ServerError: no vLLM, or a server that dies.
    """
    sides = [_Side(make_plan(one)) for one in settings.sides]
    unfinished = [side for side in sides if not side.finished]
    if unfinished:
        asyncio.run(_extract_sides(unfinished))
    record: StatesRecord = StatesRecord.load(settings.output / MANIFEST)
    return record


class _Side:
    """The extraction of one split: what of it is missing, and its way to a manifest."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.output = plan.settings.output
        claim(self.output, plan.digest)
        self._missing = [i for i in range(len(plan.parts)) if finished_shard(self.output, i) is None]
        self.finished = (self.output / MANIFEST).exists() and not self._missing
        if not self.finished:
            (self.output / MANIFEST).unlink(missing_ok=True)

    def prepare(self, reserved_bytes: int) -> int:
        """Find what is left to compute, before anything is started; returns the bytes that it may take.

        Args:
            reserved_bytes: what others will have taken of the disk by then.

        Raises:
            DataError: too little room.
        """
        self.spool = Spool(self.output)
        missing = set(self._missing)
        self._template = load_chat_template(self.plan.settings.target)
        self._todo = [
            (i, c) for i, c in self.plan.conversations if i in missing and not self.spool.is_done(c)
        ]
        if not missing:
            return 0
        return check_disk(self.plan, self._template, [c for _, c in self._todo], reserved_bytes)

    async def extract(self, extractor: Extractor | None, started_at: float) -> None:
        """Compute and pack the missing shards, and write the manifest.

        Args:
            extractor: None when every shard is there already.
            started_at: monotonic time since when this side is waited for.
        """
        settings, num_tokens = self.plan.settings, 0
        working_since = time.monotonic()
        if extractor is not None:
            packer = _Packer(self.plan, self.spool, self._missing, self._todo)
            reader = ConversationReader(extractor, self._template, settings, self.plan.window)
            with track(len(self._todo), f"extracting, {settings.split}", "conversations") as progress:
                num_tokens = await _read_all(reader, self.spool, packer, iter(self._todo), progress)
            await packer.pack_rest()
        self.spool.remove()
        tokens_per_s = num_tokens / max(time.monotonic() - working_since, 1e-9)
        record = _make_manifest(self.plan, time.monotonic() - started_at, tokens_per_s)
        record.save(self.output / MANIFEST)
        open_states(self.output, self.plan.target.fingerprint)
        _remove_leftovers(self.output, record)

    @property
    def needs_extractor(self) -> bool:
        return bool(self._missing)


async def _extract_sides(sides: list[_Side]) -> None:
    """One extractor for all sides, one after the other."""
    started_at = time.monotonic()
    reserved_bytes = 0
    for side in sides:
        reserved_bytes += side.prepare(reserved_bytes)
    async with AsyncExitStack() as stack:
        extractor = None
        if any(side.needs_extractor for side in sides):
            # It writes to the last side's spool, which goes last; states move from there to their own side's.
            extractor = await stack.enter_async_context(_extractor(sides[0].plan, sides[-1].spool.raw))
        for side in sides:
            await side.extract(extractor if side.needs_extractor else None, started_at)
            started_at = time.monotonic()


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
