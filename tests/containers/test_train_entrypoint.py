"""The training container's entrypoint as a process: what it refuses, and a training that is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.containers.training_container import failure_of, log_of, run, set_up, start
from tests.waiting import PATIENCE_S, wait_until

HYPERPARAMETERS: dict[str, Any] = {
    "drafter": {"draft_vocab_size": 200},
    "num_depths": 4,
    "max_length_tokens": 128,
    "peak_learning_rate": 3e-3,
    "dtype": "float32",
    "device": "cpu",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """/opt/ml with empty channels: enough for what is refused before training."""
    for channel in ("states", "target"):
        (tmp_path / "channels" / channel).mkdir(parents=True)
    root = tmp_path / "ml"
    root.mkdir()
    set_up(root, {c: tmp_path / "channels" / c for c in ("states", "target")}, HYPERPARAMETERS)
    return root


@pytest.mark.parametrize(
    "environment",
    [
        {"SM_NUM_GPUS": "8", "SM_CURRENT_HOST": "algo-1"},
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    ],
)
def test_more_processes_than_the_trainer_can_use_are_refused(environment: dict[str, str], root: Path) -> None:
    assert run(root, "train", **environment) == 1
    assert "training processes" in failure_of(root)
    assert environment["SM_CURRENT_HOST"] in failure_of(root)
    assert "one instance of a type that has one GPU" in failure_of(root)


def test_the_platforms_own_file_tells_of_other_instances(root: Path) -> None:
    set_up(root, {}, HYPERPARAMETERS, hosts=3)
    assert run(root, "train") == 1
    assert "3 instances (algo-1, algo-2, algo-3)" in failure_of(root)


def test_a_missing_channel_is_named(root: Path) -> None:
    (root / "input" / "data" / "states").rmdir()
    assert run(root, "train") == 1
    assert failure_of(root).startswith("no channel 'states'\n  expected:")


def test_a_hyperparameter_cannot_move_a_path(root: Path) -> None:
    set_up(root, {}, {**HYPERPARAMETERS, "output": "/etc"})
    assert run(root, "train") == 1
    assert failure_of(root).startswith("hyperparameter 'output'")
    assert "leave it out" in failure_of(root)


def test_the_image_does_not_serve(root: Path) -> None:
    assert run(root, "serve") == 1
    assert "started with 'serve'" in failure_of(root)


@pytest.mark.slow
def test_the_trainers_own_words_are_the_reason(root: Path) -> None:
    set_up(root, {}, {**HYPERPARAMETERS, "num_depths": "many", "sagemaker_program": "x.py"})
    assert run(root, "train") == 1
    reason = failure_of(root)
    assert reason.startswith("python -m drafter train: ")
    assert "  expected: " in reason
    assert "  what to do: " in reason
    assert "Traceback" not in reason
    assert len(reason) <= 1024


@pytest.mark.slow
def test_of_a_crash_the_trainers_own_last_lines_are_the_reason(tmp_path: Path) -> None:
    """Below them torchrun reports at length that something failed, and never what."""
    from containers.train.entrypoint import reason_of

    (tmp_path / "crash.py").write_text("raise RuntimeError('CUDA out of memory')\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run([*torchrun, "-m", "crash"], cwd=tmp_path, capture_output=True, text=True)
    assert "ChildFailedError" in done.stderr
    assert reason_of(done.returncode, done.stderr).endswith("RuntimeError: CUDA out of memory")


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """States and target of a tiny training."""
    from tests.drafter.tiny import make_documents, make_target, write_states

    folder = tmp_path_factory.mktemp("channels")
    target = make_target(folder / "target")
    return {"target": target, "states": write_states(folder / "states", target, make_documents(target, 40))}


def steps_of(training: Path) -> list[int]:
    path = training / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


@pytest.mark.slow
def test_an_interrupted_training_goes_on_in_the_next_container(
    channels: dict[str, Path], tmp_path: Path
) -> None:
    """SIGTERM, then another machine that gets only what SageMaker kept in S3, then the end."""
    first, second = tmp_path / "first", tmp_path / "second"
    hyperparameters = {**HYPERPARAMETERS, "num_epochs": 60, "checkpoint_interval_s": 3600}
    for root in (first, second):
        root.mkdir()
        set_up(root, channels, hyperparameters)
    training = first / "checkpoints" / "training"

    process = start(first, "train")
    wait_until(lambda: len(steps_of(training)) >= 5, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM, log_of(first)
    (checkpoint,) = training.glob("checkpoint-*")
    stopped_at = int(checkpoint.name.removeprefix("checkpoint-"))
    assert failure_of(first) == ""
    assert not (first / "model").exists()

    shutil.copytree(first / "checkpoints", second / "checkpoints")
    broken = second / "checkpoints" / "training" / f"checkpoint-{stopped_at + 1:08d}"
    shutil.copytree(checkpoint, broken)
    weights = broken / "state.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # S3 had got only a part

    assert run(second, "train") == 0, log_of(second)
    assert f"{broken.name} is not whole" in log_of(second)
    model = second / "model"
    record = json.loads((model / "training.json").read_text())
    assert sorted(path.name for path in model.iterdir()) == [
        "drafter.json",
        "metrics.jsonl",
        "settings.json",
        "training.json",
        "weights.safetensors",
    ]
    assert steps_of(model) == list(range(1, record["num_steps"] + 1))
    assert record["num_steps"] > stopped_at

    shutil.rmtree(model)
    assert run(second, "train") == 0  # a finished training is not trained again
    assert json.loads((model / "training.json").read_text()) == record


@pytest.mark.slow
def test_a_trainer_that_is_killed_is_said_to_have_been(channels: dict[str, Path], tmp_path: Path) -> None:
    set_up(tmp_path, channels, {**HYPERPARAMETERS, "num_epochs": 500})
    process = start(tmp_path, "train")
    wait_until(lambda: bool(steps_of(tmp_path / "checkpoints" / "training")), process)
    os.kill(trainer_below(process.pid), signal.SIGKILL)
    assert process.wait(timeout=PATIENCE_S) == 1
    assert failure_of(tmp_path) == "the trainer was ended by signal 9; it ran out of memory, most likely"


def trainer_below(pid: int) -> int:
    """Process id of the trainer that a container's first process has started through torchrun."""
    import psutil

    for child in psutil.Process(pid).children(recursive=True):
        command = child.cmdline()
        if "drafter" in command and "torch.distributed.run" not in command:
            return int(child.pid)
    raise AssertionError("no trainer runs")
