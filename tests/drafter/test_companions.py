"""Training in several processes that the first one starts: one command to the outside, whatever happens to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from drafter import companions
from drafter.config import TrainSettings
from drafter.errors import LOST_RANK, FledgeError
from drafter.metrics import read_metrics
from drafter.records import TrainingRecord
from drafter.trainer import train
from drafter.training_state import latest_checkpoint
from tests.drafter.tiny import training_settings
from tests.waiting import PATIENCE_S, is_alive, wait_until

ROOT = Path(__file__).parents[2]
# At a low learning rate: at a high one, what rounds otherwise grows with every step.
ALIKE = {"peak_learning_rate": 1e-5, "num_epochs": 3}
ENDLESS = {"num_epochs": 1000, "checkpoint_interval_s": 1000.0}
pytestmark = pytest.mark.slow


def start(settings: TrainSettings, **changes: object) -> subprocess.Popen[str]:
    """`python -m drafter train` with two ranks."""
    settings = settings.model_copy(update={"num_ranks": 2, **changes})
    path = settings.output.with_suffix(".json")
    path.write_text(settings.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "drafter", "train", "--json", "--settings", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )


def losses(output: Path) -> list[float]:
    return [metrics.loss for metrics in read_metrics(output / "metrics.jsonl")]


def companion_of(process: subprocess.Popen[str]) -> psutil.Process:
    (companion,) = psutil.Process(process.pid).children()
    return companion


def begun(process: subprocess.Popen[str], settings: TrainSettings) -> psutil.Process:
    """The companion, once both have taken some steps."""
    wait_until(lambda: len(losses(settings.output)) > 10, process)
    return companion_of(process)


def test_two_ranks_learn_what_one_process_does_and_speak_as_one(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    alone = training_settings(tiny_states, tiny_target, tmp_path / "alone", **ALIKE)
    settings = training_settings(tiny_states, tiny_target, tmp_path / "two", **ALIKE)
    expected = train(alone)
    process = start(settings)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    (line,) = output.splitlines()
    record = TrainingRecord.model_validate(json.loads(line))
    assert record.fingerprint == expected.fingerprint, "how many learned it is not part of what is learned"
    assert losses(settings.output) == pytest.approx(losses(alone.output), rel=1e-5)
    assert errors.count("(100%)") == 1, "one reports"


def test_it_listens_to_this_machine_only(tiny_states: Path, tiny_target: Path, tmp_path: Path) -> None:
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", **ENDLESS)
    process = start(settings)
    companion = begun(process, settings)
    for one in (psutil.Process(process.pid), companion):
        listening = [link for link in one.net_connections() if link.status == psutil.CONN_LISTEN]
        assert {link.laddr.ip for link in listening} <= {"127.0.0.1", "::1"}
    process.kill()
    process.communicate()
    wait_until(lambda: not is_alive(companion.pid))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_it_leaves_a_checkpoint_that_one_process_continues(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", **ENDLESS)
    process = start(settings)
    companion = begun(process, settings)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == exit_code, errors
    assert errors.count("with a checkpoint") == 1
    assert not companion.is_running()
    reached = len(losses(settings.output))
    checkpoint = latest_checkpoint(settings.output)
    assert checkpoint is not None
    assert json.loads((checkpoint / "state.json").read_text())["step"] == reached
    continued = start(settings, num_ranks=1)
    wait_until(lambda: len(losses(settings.output)) > reached, continued)
    continued.kill()
    continued.communicate()


def test_a_rank_that_is_killed_ends_the_training_with_words(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    settings = training_settings(
        tiny_states, tiny_target, tmp_path / "out", **{**ENDLESS, "checkpoint_interval_s": 0.2}
    )
    process = start(settings)
    companion = begun(process, settings)
    companion.kill()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"rank 0 of 2 {LOST_RANK}" in errors
    assert latest_checkpoint(settings.output) is not None


def test_killed_it_takes_its_companion_along(tiny_states: Path, tiny_target: Path, tmp_path: Path) -> None:
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", **ENDLESS)
    process = start(settings)
    companion = begun(process, settings)
    process.kill()
    process.communicate()
    wait_until(lambda: not is_alive(companion.pid))


def test_a_rank_that_cannot_begin_ends_the_training_at_once(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        companions, "_start", lambda *_: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    )
    num_threads = torch.get_num_threads()
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", num_ranks=2)
    try:
        with pytest.raises(FledgeError, match=r"rank 1 of 2 ended with exit code 3 before it began"):
            train(settings)
    finally:
        torch.set_num_threads(num_threads)
