"""The metrics stream: one whole line a step, whatever happened to its writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.metrics import MetricsWriter, StepMetrics, read_metrics


def metrics(step: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        epoch=0.1 * step,
        elapsed_s=1.5 * step,
        loss=loss,
        accuracy=(0.5, 0.25),
        gradient_norm=0.1,
        learning_rate=1e-3,
        tokens_per_s=1000.0,
        memory_gb=0.5,
    )


def write(path: Path, steps: range, after_step: int = 0) -> None:
    with MetricsWriter(path, after_step) as writer:
        for step in steps:
            writer.append(metrics(step))


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.append(metrics(1, loss=0.1 + 0.2))
        assert [m.loss for m in read_metrics(path)] == [0.1 + 0.2], "a reader sees a step at once"


def test_a_resume_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 9))
    write(path, range(6, 11), after_step=5)
    assert [m.step for m in read_metrics(path)] == list(range(1, 11))


def test_a_new_start_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 5))
    write(path, range(1, 3))
    assert [m.step for m in read_metrics(path)] == [1, 2]


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    path.write_text(path.read_text()[:-20])
    assert [m.step for m in read_metrics(path)] == [1, 2]
    write(path, range(3, 5), after_step=3)
    assert [m.step for m in read_metrics(path)] == [1, 2, 3, 4]


def test_a_missing_file_is_an_empty_stream(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


def test_a_loss_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer, pytest.raises(ValueError, match="JSON"):
        writer.append(metrics(1, loss=float("nan")))
