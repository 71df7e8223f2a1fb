"""The serving container's entrypoint as a process, with a directory in place of /opt/ml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

ENTRYPOINT = Path(__file__).parents[2] / "containers" / "serve" / "entrypoint.py"
VARIABLE = "SM_VLLM_SPECULATIVE_CONFIG"


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A drafter as SageMaker mounts it."""
    drafter = tmp_path / "ml" / "additional-model-data-sources" / "eagle"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text(json.dumps({"pard_token": 260}))
    (drafter / "model.safetensors").write_bytes(b"weights")
    return drafter


def start(tmp_path: Path, config: Any = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the entrypoint in front of a stand-in for AWS's, which says that it was reached and with what."""
    following = tmp_path / "sagemaker_entrypoint.sh"
    following.write_text('#!/bin/sh\necho "reached as $$ with $*"\n')
    following.chmod(0o755)
    given = {} if config is None else {VARIABLE: config if isinstance(config, str) else json.dumps(config)}
    process = subprocess.Popen(
        [sys.executable, ENTRYPOINT, following, "serve"],
        env={**os.environ, "FLEDGE_ML_ROOT": str(tmp_path / "ml"), **given, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(str(process.pid), process.returncode, out, err)


def speculation(drafter: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(drafter),
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
        **changes,
    }


def test_aws_entrypoint_takes_over_the_same_process(mounted: Path, tmp_path: Path) -> None:
    done = start(tmp_path, speculation(mounted))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"reached as {done.args} with serve\n"


def test_without_a_drafter_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    assert "reached" in start(tmp_path).stdout
    assert "reached" in start(tmp_path, {"method": "ngram", "num_speculative_tokens": 3}).stdout


def test_a_drafter_that_nobody_uses_stops_the_start(mounted: Path, tmp_path: Path) -> None:
    done = start(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{VARIABLE} is not set" in done.stderr


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{model: /opt/ml, method: "eagle3"}', "PROCESS_AUTO_RECOVERY=false"),
        ("[1]", "is a JSON list"),
    ],
)
def test_a_config_that_lost_its_quotes_stops_the_start(
    config: str, said: str, mounted: Path, tmp_path: Path
) -> None:
    done = start(tmp_path, config)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_missing_channel_or_file_is_named(mounted: Path, tmp_path: Path) -> None:
    elsewhere = start(tmp_path, speculation(mounted.with_name("other")))
    assert "has no config.json and no model.safetensors" in elsewhere.stderr
    (mounted / "model.safetensors").unlink()
    done = start(tmp_path, speculation(mounted))
    assert done.returncode == 1
    assert "has no model.safetensors" in done.stderr
    assert "channel name 'eagle'" in done.stderr


def test_a_head_for_drafting_one_by_one_is_not_taken_for_a_parallel_one(
    mounted: Path, tmp_path: Path
) -> None:
    (mounted / "config.json").write_text("{}")
    assert "names no mask token" in start(tmp_path, speculation(mounted)).stderr
    assert "reached" in start(tmp_path, speculation(mounted, parallel_drafting=False)).stdout
