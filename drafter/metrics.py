"""The stream of training metrics: one JSON object a step, one step a line.

MLflow logging, the progress bar and the loss plot read the same file. After a resume it holds each
step once: what a killed run wrote beyond its last checkpoint is cut off before training goes on.
No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import Field, ValidationError

from drafter.files import write_text_atomically
from drafter.records import Record

FILE_NAME = "metrics.jsonl"


class StepMetrics(Record):
    """One line of `metrics.jsonl`: one optimizer step."""

    step: int = Field(description="From 1.")
    epoch: float = Field(description="Passes over the data after this step.")
    elapsed_s: float = Field(
        description="Training seconds, over all resumes; checkpoints and start-up left out."
    )
    loss: float = Field(description="KL(target || drafter) per supervised prediction, nats.")
    accuracy: tuple[float, ...] = Field(
        description="Per depth: share of predictions equal to the target's greedy token."
    )
    gradient_norm: float = Field(description="Before clipping.")
    learning_rate: float
    tokens_per_s: float = Field(description="Depth-0 slots per second in this step.")
    memory_gb: float = Field(description="Peak resident memory of the process (GPU: of the device), GiB.")


class MetricsWriter:
    """Append steps to a metrics file; use as a context manager.

    Args:
        path: the file.
        after_step: last step that the checkpoint knows; later lines are dropped (0: all of them).
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        kept = [metrics for metrics in read_metrics(path) if metrics.step <= after_step]
        write_text_atomically(path, "".join(_line(metrics) for metrics in kept))
        self._handle = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle.close()

    def append(self, metrics: StepMetrics) -> None:
        """Write one step. A reader sees it at once."""
        self._handle.write(_line(metrics))
        self._handle.flush()


def read_metrics(path: Path) -> Iterator[StepMetrics]:
    """Yield the steps of a metrics file, also while it is being written.

    A last line that is not whole (its writer was killed, or is writing) ends the stream; a missing
    file is an empty one.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8") as handle:
        for line in handle:
            try:
                yield StepMetrics.model_validate_json(line)
            except ValidationError:
                return


def _line(metrics: StepMetrics) -> str:
    return json.dumps(metrics.model_dump(mode="json"), allow_nan=False) + "\n"
