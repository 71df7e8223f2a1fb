"""The training container as SageMaker sets it up: a directory in place of /opt/ml, and the entrypoint as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

ENTRYPOINT = Path(__file__).parents[2] / "containers" / "train" / "entrypoint.py"


def set_up(root: Path, channels: dict[str, Path], hyperparameters: dict[str, Any], hosts: int = 1) -> None:
    """Write what the platform writes: channels, hyperparameters as text, and the job's instances."""
    for channel, source in channels.items():
        shutil.copytree(source, root / "input" / "data" / channel, dirs_exist_ok=True)
    names = [f"algo-{number + 1}" for number in range(hosts)]
    config = root / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in hyperparameters.items()
    }
    (config / "hyperparameters.json").write_text(json.dumps(texts))
    (config / "resourceconfig.json").write_text(json.dumps({"current_host": names[0], "hosts": names}))


def start(root: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start the entrypoint; its output goes to `root/log`."""
    repository = str(Path(__file__).parents[2])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    with open(root / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, ENTRYPOINT, *arguments],
            env={
                **inherited,
                "PYTHONPATH": repository,
                "FLEDGE_ML_ROOT": str(root),
                "SM_NUM_GPUS": "0",
                **environment,
            },
            stdout=log,
            stderr=log,
            cwd=root,
        )


def run(root: Path, *arguments: str, timeout_s: float = PATIENCE_S, **environment: str) -> int:
    """Run the entrypoint to its end."""
    process = start(root, *arguments, **environment)
    try:
        return process.wait(timeout=timeout_s)
    except BaseException:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        raise


def log_of(root: Path) -> str:
    return (root / "log").read_text()


def failure_of(root: Path) -> str:
    """What SageMaker would show as the reason; empty when there is none."""
    path = root / "output" / "failure"
    return path.read_text() if path.exists() else ""
