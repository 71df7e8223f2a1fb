"""A home of its own for each test. No server, no training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.settings import Places
from tasks.track_runs import connect


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database whose tables exist: making them takes seconds."""
    home = tmp_path_factory.mktemp("empty")
    connect(Places(home=home)).search_experiments()
    return home / "mlflow.db"


@pytest.fixture
def places(tmp_path: Path, empty_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Where things live in this test, as the environment says."""
    monkeypatch.setenv("FLEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "home").mkdir()
    shutil.copy(empty_mlflow, tmp_path / "home" / "mlflow.db")
    return Places()
