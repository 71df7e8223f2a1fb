"""Train a drafter: the loop, from hidden states to final weights.

Run again with the same settings a finished training returns at once; killed at any moment it continues
from its checkpoint, to the same losses; other settings are refused (see training_directory.py).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import torch

from drafter.chains import sample_chains
from drafter.config import TrainSettings
from drafter.device import choose_device, peak_memory_gb
from drafter.errors import FledgeError
from drafter.files import write_text_atomically
from drafter.initialization import TargetTensors, build_teacher
from drafter.interruption import StopSignals
from drafter.memory_budget import fit_step
from drafter.metrics import FILE_NAME as METRICS_NAME
from drafter.metrics import MetricsWriter, StepMetrics, read_metrics
from drafter.model import DrafterConfig
from drafter.optimization import Optimizer, learning_rate_share
from drafter.packing import PackedBatch
from drafter.preflight import require_fit
from drafter.progress import Progress, track
from drafter.provenance import read_provenance
from drafter.records import StatesRecord, TrainingRecord
from drafter.sampler import PackedSequence, PackingPlan
from drafter.shards import MANIFEST
from drafter.starting_drafter import begin
from drafter.target import Target, load_target
from drafter.training_directory import (
    RECORD_NAME,
    SETTINGS_NAME,
    fingerprint_of,
    finished_training,
    only_trainer_in,
    save_result,
)
from drafter.training_state import (
    Position,
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    raise_if_disk_full,
    remove_checkpoints,
    save_checkpoint,
)
from drafter.two_stream import StepOptions, count_supervised, two_stream_step
from drafter.unrolled import unrolled_step

_STEPS = {"peagle": two_stream_step, "eagle3": unrolled_step}
_RECENT_STEPS = 50  # steps whose mean is reported as the final loss


def train(settings: TrainSettings) -> TrainingRecord:
    """Train to the end, or continue a training that was interrupted.

    Raises:
        DataError: states that cannot be trained on.
        CheckpointError: a target, predecessor or output directory that does not fit.
        SystemExit: 143 after SIGTERM, with a checkpoint written.
    """
    target = load_target(settings.target)
    if settings.warm_start is not None:
        require_fit(settings.warm_start, target)
    states: StatesRecord = StatesRecord.load(settings.states / MANIFEST)
    fingerprint = fingerprint_of(settings, states.digest, target)
    with only_trainer_in(settings.output):
        record = finished_training(settings.output, fingerprint)
        if record is None:
            record = _Training(settings, target, fingerprint).run()
        remove_checkpoints(settings.output)
    return record


class _Training:
    """A training in progress: what it learns from, what is learned, and where it stands."""

    def __init__(self, settings: TrainSettings, target: Target, fingerprint: str) -> None:
        self.settings = settings
        self.device = choose_device(settings.device)
        self.drafter, self.data = begin(settings, target)
        self.drafter.to(self.device)
        self.teacher = build_teacher(
            self.drafter.config,
            self.drafter.draft_ids,
            TargetTensors(target.path),
            getattr(torch, settings.dtype),
            self.device,
        )
        self.optimizer = Optimizer(self.drafter, settings)
        self.options = _step_options(settings, self.drafter.config, self.device)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.plan = PackingPlan(
            self.data.lengths,
            self.data.documents,
            settings.max_length_tokens,
            settings.num_epochs,
            settings.seed,
        )
        self.num_steps = math.ceil(len(self.plan) / settings.sequences_per_step)
        self.position = Position(fingerprint=fingerprint, step=0, sequence=0, elapsed_s=0.0, num_tokens=0)
        self.last_step_s = 0.0

    def run(self) -> TrainingRecord:
        """Resume if there is something to resume, train to the end, write the result."""
        settings = self.settings
        self.resume()
        write_text_atomically(settings.output / SETTINGS_NAME, settings.model_dump_json(indent=2) + "\n")
        try:
            self.take_steps()
            save_result(settings.output, self.drafter)
        except OSError as error:
            raise_if_disk_full(error, settings.output)
            raise
        record = self.record()
        record.save(settings.output / RECORD_NAME)
        return record

    def take_steps(self) -> None:
        """The loop: one optimizer step after the other until data or time end."""
        checkpoint_at = time.monotonic() + self.settings.checkpoint_interval_s
        groups = self.loaded_groups()
        metrics_path = self.settings.output / METRICS_NAME
        with (
            MetricsWriter(metrics_path, self.position.step) as metrics,
            self.progress() as progress,
            StopSignals() as signals,
        ):
            while not self.out_of_time():
                started_at = time.monotonic()
                batches = next(groups, None)
                if batches is None:
                    break
                measured = self.step(batches)
                self.advance(len(batches), measured.num_tokens, time.monotonic() - started_at)
                metrics.append(self.describe(measured))
                self.report(progress, measured)
                if signals.asked:
                    self.checkpoint()
                    print(f"stopped at step {self.position.step} with a checkpoint", file=sys.stderr)
                    signals.stop()
                if time.monotonic() >= checkpoint_at:
                    self.checkpoint()
                    checkpoint_at = time.monotonic() + self.settings.checkpoint_interval_s

    def loaded_groups(self) -> Iterator[list[PackedBatch]]:
        """The packed sequences of each step to come; the next ones are read while these are learned from."""
        sequences = self.plan.from_sequence(self.position.sequence)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-states") as reader:
            waiting: Future[list[PackedBatch]] | None = None
            while group := list(islice(sequences, self.settings.sequences_per_step)):
                following = reader.submit(self.load, group)
                if waiting is not None:
                    yield waiting.result()
                waiting = following
            if waiting is not None:
                yield waiting.result()

    def load(self, group: list[PackedSequence]) -> list[PackedBatch]:
        return [self.data.batch(sequence.documents) for sequence in group]

    def step(self, batches: list[PackedBatch]) -> Measured:
        """Gradients of a few packed sequences, averaged over all their supervised predictions; one update."""
        settings = self.settings
        work = []
        for batch in batches:
            chains = sample_chains(
                batch, settings.num_depths, settings.retention, settings.retention_floor, self.generator
            )
            work.append((batch.to(self.device), chains))
        supervised = torch.stack([count_supervised(batch, chains) for batch, chains in work]).sum(0)
        normalizer = float(supervised.sum())
        take_step = _STEPS[settings.algorithm]
        results = [
            take_step(self.drafter, self.teacher, batch, chains, self.options, normalizer)
            for batch, chains in work
        ]
        loss = float(sum(float(result.loss_sum) for result in results)) / normalizer
        learning_rate = settings.peak_learning_rate * self.learning_rate_share()
        gradient_norm = self.optimizer.step(learning_rate)
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise FledgeError(
                f"step {self.position.step + 1}: loss {loss}, gradient norm {gradient_norm}",
                "finite numbers; the training has diverged",
                "lower --peak-learning-rate or raise --warmup-share, and start in a new output directory",
            )
        correct = torch.stack([result.correct.cpu() for result in results]).sum(0)
        accuracy = (correct / supervised.clamp(min=1)).tolist()
        num_tokens = sum(batch.num_slots for batch, _ in work)
        return Measured(loss, tuple(accuracy), gradient_norm, learning_rate, num_tokens)

    def learning_rate_share(self) -> float:
        """Of the step to come: by steps, at its middle, or by the time budget, where that ends first.

        The time is the step's beginning: a guess at its middle from the last step's length would go to and fro.
        """
        share = (self.position.step + 0.5) / self.num_steps
        if self.settings.time_budget_s is not None:
            share = max(share, self.position.elapsed_s / self.settings.time_budget_s)
        return learning_rate_share(share, self.settings.warmup_share, self.settings.decay)

    def out_of_time(self) -> bool:
        budget_s = self.settings.time_budget_s
        return budget_s is not None and self.position.elapsed_s >= budget_s

    def advance(self, num_sequences: int, num_tokens: int, step_s: float) -> None:
        position = self.position
        self.last_step_s = step_s
        self.position = position.model_copy(
            update={
                "step": position.step + 1,
                "sequence": position.sequence + num_sequences,
                "elapsed_s": position.elapsed_s + step_s,
                "num_tokens": position.num_tokens + num_tokens,
            }
        )

    def describe(self, measured: Measured) -> StepMetrics:
        return StepMetrics(
            step=self.position.step,
            epoch=self.plan.epochs_at(self.position.sequence),
            elapsed_s=self.position.elapsed_s,
            loss=measured.loss,
            accuracy=measured.accuracy,
            gradient_norm=measured.gradient_norm,
            learning_rate=measured.learning_rate,
            tokens_per_s=measured.num_tokens / self.last_step_s,
            memory_gb=peak_memory_gb(self.device),
        )

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Steps, or seconds of the time budget."""
        budget_s = self.settings.time_budget_s
        total, done, unit = self.num_steps, self.position.step, "steps"
        if budget_s is not None:
            total, done, unit = round(budget_s), int(self.position.elapsed_s), "s"
        with track(total, "training", unit) as progress:
            progress.advance(done)
            yield progress

    def report(self, progress: Progress, measured: Measured) -> None:
        seconds = int(self.position.elapsed_s) - int(self.position.elapsed_s - self.last_step_s)
        progress.note(
            f"step {self.position.step}, loss {measured.loss:.3f}, accuracy {measured.accuracy[0]:.3f}"
        )
        progress.advance(1 if self.settings.time_budget_s is None else seconds)

    def checkpoint(self) -> None:
        state = TrainingState(
            self.position, self.drafter.trained_state(), self.optimizer.state(), self.generator.get_state()
        )
        save_checkpoint(self.settings.output, state)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        path = latest_checkpoint(self.settings.output)
        if path is None:
            return
        state = load_checkpoint(path, self.position.fingerprint)
        self.drafter.load_trained_state(state.weights)
        self.optimizer.load_state(state.optimizer)
        self.generator.set_state(state.generator)
        self.position = state.position

    def record(self) -> TrainingRecord:
        position = self.position
        losses = [metrics.loss for metrics in read_metrics(self.settings.output / METRICS_NAME)][
            -_RECENT_STEPS:
        ]
        return TrainingRecord(
            path=str(self.settings.output),
            fingerprint=position.fingerprint,
            states_digest=self.data.states.record.digest,
            dataset_digest=self.data.states.record.dataset_digest,
            target_fingerprint=self.data.target.fingerprint,
            num_steps=position.step,
            num_tokens=position.num_tokens,
            num_epochs=self.plan.epochs_at(position.sequence),
            final_loss=sum(losses) / len(losses),
            elapsed_s=position.elapsed_s,
            tokens_per_s=position.num_tokens / position.elapsed_s,
            peak_memory_gb=peak_memory_gb(self.device),
            warm_start=read_provenance(self.settings.warm_start).drafter.digest
            if self.settings.warm_start
            else None,
        )


def _step_options(settings: TrainSettings, config: DrafterConfig, device: torch.device) -> StepOptions:
    """How steps are cut up: by the memory budget, and what the settings say themselves."""
    options = fit_step(
        config,
        settings.max_length_tokens,
        settings.num_depths,
        getattr(torch, settings.dtype),
        device,
        settings.memory_budget_gb,
    )
    stated = {name: getattr(settings, name) for name in ("chains_per_segment", "rows_per_chunk")}
    return replace(options, **{name: value for name, value in stated.items() if value is not None})


@dataclass(frozen=True)
class Measured:
    """What one optimizer step showed."""

    loss: float
    accuracy: tuple[float, ...]
    gradient_norm: float
    learning_rate: float
    num_tokens: int
