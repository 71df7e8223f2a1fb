"""What makes a drafter better at equal cost: trainings that differ in one thing, on the data of a finished run.

    make demo
    python -m benchmarks.ablation
    python -m benchmarks.ablation --training work/training --held-out work/heldout --seconds 600 --repeats 3

Each variant trains as many seconds as the others, on the same states, and is judged by the acceptance length that
`drafter/estimate.py` finds on held-out answers (the greedy answers, walked as decoding does). Rounds go through
all variants before the next seed, so that a machine that slows down slows all of them. Killed, the same command
continues; run again, it prints what was found.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafter.command_line import Verb, run_verbs
from drafter.config import EstimateSettings, ExportSettings, Settings, TrainSettings
from drafter.errors import DataError
from drafter.files import read_record, write_text_atomically
from drafter.machine import describe_machine
from drafter.records import AcceptanceEstimate, Record, TrainingRecord

BASE = "as the run trained"
QUICK_SECONDS = 10.0


@dataclass(frozen=True)
class Variant:
    """One thing that is done otherwise.

    Attributes:
        changes: settings of a training -> those that are other values, nested.
    """

    name: str
    changes: Callable[[TrainSettings], Mapping[str, Any]]


VARIANTS = (
    Variant(BASE, lambda base: {}),
    Variant("two more depths", lambda base: {"num_depths": base.num_depths + 2}),
    Variant("every chain complete", lambda base: {"retention": 1.0}),
    Variant("no weight decay", lambda base: {"weight_decay": 0.0}),
    Variant("one layer", lambda base: {"drafter": {"num_layers": 1}}),
    Variant("four layers", lambda base: {"drafter": {"num_layers": 4}}),
    Variant(
        "half the vocabulary",
        lambda base: {"drafter": {"draft_vocab_size": base.drafter.draft_vocab_size // 2}},
    ),
    Variant(
        "twice the vocabulary",
        lambda base: {"drafter": {"draft_vocab_size": base.drafter.draft_vocab_size * 2}},
    ),
    Variant("an embedding that learns", lambda base: {"drafter": {"train_embedding": True}}),
    Variant("normed residual", lambda base: {"drafter": {"norm_before_residual": True}}),
    Variant("begun at random", lambda base: {"drafter": {"init_from_target": False}}),
)


class AblationSettings(Settings):
    """Which training to vary, and for how long."""

    training: Path | None = Field(
        default=None,
        description="Finished training whose settings and states are the base; None: the newest of FLEDGE_HOME.",
    )
    held_out: Path | None = Field(
        default=None, description="Held-out states to judge on; None: the newest of FLEDGE_HOME."
    )
    seconds: float | None = Field(default=None, gt=0, description="Of training, each; None: as the base had.")
    repeats: int = Field(default=1, ge=1, description="Seeds; the table shows medians.")
    num_speculative_tokens: int = Field(default=3, ge=1, le=32, description="K of the acceptance length.")
    variants: tuple[str, ...] = Field(
        default=(),
        description="Their names, without the base; none: all. " + ", ".join(v.name for v in VARIANTS[1:]),
    )
    quick: bool = Field(
        default=False,
        description="Two variants, ten seconds each. Shows that it works, not what is better.",
    )
    output: Path = Field(
        default=Path(".fledge/benchmarks/ablation"), description="Directory of drafters and results."
    )

    def chosen(self) -> tuple[Variant, ...]:
        """The base first.

        Raises:
            DataError: a name that is none of the variants'.
        """
        known = {variant.name: variant for variant in VARIANTS}
        names = self.variants or tuple(known)[1 : 2 if self.quick else None]
        if unknown := [name for name in names if name not in known]:
            raise DataError(f"variants {unknown}", f"some of {list(known)[1:]}", "correct --variants")
        return (VARIANTS[0], *(known[name] for name in names if name != BASE))


class Row(Record):
    """One variant; medians over the seeds."""

    name: str
    acceptance_length: float = Field(description="Over all held-out answers.")
    per_domain: dict[str, float]
    num_steps: int = Field(description="Optimizer steps in its seconds.")


class Ablation(Record):
    """All variants, the base first."""

    rows: tuple[Row, ...]
    seconds: float
    repeats: int
    num_speculative_tokens: int
    num_answers: int
    states_digest: str
    machine: str


def ablation(settings: AblationSettings) -> Ablation:
    """Train and judge every variant with every seed."""
    base = _base(settings)
    held_out = settings.held_out or _newest("states-evaluation-*", "manifest.json", "--held-out")
    variants = settings.chosen()
    found: dict[str, list[tuple[TrainingRecord, AcceptanceEstimate]]] = {v.name: [] for v in variants}
    for seed in range(settings.repeats):
        for variant in variants:
            print(f"ablation: seed {seed}, {variant.name}", file=sys.stderr)
            found[variant.name].append(_judge(settings, base, variant, seed, held_out))
    training, estimate = found[BASE][0]
    assert base.time_budget_s is not None, "_base sets it"
    return Ablation(
        rows=tuple(_row(name, results) for name, results in found.items()),
        seconds=base.time_budget_s,
        repeats=settings.repeats,
        num_speculative_tokens=settings.num_speculative_tokens,
        num_answers=estimate.num_answers,
        states_digest=training.states_digest,
        machine=describe_machine(),
    )


def _base(settings: AblationSettings) -> TrainSettings:
    """The settings that all variants share but for one thing.

    Raises:
        DataError: no finished training or not its settings, or no time limit in them and no `--seconds`.
    """
    training = settings.training or _newest("training-*", "training.json", "--training")
    base = read_record(TrainSettings, training / "settings.json")
    seconds = QUICK_SECONDS if settings.quick else settings.seconds or base.time_budget_s
    if seconds is None:
        raise DataError(
            f"{training} was trained by epochs, without a time limit",
            "seconds that every variant gets",
            "give --seconds",
        )
    return base.model_copy(update={"time_budget_s": seconds, "warm_start": None})


def _newest(pattern: str, file: str, flag: str) -> Path:
    from tasks.settings import Places

    stages = Places().stages
    found = [path.parent for path in stages.glob(f"{pattern}/{file}")]
    if not found:
        raise DataError(f"no {pattern} in {stages}", "a finished run", f"`make demo` first, or give {flag}")
    return max(found, key=lambda path: (path / file).stat().st_mtime)


def vary(base: TrainSettings, changes: Mapping[str, Any]) -> TrainSettings:
    """`base` with other values; a mapping changes fields of what it names."""
    values = base.model_dump()
    for name, value in changes.items():
        values[name] = {**values[name], **value} if isinstance(value, Mapping) else value
    return TrainSettings.model_validate(values)


def _judge(
    settings: AblationSettings, base: TrainSettings, variant: Variant, seed: int, held_out: Path
) -> tuple[TrainingRecord, AcceptanceEstimate]:
    from drafter.__main__ import run_estimate, run_export, run_train

    name = f"{variant.name.replace(' ', '-')}-seed{seed}-{base.time_budget_s:g}s"
    folder = settings.output / name
    output = {"seed": seed, "output": folder / "training"}
    training = run_train(vary(base, {**variant.changes(base), **output}))
    run_export(ExportSettings(training=folder / "training", target=base.target, output=folder / "drafter"))
    estimate = run_estimate(
        EstimateSettings(
            drafter=folder / "drafter",
            states=held_out,
            target=base.target,
            num_speculative_tokens=settings.num_speculative_tokens,
            output=folder / "estimate.json",
        )
    )
    return training, estimate


def _row(name: str, results: list[tuple[TrainingRecord, AcceptanceEstimate]]) -> Row:
    estimates = [estimate for _, estimate in results]
    return Row(
        name=name,
        acceptance_length=statistics.median(one.acceptance_length for one in estimates),
        per_domain={
            domain: statistics.median(one.per_domain[domain] for one in estimates)
            for domain in estimates[0].per_domain
        },
        num_steps=round(statistics.median(training.num_steps for training, _ in results)),
    )


def _cells(result: Ablation) -> list[list[str]]:
    """Heading and rows of the table, as text."""
    base = result.rows[0]
    domains = list(base.per_domain)
    cells = [["", *domains, "all", "against the base", "steps"]]
    for row in result.rows:
        difference = f"{row.acceptance_length - base.acceptance_length:+.2f}" if row is not base else ""
        lengths = [f"{row.per_domain[domain]:.2f}" for domain in domains]
        cells.append([row.name, *lengths, f"{row.acceptance_length:.2f}", difference, str(row.num_steps)])
    return cells


def _footnote(result: Ablation) -> str:
    return (
        f"Acceptance length at K = {result.num_speculative_tokens} over {result.num_answers} held-out answers; "
        f"{result.seconds:g} s of training each, seeds: {result.repeats}; {result.machine}"
    )


def table(result: Ablation) -> RenderableType:
    """One row a variant."""
    heading, *rows = _cells(result)
    found = Table(*heading, title="acceptance length at equal cost", title_justify="left")
    for column in found.columns[1:]:
        column.justify = "right"
    for row in rows:
        found.add_row(*row)
    return Group(found, Text(_footnote(result)))


def markdown(result: Ablation) -> str:
    """The same for a page."""
    heading, *rows = _cells(result)
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_footnote(result)}.\n"


def show(result: Ablation) -> None:
    from drafter.terminal_report import make_console

    make_console().print(table(result))


def run(settings: AblationSettings) -> Ablation:
    """As `ablation`; the result is kept in `result.json`, the table in `table.md`."""
    result = ablation(settings)
    result.save(settings.output / "result.json")
    write_text_atomically(settings.output / "table.md", markdown(result))
    return result


VERB = Verb(
    "benchmarks.ablation",
    AblationSettings,
    run,
    "Train variants of a finished run's drafter for the same time each, and compare their acceptance lengths.",
    (
        "python -m benchmarks.ablation",
        "python -m benchmarks.ablation --quick",
        'python -m benchmarks.ablation --variants "one layer,no weight decay" --seconds 300 --repeats 3',
    ),
    show=show,
)


def main() -> int:
    return run_verbs("python -m", "", (VERB,), [VERB.name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
