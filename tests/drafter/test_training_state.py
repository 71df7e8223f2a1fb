"""Checkpoints: exact, whole or absent, and of one training only."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from drafter import training_state
from drafter.errors import CheckpointError
from drafter.training_state import (
    Position,
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def make_state(step: int, fingerprint: str = "abc") -> TrainingState:
    generator = torch.Generator().manual_seed(step)
    weights = {"fc.weight": torch.randn(4, 3, generator=generator), "d2t": torch.arange(5)}
    moments = {
        "exp_avg": torch.randn(4, 3),
        "exp_avg_sq": torch.rand(4, 3),
        "step": torch.tensor(float(step)),
    }
    position = Position(fingerprint=fingerprint, step=step, sequence=2 * step, elapsed_s=1.25, num_tokens=99)
    return TrainingState(position, weights, {"fc.weight": moments}, generator.get_state())


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = make_state(7)
    loaded = load_checkpoint(save_checkpoint(tmp_path, state), "abc")
    assert loaded.position == state.position
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in state.weights.items())
    moments = state.optimizer["fc.weight"]
    assert all(torch.equal(loaded.optimizer["fc.weight"][name], tensor) for name, tensor in moments.items())
    continued = torch.Generator()
    continued.set_state(loaded.generator)
    expected = torch.Generator()
    expected.set_state(state.generator)
    assert torch.equal(torch.rand(3, generator=continued), torch.rand(3, generator=expected))


def test_only_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    for step in (9, 10, 200):
        save_checkpoint(tmp_path, make_state(step))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000200"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    files = {path.name for path in save_checkpoint(tmp_path, make_state(1)).iterdir()}
    assert files == {"state.safetensors", "state.json"}


@pytest.mark.parametrize("dies_at", ["save_file", "_flush", "rename"])
def test_a_writer_that_dies_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    save_checkpoint(tmp_path, make_state(1))

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt  # passes every `except` that a full disk is caught by, as a kill would

    with monkeypatch.context() as patch:
        patch.setattr(os if dies_at == "rename" else training_state, dies_at, die)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, make_state(2))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert load_checkpoint(found, "abc").position.step == 1
    save_checkpoint(tmp_path, make_state(3))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000003"], "leftovers are removed"


def test_a_full_disk_is_said_in_words_and_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, make_state(1))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(training_state, "_flush", full)
    with pytest.raises(CheckpointError, match="no space left"):
        save_checkpoint(tmp_path, make_state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]


def test_the_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(1, fingerprint="other"))
    with pytest.raises(CheckpointError, match="belongs to another training"):
        load_checkpoint(path, "abc")


def test_a_damaged_checkpoint_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(1))
    tensors = path / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="remove that directory"):
        load_checkpoint(path, "abc")
