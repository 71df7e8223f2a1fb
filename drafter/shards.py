"""Hidden-state shards: whole conversations concatenated in safetensors files, and the manifest over them.

Shapes: T tokens of one conversation, N tokens of a shard, C conversations of a shard, H the target's
hidden size. A shard holds `input_ids [N] int32`, `loss_mask [N] uint8`, `auxiliary [N, 3H] bf16`,
`final [N, H] bf16` and `offsets [C+1] int64`: conversation i is rows offsets[i] to offsets[i+1].

`shard-00007-<sha256>.safetensors` is named by its content; `shard-00007.json` (a ShardRecord) is written
after it and `manifest.json` after all: a run killed in between continues at the first shard without one.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafter.errors import DataError
from drafter.files import atomic_path, read_record, sha256_of_file
from drafter.records import ShardRecord, StatesRecord

MANIFEST = "manifest.json"
_AGAIN = "run `python -m drafter extract` again with the same settings; it redoes only what is missing"


@dataclass(frozen=True, eq=False)
class Document:
    """One conversation with the target's states.

    Attributes:
        input_ids: [T] int64.
        loss_mask: [T] bool, true where the assistant wrote the token.
        auxiliary: [T, 3H] states entering the auxiliary layers, concatenated.
        final: [T, H] state before the target's last norm.
    """

    id: str
    domain: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    auxiliary: torch.Tensor
    final: torch.Tensor


def write_shard(
    directory: Path,
    index: int,
    documents: Sequence[Document],
    metadata: dict[str, str],
    num_truncated: int = 0,
    num_skipped: int = 0,
) -> ShardRecord:
    """Write one shard and its sidecar; without documents (all skipped) only the sidecar.

    Args:
        metadata: of the whole run, put into the file: `target_fingerprint`, `auxiliary_layers`.

    Raises:
        DataError: a state is NaN or infinite, or the disk is full; nothing is left behind.
    """
    counts = {"num_truncated": num_truncated, "num_skipped": num_skipped}
    record = ShardRecord(
        file="", sha256="", num_conversations=0, num_tokens=0, num_supervised_tokens=0, num_bytes=0, **counts
    )
    try:
        if documents:
            record = _write_tensors(directory, index, documents, metadata).model_copy(update=counts)
        record.save(directory / f"shard-{index:05d}.json")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{directory}: the disk is full ({error.strerror})",
            "room for the next shard",
            "free disk space and run again; finished shards are kept",
        ) from None
    return record


def _write_tensors(
    directory: Path, index: int, documents: Sequence[Document], metadata: dict[str, str]
) -> ShardRecord:
    for document in documents:
        check_finite(document, "the extractor")
    lengths = [len(document.input_ids) for document in documents]
    tensors = {
        "input_ids": torch.cat([d.input_ids.to(torch.int32) for d in documents]),
        "loss_mask": torch.cat([d.loss_mask.to(torch.uint8) for d in documents]),
        "auxiliary": torch.cat([d.auxiliary.to(torch.bfloat16) for d in documents]),
        "final": torch.cat([d.final.to(torch.bfloat16) for d in documents]),
        "offsets": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
    }
    contents = {**metadata, "ids": [d.id for d in documents], "domains": [d.domain for d in documents]}
    nameless = directory / f"shard-{index:05d}.safetensors"  # its name is its content's
    with atomic_path(nameless) as temporary:
        # One entry: safetensors writes several in random order, and equal content shall have equal bytes.
        _save(tensors, temporary, {"fledge": json.dumps(contents, sort_keys=True)})
        sha256 = sha256_of_file(temporary)
        num_bytes = temporary.stat().st_size
    path = directory / f"shard-{index:05d}-{sha256[:12]}.safetensors"
    nameless.replace(path)
    return ShardRecord(
        file=path.name,
        sha256=sha256,
        num_conversations=len(documents),
        num_tokens=sum(lengths),
        num_supervised_tokens=int(tensors["loss_mask"].sum()),
        num_bytes=num_bytes,
    )


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # the library hides the operating system's error in its text
        if "No space left" in str(error) or "os error 28" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device") from None
        raise


def finished_shard(directory: Path, index: int) -> ShardRecord | None:
    """The record of shard `index` if it is complete on disk (present, of the right size), else None."""
    sidecar = directory / f"shard-{index:05d}.json"
    if not sidecar.is_file():
        return None
    record = read_record(ShardRecord, sidecar)
    file = directory / record.file
    whole = file.is_file() and file.stat().st_size == record.num_bytes
    return record if whole or record.num_conversations == 0 else None


def check_finite(document: Document, origin: str) -> None:
    """Refuse states with NaN or infinity.

    Raises:
        DataError: naming conversation, position and kind of state.
    """
    for kind in ("auxiliary", "final"):
        states = getattr(document, kind)
        # A sum is finite only if every term is; overflow of a finite sum is told apart below.
        if bool(torch.isfinite(states.sum(dtype=torch.float32))):
            continue
        bad = ~torch.isfinite(states).all(dim=-1)
        if bool(bad.any()):
            position = int(bad.nonzero()[0, 0])
            raise DataError(
                f"conversation {document.id}: {kind} state at token {position} of {origin} is not finite",
                "finite hidden states",
                "compute the states with dtype float32 or bfloat16; float16 overflows on many models",
            )


class HiddenStates:
    """The conversations of a states directory, read one by one through memory maps."""

    def __init__(self, path: Path, record: StatesRecord) -> None:
        self.path = path
        self.record = record
        self._shards = [shard for shard in record.shards if shard.num_conversations]
        for shard in self._shards:
            self._check_size(shard)
        self._open = lru_cache(maxsize=64)(self._open_shard)
        contents = [self._contents(index) for index in range(len(self._shards))]
        self._firsts = np.cumsum([0, *(len(ids) for ids, _, _ in contents)])
        self.ids: tuple[str, ...] = tuple(i for ids, _, _ in contents for i in ids)
        self.domains: tuple[str, ...] = tuple(d for _, domains, _ in contents for d in domains)
        self._offsets = [offsets for _, _, offsets in contents]
        self.lengths: np.ndarray = np.concatenate([np.diff(o) for o in self._offsets]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def document(self, index: int) -> Document:
        """Conversation `index`, its tensors copied out of the shard.

        Raises:
            DataError: states that are not finite.
        """
        tensors = {name: self._rows(index, name) for name in ("auxiliary", "final")}
        document = Document(
            id=self.ids[index],
            domain=self.domains[index],
            input_ids=self.input_ids(index),
            loss_mask=self.loss_mask(index),
            **tensors,
        )
        check_finite(document, str(self.path))
        return document

    def input_ids(self, index: int) -> torch.Tensor:
        """Token ids of a conversation, [T] int64, without reading its states."""
        return self._rows(index, "input_ids").long()

    def loss_mask(self, index: int) -> torch.Tensor:
        """Loss mask of a conversation, [T] bool, without reading its states."""
        return self._rows(index, "loss_mask").bool()

    def verify(self) -> None:
        """Recompute every checksum.

        Raises:
            DataError: a shard whose bytes are not those that were written.
        """
        for shard in self._shards:
            found = sha256_of_file(self.path / shard.file)
            if found != shard.sha256:
                raise DataError(
                    f"{self.path / shard.file}: sha256 {found[:12]}", f"{shard.sha256[:12]}, as written",
                    f"delete that shard and {MANIFEST}, then {_AGAIN}",
                )  # fmt: skip

    def _rows(self, index: int, name: str) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        local = index - int(self._firsts[shard])
        start, stop = self._offsets[shard][local : local + 2]
        return self._open(shard).get_slice(name)[int(start) : int(stop)]

    def _open_shard(self, shard: int) -> Any:
        file = self.path / self._shards[shard].file
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise DataError(f"{file}: {error}", "a whole safetensors file", _AGAIN) from None

    def _contents(self, shard: int) -> tuple[list[str], list[str], np.ndarray]:
        """Ids, domains and offsets of a shard, held against the manifest."""
        handle = self._open(shard)
        record = self._shards[shard]
        file = self.path / record.file
        contents = json.loads((handle.metadata() or {}).get("fledge", "{}"))
        hidden_size = self.record.hidden_size
        offsets = handle.get_tensor("offsets").numpy()
        found = (
            contents.get("target_fingerprint"),
            tuple(handle.get_slice("auxiliary").get_shape()),
            tuple(handle.get_slice("final").get_shape()),
            len(offsets) - 1,
            _end(offsets),
        )
        expected = (
            self.record.target_fingerprint,
            (record.num_tokens, 3 * hidden_size),
            (record.num_tokens, hidden_size),
            record.num_conversations,
            record.num_tokens,
        )
        if found != expected:
            raise DataError(
                f"{file}: target, shapes, conversations and their end {found}",
                f"{expected}, as in {MANIFEST}",
                "do not mix shards of different runs: " + _AGAIN,
            )
        return contents["ids"], contents["domains"], offsets

    def _check_size(self, shard: ShardRecord) -> None:
        file = self.path / shard.file
        if not file.is_file():
            raise DataError(f"{file} is missing", f"every shard that {MANIFEST} lists", _AGAIN)
        size = file.stat().st_size
        if size != shard.num_bytes:
            raise DataError(
                f"{file} has {size} bytes",
                f"{shard.num_bytes}, as in {MANIFEST}",
                f"delete it, then {_AGAIN}",
            )


def _end(offsets: np.ndarray) -> int | None:
    """Where the last conversation ends; None if the conversations do not follow each other from 0."""
    in_order = len(offsets) > 0 and offsets[0] == 0 and bool((np.diff(offsets) > 0).all())
    return int(offsets[-1]) if in_order else None


def open_states(path: Path, target_fingerprint: str | None = None) -> HiddenStates:
    """Open a finished states directory.

    Args:
        target_fingerprint: refuse states of any other target; None accepts all.

    Raises:
        DataError: no manifest, missing or truncated shards, another target, nothing in it.
    """
    record = read_record(StatesRecord, path / MANIFEST)
    if target_fingerprint is not None and record.target_fingerprint != target_fingerprint:
        raise DataError(
            f"{path}: states of target {record.target_fingerprint}",
            f"states of target {target_fingerprint}",
            "extract the states again with this target; those of another teach the wrong distribution",
        )
    if record.num_conversations == 0 or not record.shards:
        raise DataError(f"{path}: no conversation", "at least one", "extract from a dataset that has some")
    return HiddenStates(path, record)
