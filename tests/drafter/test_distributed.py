"""Training under torchrun: the same training as in one process, and no hang however it is interrupted.

Ranks are real processes that speak through gloo, one thread each. Nothing here needs a GPU, so nothing here
says that NCCL works.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter.command_line import CONTINUES
from drafter.config import TrainSettings
from drafter.device import choose_device
from drafter.distributed import Ranks
from drafter.errors import FledgeError
from drafter.metrics import read_metrics
from drafter.optimization import learning_rate_share
from drafter.records import TrainingRecord
from drafter.shards import Document
from drafter.trainer import train
from drafter.training_state import PREFIX, latest_checkpoint, load_checkpoint
from tests.drafter.distributed_step import gradients_of_first_step
from tests.drafter.tiny import training_settings, write_states
from tests.waiting import PATIENCE_S, is_alive, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("distributed_step.py")
TWO_DOCUMENTS = {"max_length_tokens": 70, "num_epochs": 1}  # a packed sequence, so that a third rank has none
EMBEDDING = {"draft_vocab_size": 200, "train_embedding": True}
# Epochs enough that a training is not over before it is stopped.
LONG = {"num_epochs": 30, "checkpoint_interval_s": 0.3}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """As many threads here as in each rank."""
    torch.set_num_threads(1)


def start(num_ranks: int, settings: TrainSettings, *words: str) -> subprocess.Popen[str]:
    """The training, or the script that `words` name, under torchrun."""
    path = settings.output.parent / f"{settings.output.name}.{num_ranks}.{settings.distributed}.json"
    path.write_text(settings.model_dump_json())
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    program = ["-m", "drafter", "train", "--json", "--settings"] if not words else [words[0]]
    return subprocess.Popen(
        [sys.executable, *torchrun, *program, str(path), *words[1:]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it wrote; it must have ended well."""
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return output, errors


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process id of what torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {child: Path(f"/proc/{child}/environ").read_text().split("\0") for child in children}
    return {
        int(word.removeprefix("RANK=")): int(child)
        for child, words in environments.items()
        for word in words
        if word.startswith("RANK=")
    }


def kill_rank(process: subprocess.Popen[str], rank: int) -> str:
    """Kill one rank; what was said until the job had ended, with an error and with no process left."""
    ranks = ranks_of(process)
    os.kill(ranks[rank], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode > 0
    assert not any(is_alive(pid) for pid in ranks.values())
    return errors


def losses(output: Path) -> list[float]:
    return [metrics.loss for metrics in read_metrics(output / "metrics.jsonl")]


def newest_step(settings: TrainSettings) -> int:
    """Of the newest checkpoint by its name alone: its trainer may remove it as it is read. 0: none yet."""
    path = latest_checkpoint(settings.output)
    return int(path.name.removeprefix(PREFIX)) if path else 0


def checkpointed_step(settings: TrainSettings) -> int:
    path = latest_checkpoint(settings.output)
    assert path is not None
    state = json.loads((path / "state.json").read_text())
    load_checkpoint(path, state["fingerprint"])  # whole
    return state["step"]


# The same training


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (2, {"distributed": "ddp"}),
        (3, {"distributed": "ddp"}),
        (2, {"distributed": "fsdp2"}),
        (3, {"distributed": "fsdp2"}),
        (2, {"distributed": "ddp", "algorithm": "eagle3"}),
        (2, {"distributed": "fsdp2", "drafter": EMBEDDING, "sequences_per_step": 3}),
    ],
)
def test_gradients_and_losses_are_those_of_one_process(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, num_ranks: int, changes: dict[str, object]
) -> None:
    changes = {**TWO_DOCUMENTS, **changes}
    alone = training_settings(tiny_states, tiny_target, tmp_path / "alone", **changes)
    expected = gradients_of_first_step(alone, Ranks(torch.device("cpu")))
    train(alone)
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", **changes)
    file = tmp_path / "found.safetensors"
    _, errors = finish(start(num_ranks, settings, str(SCRIPT), str(file)))
    found = load_file(file)
    documents = found.pop("documents").tolist()
    assert sum(documents) == float(expected.pop("documents"))
    assert (min(documents) == 0) == (num_ranks == 3), "with two documents the third rank has none"
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max() / gradient.abs().max())
        assert error < 1e-5, (name, error)
    assert losses(settings.output) == pytest.approx(losses(alone.output), rel=1e-5)
    assert errors.count("steps (100%)") == 1, errors


