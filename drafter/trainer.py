"""Train a drafter: the loop, from hidden states to final weights, in one process or in several ranks.

Run again with the same settings a finished training returns at once; killed at any moment it continues
from its checkpoint, to the same losses; other settings are refused (see training_directory.py).
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice

import torch

from drafter.config import TrainSettings
from drafter.device import peak_memory_gb
from drafter.distributed import Ranks, joined
from drafter.errors import FledgeError
from drafter.files import write_text_atomically
from drafter.initialization import TargetTensors, build_teacher
from drafter.interruption import StopSignals
from drafter.memory_budget import fit_step
from drafter.metrics import FILE_NAME as METRICS_NAME
from drafter.metrics import MetricsWriter, StepMetrics, read_metrics
from drafter.model import DrafterConfig
from drafter.optimization import Optimizer, learning_rate_share
from drafter.preflight import require_fit
from drafter.progress import Progress, track
from drafter.provenance import read_provenance
from drafter.records import StatesRecord, TrainingRecord
from drafter.sampler import PackingPlan
from drafter.shards import MANIFEST
from drafter.starting_drafter import begin
from drafter.step_gradients import StepGradients
from drafter.step_work import StepLoader, StepWork
from drafter.target import Target, load_target
from drafter.training_data import check_teacher
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
from drafter.two_stream import StepOptions

_RECENT_STEPS = 50  # steps whose mean is reported as the final loss


def train(settings: TrainSettings) -> TrainingRecord:
    """Train to the end, or continue a training that was interrupted.

    Raises:
        DataError: states that cannot be trained on.
        CheckpointError: a target, predecessor or output directory that does not fit.
        FledgeError: a training that diverges; under torchrun, a rank that was lost.
        SystemExit: 143 after SIGTERM, with a checkpoint written.
    """
    target = load_target(settings.target)
    if settings.warm_start is not None:
        require_fit(settings.warm_start, target)
    states: StatesRecord = StatesRecord.load(settings.states / MANIFEST)
    fingerprint = fingerprint_of(settings, states.digest, target)
    with (
        joined(settings) as ranks,
        only_trainer_in(settings.output) if ranks.is_first else nullcontext(),
    ):
        ranks.require_same(int(fingerprint[:12], 16), "the fingerprint of the training")
        record = finished_training(settings.output, fingerprint)
        if record is None:
            record = _Training(settings, target, fingerprint, ranks).run()
        if ranks.is_first:
            remove_checkpoints(settings.output)
    return record


class _Training:
    """A training in progress: what it learns from, what is learned, and where it stands."""

    def __init__(self, settings: TrainSettings, target: Target, fingerprint: str, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.device = ranks.device
        self.drafter, self.data = begin(settings, target)
        self.position = Position(fingerprint=fingerprint, step=0, sequence=0, elapsed_s=0.0, num_tokens=0)
        self.generator = torch.Generator().manual_seed(settings.seed)
        state = self.resume()
        self.drafter.to(self.device)
        teacher = build_teacher(
            self.drafter.config,
            self.drafter.draft_ids,
            TargetTensors(target.path),
            getattr(torch, settings.dtype),
            self.device,
        )
        if ranks.is_first:  # what it finds is the same on every rank, and said once
            check_teacher(teacher, self.drafter.draft_ids, self.data)
        ranks.place(self.drafter)
        self.optimizer = Optimizer(self.drafter, settings)
        if state is not None:
            self.optimizer.load_state(state.optimizer)
        options = _step_options(settings, self.drafter.config, ranks)
        self.gradients = StepGradients(self.drafter, teacher, settings, options, ranks)
        self.loader = StepLoader(self.data, self.drafter.config, settings, ranks.rank, ranks.size)
        self.plan = PackingPlan(
            self.data.lengths,
            self.data.documents,
            settings.max_length_tokens,
            settings.num_epochs,
            settings.seed,
        )
        self.num_steps = math.ceil(len(self.plan) / settings.sequences_per_step)
        self.last_step_s = 0.0

    def run(self) -> TrainingRecord:
        """Train to the end and write the result."""
        output = self.settings.output
        try:
            if self.ranks.is_first:
                text = self.settings.model_dump_json(indent=2) + "\n"
                write_text_atomically(output / SETTINGS_NAME, text)
            self.take_steps()
            weights = self.ranks.whole(self.drafter.trained_state())
            if self.ranks.is_first:
                save_result(output, self.drafter.config, weights)
                self.record().save(output / RECORD_NAME)
        except OSError as error:
            raise_if_disk_full(error, output)
            raise
        self.ranks.wait()
        record: TrainingRecord = TrainingRecord.load(output / RECORD_NAME)
        return record

    def take_steps(self) -> None:
        """The loop: one optimizer step after the other until data or time end."""
        checkpoint_at = time.monotonic() + self.settings.checkpoint_interval_s
        steps = self.loaded_steps()
        with self.reporting() as report, StopSignals() as signals:
            while not self.out_of_time():
                started_at = time.monotonic()
                work = next(steps, None)
                if work is None:
                    break
                measured = self.step(work)
                if self.ranks.has_lost_launcher:
                    signals.asked = signal.SIGTERM
                now = time.monotonic()
                # The slowest rank's time is everyone's, and what one rank is asked for all of them do.
                step_s, asked, is_due = self.ranks.largest(
                    now - started_at, signals.asked or 0, now >= checkpoint_at
                )
                self.advance(work, step_s)
                report(measured)
                if asked:
                    signals.asked = signal.Signals(int(asked))
                    self.checkpoint()
                    if self.ranks.is_first:
                        print(f"stopped at step {self.position.step} with a checkpoint", file=sys.stderr)
                    signals.stop()
                if is_due:
                    self.checkpoint()
                    checkpoint_at = time.monotonic() + self.settings.checkpoint_interval_s

    def loaded_steps(self) -> Iterator[StepWork]:
        """The steps to come; the next one is read while this one is learned from."""
        sequences = self.plan.from_sequence(self.position.sequence)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-states") as reader:
            waiting: Future[StepWork] | None = None
            while group := list(islice(sequences, self.settings.sequences_per_step)):
                following = reader.submit(self.loader.load, group)
                if waiting is not None:
                    yield waiting.result()
                waiting = following
            if waiting is not None:
                yield waiting.result()

    def step(self, work: StepWork) -> Measured:
        """Gradients of a few packed sequences, averaged over all their supervised predictions; one update."""
        settings = self.settings
        result = self.gradients.of(work, self.generator)
        loss = float(result.loss_sum) / int(result.supervised.sum())
        learning_rate = settings.peak_learning_rate * self.learning_rate_share()
        gradient_norm = self.optimizer.step(learning_rate)
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise FledgeError(
                f"step {self.position.step + 1}: loss {loss}, gradient norm {gradient_norm}",
                "finite numbers; the training has diverged",
                "lower --peak-learning-rate or raise --warmup-share, and start in a new output directory",
            )
        accuracy = (result.correct / result.supervised.clamp(min=1)).tolist()
        return Measured(loss, tuple(accuracy), gradient_norm, learning_rate, work.num_slots)

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

    def advance(self, work: StepWork, step_s: float) -> None:
        position = self.position
        self.last_step_s = step_s
        self.position = position.model_copy(
            update={
                "step": position.step + 1,
                "sequence": position.sequence + work.num_sequences,
                "elapsed_s": position.elapsed_s + step_s,
                "num_tokens": position.num_tokens + work.num_slots,
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
    def reporting(self) -> Iterator[Callable[[Measured], None]]:
        """What to tell of each step, to the metrics and to the reader: the first rank speaks for all."""
        if not self.ranks.is_first:
            yield lambda measured: None
            return
        path = self.settings.output / METRICS_NAME
        with MetricsWriter(path, self.position.step) as metrics, self.progress() as progress:

            def report(measured: Measured) -> None:
                metrics.append(self.describe(measured))
                self.show(progress, measured)

            yield report

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

    def show(self, progress: Progress, measured: Measured) -> None:
        seconds = int(self.position.elapsed_s) - int(self.position.elapsed_s - self.last_step_s)
        progress.note(
            f"step {self.position.step}, loss {measured.loss:.3f}, accuracy {measured.accuracy[0]:.3f}"
        )
        progress.advance(1 if self.settings.time_budget_s is None else seconds)

    def checkpoint(self) -> None:
        """Whole, however many ranks there are: any number of them can go on from it."""
        weights = self.ranks.whole(self.drafter.trained_state())
        moments = {name: self.ranks.whole(entries) for name, entries in self.optimizer.state().items()}
        if self.ranks.is_first:
            state = TrainingState(self.position, weights, moments, self.generator.get_state())
            save_checkpoint(self.settings.output, state)

    def resume(self) -> TrainingState | None:
        """Stand where the newest checkpoint stands, if there is one; the optimizer is made after that."""
        path = latest_checkpoint(self.settings.output)
        state = load_checkpoint(path, self.position.fingerprint) if path else None
        if state is not None:
            self.drafter.load_trained_state(state.weights)
            self.generator.set_state(state.generator)
            self.position = state.position
        self.ranks.require_same(self.position.step, "the step of the newest checkpoint")
        return state

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


def _step_options(settings: TrainSettings, config: DrafterConfig, ranks: Ranks) -> StepOptions:
    """How steps are cut up: by the memory budget, and what the settings say themselves."""
    options = fit_step(
        config,
        settings.max_length_tokens,
        settings.num_depths,
        getattr(torch, settings.dtype),
        ranks.device,
        settings.memory_budget_gb,
        1 if ranks.device.type == "cuda" else ranks.num_local,
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
