"""Checkpoints of a running training: whole or absent, safetensors and JSON only, never a pickle.

A checkpoint is a directory `checkpoint-00000120/` with `state.safetensors` (float32 master weights,
both AdamW moments, the state of the random generator) and `state.json` (`Position`). It is written
under another name, flushed to disk and renamed; then older ones are removed. Whenever the process is
killed, the newest directory with the final name is complete.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter.errors import CheckpointError, DataError
from drafter.records import Record

PREFIX = "checkpoint-"


class Position(Record):
    """Where a training stands."""

    fingerprint: str = Field(
        description="Of data, target and settings; another training's checkpoint is refused."
    )
    step: int = Field(description="Optimizer steps done.")
    sequence: int = Field(description="Packed sequences taken: the state of the sampler.")
    elapsed_s: float = Field(
        description="Seconds of training done; the time budget and its schedule count these."
    )
    num_tokens: int = Field(description="Depth-0 slots seen.")


@dataclass(frozen=True)
class TrainingState:
    """A checkpoint in memory.

    Attributes:
        position: where the training stands.
        weights: name -> float32 master weight.
        optimizer: name of a weight -> its AdamW state (`exp_avg`, `exp_avg_sq`, `step`).
        generator: state of the random generator, bytes as uint8.
    """

    position: Position
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, torch.Tensor]]
    generator: torch.Tensor


def save_checkpoint(output: Path, state: TrainingState) -> Path:
    """Write a checkpoint, then remove the ones before it.

    Raises:
        CheckpointError: the disk is full.
    """
    final = output / f"{PREFIX}{state.position.step:08d}"
    partial = output / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file(_flatten(state), partial / "state.safetensors")
        state.position.save(partial / "state.json")
        for name in ("state.safetensors", "state.json", "."):
            _flush(partial / name)
        if final.exists():  # the same step again, after a resume without progress
            shutil.rmtree(final)
        os.rename(partial, final)
        _flush(output)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise_if_disk_full(error, output)
        raise
    remove_checkpoints(output, keep=final)
    return final


def latest_checkpoint(output: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = sorted(path for path in output.glob(f"{PREFIX}*") if (path / "state.json").exists())
    return found[-1] if found else None


def load_checkpoint(path: Path, fingerprint: str) -> TrainingState:
    """Read a checkpoint of the training with this fingerprint.

    Raises:
        CheckpointError: it belongs to another training, or cannot be read.
    """
    try:
        position: Position = Position.load(path / "state.json")
        tensors = load_file(path / "state.safetensors")
    except (OSError, SafetensorError, DataError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            "a checkpoint that `train` wrote",
            "remove that directory; training starts again from the beginning",
        ) from error
    if position.fingerprint != fingerprint:
        raise CheckpointError(
            f"{path} belongs to another training (fingerprint {position.fingerprint}; "
            f"this one is {fingerprint})",
            "an output directory of the same states, target and settings",
            "choose another `output`, or remove this one to start anew",
        )
    optimizer: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            _, entry, name = key.split("/", 2)
            optimizer.setdefault(name, {})[entry] = tensor
    weights = {key.removeprefix("weights/"): t for key, t in tensors.items() if key.startswith("weights/")}
    return TrainingState(position, weights, optimizer, tensors["generator"])


def remove_checkpoints(output: Path, keep: Path | None = None) -> None:
    """Remove all checkpoints but `keep`, and what a killed writer left."""
    for path in [*output.glob(f"{PREFIX}*"), *output.glob(f".{PREFIX}*.partial")]:
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)


def raise_if_disk_full(error: BaseException, where: Path) -> None:
    """Turn "no space left on device" into words.

    Raises:
        CheckpointError: `error` says so.
    """
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left" in str(error) or "StorageFull" in str(error):
        raise CheckpointError(
            f"no space left while writing to {where}",
            "room for two checkpoints: about 24 bytes per parameter",
            "free some space and run the same command again; it continues from the last checkpoint",
        ) from error


def _flatten(state: TrainingState) -> dict[str, torch.Tensor]:
    tensors = {f"weights/{name}": tensor for name, tensor in state.weights.items()}
    for name, entries in state.optimizer.items():
        tensors |= {f"optimizer/{entry}/{name}": tensor for entry, tensor in entries.items()}
    tensors["generator"] = state.generator
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _flush(path: Path) -> None:
    """Flush a file or directory to disk, so that the rename cannot overtake its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
