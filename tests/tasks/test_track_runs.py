"""MLflow runs in a real store."""

from __future__ import annotations

from pathlib import Path

from drafter.metrics import FILE_NAME, MetricsWriter, StepMetrics
from drafter.records import AcceptanceEstimate, TrainingRecord
from tasks.retrain_settings import RetrainSettings
from tasks.settings import Places
from tasks.track_runs import close_run, connect, log_training, open_run


def training_with_metrics(directory: Path, num_steps: int) -> TrainingRecord:
    directory.mkdir()
    with MetricsWriter(directory / FILE_NAME) as writer:
        for step in range(1, num_steps + 1):
            writer.append(
                StepMetrics(
                    step=step,
                    epoch=step / 100,
                    elapsed_s=float(step),
                    loss=1 / step,
                    accuracy=(0.5, 0.25),
                    gradient_norm=1,
                    learning_rate=1e-3,
                    tokens_per_s=1000,
                    memory_gb=2,
                )
            )
    return TrainingRecord(
        path=str(directory),
        fingerprint="f",
        states_digest="s",
        target_fingerprint="t",
        num_steps=num_steps,
        num_tokens=1,
        num_epochs=1,
        final_loss=1,
        elapsed_s=9,
        tokens_per_s=1000,
        peak_memory_gb=2,
        warm_start=None,
    )


ESTIMATE = AcceptanceEstimate(
    num_speculative_tokens=3,
    acceptance_length=1.75,
    acceptance_rate_per_position=(0.5, 0.2, 0.05),
    num_steps=10,
    num_answers=2,
    per_domain={},
)


def test_a_repeated_log_adds_nothing(places: Places, tmp_path: Path) -> None:
    run_id = open_run.fn("flow-run-1", "bold-wren", "fingerprint", RetrainSettings())
    training = training_with_metrics(tmp_path / "training", num_steps=200)

    for _ in range(2):
        log_training.fn(run_id, training, ESTIMATE)

    client = connect(places)
    losses = client.get_metric_history(run_id, "training.loss")
    assert [(metric.step, metric.value) for metric in losses] == [(n, 1 / n) for n in range(1, 201)]
    assert client.get_run(run_id).data.metrics["estimate.acceptance_length"] == 1.75
    assert client.get_run(run_id).data.metrics["training.accuracy_depth_1"] == 0.25


def test_a_flow_run_that_is_run_again_keeps_its_mlflow_run(places: Places) -> None:
    first = open_run.fn("flow-run-1", "bold-wren", "fingerprint", RetrainSettings())
    close_run(first, succeeded=False)
    again = open_run.fn("flow-run-1", "bold-wren", "fingerprint", RetrainSettings())
    other = open_run.fn("flow-run-2", "shy-crow", "fingerprint", RetrainSettings())

    assert first == again
    assert first != other
    assert connect(places).get_run(first).info.status == "RUNNING"


def test_parameters_are_every_setting_of_the_run(places: Places) -> None:
    run_id = open_run.fn("flow-run-1", "bold-wren", "fingerprint", RetrainSettings(seed=7))

    run = connect(places).get_run(run_id)
    assert run.data.params["seed"] == "7"
    assert run.data.params["training.num_depths"] == "8"
    assert run.data.tags["fledge.fingerprint"] == "fingerprint"
