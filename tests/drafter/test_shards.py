"""Hidden-state shards: what comes back, and what damage is noticed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafter.errors import DataError
from drafter.shards import Document, finished_shard, open_states, write_shard
from drafter.target import load_target


@pytest.fixture
def states(tiny_states: Path, tmp_path: Path) -> Path:
    """A copy of a states directory that a test may damage."""
    return Path(shutil.copytree(tiny_states, tmp_path / "states"))


def first_shard(states: Path) -> Path:
    return sorted(states.glob("shard-*.safetensors"))[0]


def test_documents_come_back_as_they_were_written(tiny_states: Path, tiny_documents: list[Document]) -> None:
    states = open_states(tiny_states)
    assert len(states) == len(tiny_documents)
    for index in (0, 19, 20, 39):  # on both sides of the shard's border
        expected, found = tiny_documents[index], states.document(index)
        assert (found.id, found.domain) == (expected.id, expected.domain)
        assert torch.equal(found.input_ids, expected.input_ids)
        assert found.input_ids.dtype == torch.int64
        assert torch.equal(found.loss_mask, expected.loss_mask)
        assert torch.equal(found.auxiliary, expected.auxiliary.to(torch.bfloat16))
        assert torch.equal(found.final, expected.final.to(torch.bfloat16))
    assert states.lengths.tolist() == [len(d.input_ids) for d in tiny_documents]


def test_shards_are_named_by_their_content(tiny_documents: list[Document], tmp_path: Path) -> None:
    metadata = {"target_fingerprint": "x"}
    one = write_shard(tmp_path / "a", 0, tiny_documents[:2], metadata)
    same = write_shard(tmp_path / "b", 0, tiny_documents[:2], metadata)
    other = write_shard(tmp_path / "c", 0, tiny_documents[1:3], metadata)
    assert one.file == same.file == f"shard-00000-{one.sha256[:12]}.safetensors"
    assert one.file != other.file


def test_shard_counts_as_finished_only_when_whole(tiny_documents: list[Document], tmp_path: Path) -> None:
    record = write_shard(tmp_path, 3, tiny_documents[:2], {})
    assert finished_shard(tmp_path, 3) == record
    assert finished_shard(tmp_path, 2) is None
    content = (tmp_path / record.file).read_bytes()
    (tmp_path / record.file).write_bytes(content[:-1])
    assert finished_shard(tmp_path, 3) is None


def test_shard_of_skipped_conversations_is_finished_without_a_file(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [], {}, num_skipped=4)
    record = finished_shard(tmp_path, 0)
    assert record is not None
    assert (record.num_conversations, record.num_skipped) == (0, 4)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["auxiliary", "final"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_refused_before_anything_is_written(
    tiny_documents: list[Document], tmp_path: Path, kind: str, value: float
) -> None:
    damaged = getattr(tiny_documents[1], kind).clone()
    damaged[7, 3] = value
    documents = [tiny_documents[0], replace(tiny_documents[1], **{kind: damaged})]
    with pytest.raises(DataError, match=f"{documents[1].id}: {kind} state at token 7"):
        write_shard(tmp_path, 0, documents, {})
    assert not list(tmp_path.iterdir())


def test_large_but_finite_states_are_accepted(tiny_documents: list[Document], tmp_path: Path) -> None:
    large = torch.full_like(tiny_documents[0].final, 3e38)  # their sum overflows
    write_shard(tmp_path, 0, [replace(tiny_documents[0], final=large)], {})


def test_states_that_became_nan_on_disk_are_refused_when_read(states: Path) -> None:
    file = first_shard(states)
    content = bytearray(file.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    last = header_end + json.loads(content[8:header_end])["final"]["data_offsets"][1]
    content[last - 2 : last] = b"\xc0\x7f"  # a bf16 NaN in the last final state
    file.write_bytes(content)
    opened = open_states(states)
    opened.document(0)
    with pytest.raises(DataError, match="not finite"):
        opened.document(19)  # the last of its shard
    with pytest.raises(DataError, match="sha256"):
        opened.verify()


def test_undamaged_states_verify(tiny_states: Path) -> None:
    open_states(tiny_states).verify()


def test_truncated_shard_is_refused(states: Path) -> None:
    file = first_shard(states)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size - 100])
    with pytest.raises(DataError, match=f"has {size - 100} bytes"):
        open_states(states)


def test_missing_shard_is_refused(states: Path) -> None:
    first_shard(states).unlink()
    with pytest.raises(DataError, match="is missing"):
        open_states(states)


def test_directory_without_manifest_is_not_taken_for_done(states: Path) -> None:
    (states / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json does not exist"):
        open_states(states)


def test_states_of_another_target_are_refused(tiny_states: Path, tiny_target: Path) -> None:
    open_states(tiny_states, load_target(tiny_target).fingerprint)
    with pytest.raises(DataError, match="states of target"):
        open_states(tiny_states, "0123456789abcdef")


def test_shard_of_another_run_under_this_manifest_is_refused(
    states: Path, tiny_documents: list[Document]
) -> None:
    manifest = json.loads((states / "manifest.json").read_text())
    foreign = write_shard(states, 0, tiny_documents[:20], {"target_fingerprint": "another target"})
    manifest["shards"][0] = foreign.model_dump()
    (states / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="do not mix shards"):
        open_states(states)


def test_shard_whose_conversations_end_elsewhere_is_refused(states: Path) -> None:
    shard = first_shard(states)
    with safe_open(shard, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(shard)
    tensors["offsets"][-1] += 1_000_000
    save_file(tensors, shard, metadata=metadata)
    with pytest.raises(DataError, match="conversations and their end"):
        open_states(states)


def test_manifest_without_shards_is_refused(states: Path) -> None:
    manifest = states / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "shards": []}))
    with pytest.raises(DataError, match="no conversation"):
        open_states(states)
