"""Training: it learns, is exact across kills, and refuses what cannot be trained on."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafter.config import TrainSettings
from drafter.errors import CheckpointError, DataError, FledgeError
from drafter.initialization import TargetTensors, build_drafter, build_teacher
from drafter.metrics import read_metrics
from drafter.optimization import learning_rate_share
from drafter.records import TrainingRecord
from drafter.shards import Document
from drafter.target import load_target
from drafter.trainer import train
from drafter.training_data import open_training_data
from drafter.training_directory import read_result
from drafter.training_state import latest_checkpoint
from drafter.vocabulary import ids_from_offsets
from tests.drafter.tiny import make_target, training_settings, write_states
from tests.waiting import PATIENCE_S, wait_until

# Epochs enough that a training is not over before it is stopped.
LONG = {"num_epochs": 30, "checkpoint_interval_s": 0.3}


def losses(output: Path) -> list[float]:
    return [metrics.loss for metrics in read_metrics(output / "metrics.jsonl")]


def start(settings: TrainSettings) -> subprocess.Popen[str]:
    """The same training as a process, to be killed."""
    path = settings.output.parent / f"{settings.output.name}.settings.json"
    path.write_text(settings.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "drafter", "train", "--settings", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """As many threads here as in the processes that are killed: sums round alike."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def uninterrupted(tiny_states: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "training"
    train(training_settings(tiny_states, tiny_target, output, **LONG))
    return output


def test_the_loss_falls_and_the_files_agree_with_the_record(uninterrupted: Path) -> None:
    steps = list(read_metrics(uninterrupted / "metrics.jsonl"))
    record = TrainingRecord.load(uninterrupted / "training.json")
    assert [m.step for m in steps] == list(range(1, record.num_steps + 1))
    assert steps[-1].loss < 0.6 * steps[0].loss
    assert steps[-1].epoch == record.num_epochs == LONG["num_epochs"]
    assert len(steps[0].accuracy) == 4
    assert steps[-1].learning_rate < 0.01 * max(m.learning_rate for m in steps)
    assert latest_checkpoint(uninterrupted) is None, "a finished training needs no checkpoint"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_that_are_written_are_those_that_were_trained(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, dtype: str
) -> None:
    """Every step computed with the weights of the step before: nothing stale between master and copy."""
    from drafter.chains import sample_chains
    from drafter.two_stream import StepOptions, evaluate_loss

    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", num_epochs=20, dtype=dtype)
    record = train(settings)
    target = load_target(tiny_target)
    config, weights = read_result(tmp_path / "out")
    tensors = TargetTensors(target.path)
    drafter = build_drafter(config, ids_from_offsets(weights["d2t"]), tensors, False, 0)
    drafter.load_trained_state(weights)
    teacher = build_teacher(config, drafter.draft_ids, tensors, torch.float32, "cpu")
    data = open_training_data(tiny_states, target, 2048, target.mask_token_id)
    batch = data.batch(data.documents.tolist())
    chains = sample_chains(batch, 4, 0.8, 0.0, torch.Generator().manual_seed(0))
    result = evaluate_loss(drafter, teacher, batch, chains, StepOptions(dtype=torch.float32))
    assert float(result.loss_sum) / int(result.supervised.sum()) == pytest.approx(record.final_loss, rel=0.1)


