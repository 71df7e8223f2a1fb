"""Fixtures over `tiny.py`: one tiny target, its states, one training and its export, made once a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.shards import Document
from tests.drafter.tiny import make_documents, make_target, training_settings, write_states


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny target model; do not write to it."""
    return make_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_documents(tiny_target: Path) -> list[Document]:
    """40 conversations of the tiny target with its own greedy answers and states."""
    return make_documents(tiny_target, 40)


@pytest.fixture(scope="session")
def tiny_states(
    tiny_target: Path, tiny_documents: list[Document], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A states directory of `tiny_documents`; do not write to it."""
    return write_states(tmp_path_factory.mktemp("states") / "train", tiny_target, tiny_documents)


@pytest.fixture(scope="session")
def tiny_training(tiny_target: Path, tiny_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training of the tiny target; do not write to it."""
    from drafter.trainer import train

    output = tmp_path_factory.mktemp("training") / "training"
    train(training_settings(tiny_states, tiny_target, output))
    return output


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target: Path, tiny_training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported drafter of `tiny_training`; copy it before changing anything."""
    from drafter.config import ExportSettings
    from drafter.export import export

    output = tmp_path_factory.mktemp("drafter") / "drafter"
    export(ExportSettings(training=tiny_training, target=tiny_target, output=output))
    return output