def test_in_bfloat16_sharded_weights_are_renewed_in_every_step(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """Copies in the compute type of weights that come and go: a stale one would train what it was.

    Held against `ddp`, whose numbers are the same but for the norm of gradients: in bfloat16 one process already
    drifts by some per cent from itself when its step is cut up otherwise.
    """
    found = {}
    for how in ("ddp", "fsdp2"):
        changes = {**TWO_DOCUMENTS, "dtype": "bfloat16", "distributed": how}
        settings = training_settings(tiny_states, tiny_target, tmp_path / how, **changes)
        output, _ = finish(start(2, settings))
        found[how] = losses(settings.output)
        (printed,) = [line for line in output.splitlines() if line]
        assert TrainingRecord.model_validate_json(printed).num_steps == len(found[how])
        assert latest_checkpoint(settings.output) is None
    assert found["fsdp2"][-1] < 0.9 * found["fsdp2"][0]
    assert found["fsdp2"][:4] == pytest.approx(found["ddp"][:4], rel=1e-5)
    assert found["fsdp2"] == pytest.approx(found["ddp"], rel=0.02)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_killed_with_one_rank_and_with_two_it_reaches_the_same_losses_with_one(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, how: str
) -> None:
    """At a low learning rate: at a high one, what rounds otherwise grows with every step."""
    changes = {**LONG, "peak_learning_rate": 5e-6, "distributed": how}
    whole = training_settings(tiny_states, tiny_target, tmp_path / "whole", **changes)
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", **changes)
    train(whole)

    process = start(1, settings)
    wait_until(lambda: len(losses(settings.output)) > 20 and newest_step(settings), process)
    kill_rank(process, 0)
    reached = checkpointed_step(settings)

    process = start(2, settings)
    wait_until(lambda: newest_step(settings) > reached, process)
    errors = kill_rank(process, 1)
    said = "has lost another rank" in errors and "continues from the last checkpoint" in errors
    assert said or f"terminated; {CONTINUES}" in errors, errors  # torchrun's SIGTERM came first
    assert reached < checkpointed_step(settings) <= len(losses(settings.output)) < len(losses(whole.output))
    assert not (settings.output / "training.json").exists()

    train(settings)
    assert losses(settings.output) == pytest.approx(losses(whole.output), rel=1e-5)


# However it is interrupted


def test_torchrun_that_is_asked_to_stop_leaves_a_checkpoint(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    settings = training_settings(
        tiny_states, tiny_target, tmp_path / "out", num_epochs=1000, checkpoint_interval_s=1000
    )
    process = start(2, settings)
    wait_until(lambda: len(losses(settings.output)) > 10, process)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert not any(is_alive(pid) for pid in ranks.values())
    assert checkpointed_step(settings) == len(losses(settings.output)) > 10
    assert errors.count("with a checkpoint") == 1


def test_ranks_whose_torchrun_is_killed_stop_with_a_checkpoint(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    settings = training_settings(
        tiny_states, tiny_target, tmp_path / "out", num_epochs=1000, checkpoint_interval_s=1000
    )
    process = start(2, settings)
    wait_until(lambda: len(losses(settings.output)) > 10, process)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in ranks.values()))
    process.communicate()
    assert checkpointed_step(settings) == len(losses(settings.output)) > 10


def test_ranks_agree_when_the_time_is_up(tiny_states: Path, tiny_target: Path, tmp_path: Path) -> None:
    settings = training_settings(
        tiny_states, tiny_target, tmp_path / "out", num_epochs=100_000, time_budget_s=2.0
    )
    finish(start(2, settings))
    steps = list(read_metrics(settings.output / "metrics.jsonl"))
    record = TrainingRecord.load(settings.output / "training.json")
    before_last = steps[-2].elapsed_s if len(steps) > 1 else 0.0  # one step may take all of the time
    assert before_last < 2.0 <= steps[-1].elapsed_s == record.elapsed_s
    assert [metrics.step for metrics in steps] == list(range(1, record.num_steps + 1))
    share = learning_rate_share(before_last / 2.0, settings.warmup_share, settings.decay)
    assert steps[-1].learning_rate == pytest.approx(share * settings.peak_learning_rate)


def test_what_only_one_rank_sees_ends_the_job_in_its_words(
    tiny_target: Path, tiny_documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tiny_documents[-1].final.clone()
    final[5, 1] = float("nan")
    damaged = dataclasses.replace(tiny_documents[-1], final=final)
    with monkeypatch.context() as patch:  # our own writer refuses them; another might not
        patch.setattr("drafter.shards.check_finite", lambda document, origin: None)
        # Not greedy, so that nobody looks at the states before the rank that trains on them.
        documents = [*tiny_documents[:-1], damaged]
        states = write_states(tmp_path / "states", tiny_target, documents, greedy_answers=False)
    process = start(2, training_settings(states, tiny_target, tmp_path / "out"))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors.count("final state at token 5") == 1


# What is refused


def test_ranks_that_train_different_things_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(torch.device("cpu"), rank=1, size=2)
    monkeypatch.setattr(Ranks, "largest", lambda self, *numbers: (5.0, -3.0))
    with pytest.raises(FledgeError, match="rank 1 of 2: the step of the newest checkpoint is 3"):
        ranks.require_same(3, "the step of the newest checkpoint")


def test_a_rank_takes_the_gpu_of_its_number_or_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", local_rank=1) == torch.device("cuda:1")
    assert choose_device("cpu", local_rank=1) == torch.device("cpu")
    for name, local_rank in (("cuda", 2), ("cuda:1", 0)):
        with pytest.raises(FledgeError, match="which has 2 GPUs"):
            choose_device(name, local_rank)