def test_the_same_settings_give_the_same_bytes(tiny_states: Path, tiny_target: Path, tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        train(training_settings(tiny_states, tiny_target, tmp_path / name))
        files.append((tmp_path / name / "weights.safetensors").read_bytes())
    assert files[0] == files[1]


def test_how_a_step_is_cut_up_is_not_another_training(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    first = train(training_settings(tiny_states, tiny_target, tmp_path / "a"))
    second = train(
        training_settings(tiny_states, tiny_target, tmp_path / "b", chains_per_segment=3, rows_per_chunk=5)
    )
    assert first.fingerprint == second.fingerprint
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-4)


def test_a_finished_training_is_not_run_again(
    tiny_training: Path, tiny_states: Path, tiny_target: Path
) -> None:
    before = (tiny_training / "weights.safetensors").stat().st_mtime_ns
    again = train(training_settings(tiny_states, tiny_target, tiny_training))
    assert again == TrainingRecord.load(tiny_training / "training.json")
    assert (tiny_training / "weights.safetensors").stat().st_mtime_ns == before


def test_weights_that_have_vanished_are_trained_again(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", num_epochs=1)
    first = train(settings)
    before = (tmp_path / "out/weights.safetensors").read_bytes()
    (tmp_path / "out/weights.safetensors").unlink()
    assert train(settings).num_steps == first.num_steps
    assert (tmp_path / "out/weights.safetensors").read_bytes() == before


def test_the_directory_of_another_training_is_refused(
    tiny_training: Path, tiny_states: Path, tiny_target: Path
) -> None:
    with pytest.raises(CheckpointError, match="choose another `output`"):
        train(training_settings(tiny_states, tiny_target, tiny_training, seed=1))


@pytest.mark.slow
def test_killed_in_mid_epoch_it_resumes_to_the_same_losses(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", **LONG)
    for step in (20, 60):
        process = start(settings)
        wait_until(lambda step=step: len(losses(settings.output)) > step, process)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert latest_checkpoint(settings.output) is not None
    assert not (settings.output / "training.json").exists()
    train(settings)
    assert losses(settings.output) == losses(uninterrupted)
    weights = [(path / "weights.safetensors").read_bytes() for path in (settings.output, uninterrupted)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_it_checkpoints_the_step_it_is_in(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, uninterrupted: Path, number: int, code: int
) -> None:
    settings = training_settings(
        tiny_states, tiny_target, tmp_path / "out", **{**LONG, "checkpoint_interval_s": 1000.0}
    )
    process = start(settings)
    wait_until(lambda: len(losses(settings.output)) > 10, process)
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_S) == code
    checkpoint = latest_checkpoint(settings.output)
    assert checkpoint is not None
    done = json.loads((checkpoint / "state.json").read_text())["step"]
    assert done == len(losses(settings.output)) > 10
    train(settings)
    assert losses(settings.output) == losses(uninterrupted)


def test_a_time_budget_counts_training_seconds_over_resumes(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    settings = training_settings(
        tiny_states,
        tiny_target,
        tmp_path / "out",
        num_epochs=100_000,
        time_budget_s=5.0,
        max_length_tokens=33,
    )
    process = start(settings)
    wait_until(lambda: losses(settings.output), process)
    process.send_signal(signal.SIGTERM)
    process.wait()
    interrupted = list(read_metrics(settings.output / "metrics.jsonl"))
    record = train(settings)
    steps = list(read_metrics(settings.output / "metrics.jsonl"))
    assert steps[-2].elapsed_s < 5.0 <= steps[-1].elapsed_s == record.elapsed_s
    assert steps[len(interrupted)].elapsed_s > interrupted[-1].elapsed_s, "the clock goes on, not anew"
    rates = [metrics.learning_rate for metrics in steps]
    share = learning_rate_share(steps[-2].elapsed_s / 5.0, settings.warmup_share, settings.decay)
    assert rates[-1] == pytest.approx(share * settings.peak_learning_rate), (
        "the schedule ends with the budget"
    )
    peak = rates.index(max(rates))
    assert rates == sorted(rates[:peak]) + sorted(rates[peak:], reverse=True), "and never jumps up again"


def test_schedule_warms_up_and_decays() -> None:
    shares = [learning_rate_share(share, 0.1, "linear") for share in (0.05, 0.1, 0.55, 1.0)]
    assert shares == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert learning_rate_share(0.55, 0.1, "cosine") == pytest.approx(0.5)
    assert learning_rate_share(0.3, 0.1, "cosine") > learning_rate_share(0.3, 0.1, "linear")


def test_the_draft_vocabulary_is_what_the_assistant_wrote_and_never_the_mask_token(
    tiny_states: Path, tiny_target: Path, tiny_documents: list[Document]
) -> None:
    target = load_target(tiny_target)
    data = open_training_data(tiny_states, target, 2048, target.mask_token_id)
    counts = torch.bincount(torch.cat([d.input_ids[d.loss_mask] for d in tiny_documents]), minlength=264)
    chosen = data.draft_vocabulary(50)
    assert len(chosen) == 50
    assert counts[chosen].min() >= counts.sort(descending=True).values[50]
    assert target.mask_token_id not in data.draft_vocabulary(263), "also when unseen tokens fill it up"


# Warm start


def warm(
    tiny_states: Path, tiny_target: Path, tiny_drafter: Path, output: Path, **changes: object
) -> TrainSettings:
    return training_settings(tiny_states, tiny_target, output, warm_start=tiny_drafter, **changes)


def test_a_warm_start_continues_and_keeps_the_vocabulary(
    tiny_states: Path, tiny_target: Path, tiny_training: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    record = train(warm(tiny_states, tiny_target, tiny_drafter, tmp_path / "out"))
    assert losses(tmp_path / "out")[0] < 0.8 * losses(tiny_training)[0]
    assert torch.equal(read_result(tmp_path / "out")[1]["d2t"], read_result(tiny_training)[1]["d2t"])
    assert (
        record.warm_start == json.loads((tiny_drafter / "provenance.json").read_text())["drafter"]["digest"]
    )


@pytest.mark.parametrize(
    ("drafter", "named"),
    [
        ({"draft_vocab_size": 100}, "draft_vocab_size"),
        ({"draft_vocab_size": 200, "num_layers": 1}, "num_layers"),
    ],
)
def test_a_warm_start_refuses_another_shape(
    tiny_states: Path,
    tiny_target: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    drafter: dict[str, int],
    named: str,
) -> None:
    with pytest.raises(CheckpointError, match=named):
        train(warm(tiny_states, tiny_target, tiny_drafter, tmp_path / "out", drafter=drafter))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"hidden_size": 32}, "hidden_size"), ({"vocab_size": 280}, "vocab_size"), ({}, "trained for target")],
)
def test_a_warm_start_refuses_another_target(
    tiny_drafter: Path, tiny_documents: list[Document], tmp_path: Path, changes: dict[str, int], named: str
) -> None:
    target = make_target(tmp_path / "target", seed=1, **changes)
    states = write_states(tmp_path / "states", target, tiny_documents)
    with pytest.raises(CheckpointError, match=named):
        train(warm(states, target, tiny_drafter, tmp_path / "out"))


# What is refused


def refused(documents: list[Document], target: Path, tmp_path: Path, **changes: object) -> str:
    states = write_states(tmp_path / "states", target, documents, **changes)
    with pytest.raises(DataError) as caught:
        train(training_settings(states, target, tmp_path / "out"))
    assert not (tmp_path / "out" / "training.json").exists()
    return str(caught.value)


def test_states_of_another_target_are_refused(
    tiny_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    other = make_target(tmp_path / "other", seed=1)
    states = write_states(tmp_path / "states", other, tiny_documents)
    with pytest.raises(DataError, match="states of target"):
        train(training_settings(states, tiny_target, tmp_path / "out"))


def test_states_that_the_disk_has_changed_are_refused(
    tiny_target: Path, tiny_states: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_states, tmp_path / "states"))
    shard = next(copy.glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-40] ^= 1  # same size, same names, one bit of one state
    shard.write_bytes(damaged)
    with pytest.raises(DataError, match="sha256"):
        train(training_settings(copy, tiny_target, tmp_path / "training"))


def test_masks_without_a_one_are_refused(
    tiny_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    blank = [dataclasses.replace(d, loss_mask=torch.zeros_like(d.loss_mask)) for d in tiny_documents]
    assert "all loss masks are 0" in refused(blank, tiny_target, tmp_path)


def test_too_few_supervised_tokens_are_refused(
    tiny_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    assert "24 supervised tokens" in refused(tiny_documents[:1], tiny_target, tmp_path)


def test_a_mask_token_in_use_is_refused(
    tiny_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    ids = tiny_documents[3].input_ids.clone()
    ids[4] = load_target(tiny_target).mask_token_id
    documents = [
        *tiny_documents[:3],
        dataclasses.replace(tiny_documents[3], input_ids=ids),
        *tiny_documents[4:],
    ]
    assert "contains the mask token 263 at token 4" in refused(documents, tiny_target, tmp_path)


def test_states_that_are_not_finite_are_refused(
    tiny_target: Path, tiny_documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tiny_documents[3].final.clone()
    final[5, 1] = float("nan")
    documents = [
        *tiny_documents[:3],
        dataclasses.replace(tiny_documents[3], final=final),
        *tiny_documents[4:],
    ]
    with monkeypatch.context() as patch:  # our own writer refuses them; another might not
        patch.setattr("drafter.shards.check_finite", lambda document, origin: None)
        states = write_states(tmp_path / "states", tiny_target, documents)
    with pytest.raises(DataError, match="final state at token 5"):
        train(training_settings(states, tiny_target, tmp_path / "out"))


def test_a_training_that_diverges_stops_before_it_spoils_the_weights(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(FledgeError, match="lower --peak-learning-rate"):
        train(
            training_settings(
                tiny_states, tiny_target, tmp_path / "out", peak_learning_rate=1e30, num_epochs=3
            )
        )
    assert not (tmp_path / "out" / "training.json").exists()


# EAGLE-3, by the same loop


@pytest.mark.slow
def test_eagle3_asked_to_stop_resumes_to_the_same_losses(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    changes = {**LONG, "algorithm": "eagle3", "checkpoint_interval_s": 1000.0}
    whole = train(training_settings(tiny_states, tiny_target, tmp_path / "whole", **changes))
    settings = training_settings(tiny_states, tiny_target, tmp_path / "out", **changes)
    process = start(settings)
    wait_until(lambda: len(losses(settings.output)) > 10, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 143
    assert 10 < len(losses(settings.output)) < whole.num_steps
    train(settings)
    assert losses(settings.output) == losses(tmp_path / "whole")
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]
