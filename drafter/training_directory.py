"""The directory of a training: who may write there, whether it is done, and the final weights.

`settings.json`, `metrics.jsonl`, the newest checkpoint while it runs, and at the end `drafter.json`
(the drafter's shape), `weights.safetensors` (float32 master weights, `d2t`) and, last, `training.json`.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter.config import TrainSettings
from drafter.errors import CheckpointError
from drafter.files import atomic_path, digest_of, read_record, write_text_atomically
from drafter.model import DrafterConfig
from drafter.provenance import read_provenance
from drafter.records import TrainingRecord
from drafter.target import Target

RECORD_NAME = "training.json"
SETTINGS_NAME = "settings.json"
CONFIG_NAME = "drafter.json"
WEIGHTS_NAME = "weights.safetensors"
# Settings that say where, how often or in which pieces to work, not what is learned.
_NOT_LEARNED = {
    "states", "target", "output", "warm_start", "device", "checkpoint_interval_s", "chains_per_segment",
    "rows_per_chunk", "memory_budget_gb", "distributed", "num_ranks",
}  # fmt: skip


def fingerprint_of(settings: TrainSettings, states_digest: str, target: Target) -> str:
    """Digest over everything that the weights depend on: same fingerprint, same training."""
    learned = settings.model_dump(mode="json", exclude=_NOT_LEARNED)
    warm_start = read_provenance(settings.warm_start).drafter.digest if settings.warm_start else None
    return digest_of([learned, states_digest, target.fingerprint, warm_start])


@contextmanager
def only_trainer_in(output: Path) -> Iterator[None]:
    """Hold the directory for one process: a second one waits, then finds the work done or continues it.

    The kernel lets go of the lock when its holder ends, however it ends.
    """
    output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is training in {output}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def finished_training(output: Path, fingerprint: str) -> TrainingRecord | None:
    """The record of a training that ended here, or None if there is none, or its files have vanished.

    Raises:
        CheckpointError: it was another training.
    """
    if not (output / RECORD_NAME).exists():
        return None
    record = read_record(TrainingRecord, output / RECORD_NAME)
    if record.fingerprint != fingerprint:
        raise CheckpointError(
            f"{output} holds a finished training with fingerprint {record.fingerprint}",
            f"an empty directory, or training {fingerprint} of the same states, target and settings",
            "choose another `output`, or remove this one to train anew",
        )
    whole = all((output / name).is_file() for name in (WEIGHTS_NAME, CONFIG_NAME, SETTINGS_NAME))
    return record if whole else None


def save_result(output: Path, config: DrafterConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the final weights. `training.json`, which makes them count, is the caller's to write after."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with atomic_path(output / WEIGHTS_NAME) as temporary:
        save_file(tensors, temporary)
    write_text_atomically(output / CONFIG_NAME, config.model_dump_json(indent=2) + "\n")


def read_settings(training: Path) -> dict[str, Any]:
    """The settings that a training ran with, as JSON values."""
    return read_record(TrainSettings, training / SETTINGS_NAME).model_dump(mode="json")


def read_result(training: Path) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """Shape and final float32 weights of a finished training.

    Raises:
        DataError: the training did not end.
        CheckpointError: its weights cannot be read.
    """
    read_record(TrainingRecord, training / RECORD_NAME)
    config = read_record(DrafterConfig, training / CONFIG_NAME)
    try:
        return config, load_file(training / WEIGHTS_NAME)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{training / WEIGHTS_NAME}: {error}",
            "the weights that `train` wrote",
            f"remove {training} and train again",
        ) from None
