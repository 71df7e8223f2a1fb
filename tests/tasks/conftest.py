"""A home of its own for each test. No server, no training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.settings import Places


@pytest.fixture
def places(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Where things live in this test, as the environment says."""
    monkeypatch.setenv("FLEDGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "home").mkdir()
    shutil.copy(database, tmp_path / "home" / "mlflow.db")
    return Places()
