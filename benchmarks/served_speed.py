"""Output tokens/s of vLLM without speculation, with EAGLE-3 and with P-EAGLE, on one target, one data set, one machine.

    python -m benchmarks.served_speed --quick

Both drafters learn from the same states for the same time; `drafter/evaluation.py` measures them on held-out
prompts of the domain that trained and on HumanEval, which did not. Every stage is a verb of `python -m
drafter`: killed, the same command continues; run again, it prints what was measured.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafter.command_line import Verb, run_verbs
from drafter.config import (
    Algorithm,
    CandidateSettings,
    DrafterSettings,
    EvaluateSettings,
    ExportSettings,
    ExtractSettings,
    PrepareSettings,
    ServerSettings,
    Settings,
    SourceSettings,
    TrainSettings,
)
from drafter.records import Cell, DatasetRecord, EvaluationReport, Record

MAX_LENGTH_TOKENS = 1024
NAMES: dict[Algorithm, str] = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}


class Sizes(Settings):
    """How much is learned and measured."""

    num_prompts: int
    training_s: float
    num_speculative_tokens: tuple[int, ...]
    concurrency: tuple[int, ...]
    prompts_per_domain: int
    repeats: int


FULL = Sizes(
    num_prompts=1500,
    training_s=900,
    num_speculative_tokens=(3, 7, 11),
    concurrency=(1, 4, 8, 32),
    prompts_per_domain=24,
    repeats=3,
)
QUICK = Sizes(
    num_prompts=200,
    training_s=120,
    num_speculative_tokens=(3,),
    concurrency=(1, 4),
    prompts_per_domain=4,
    repeats=1,
)


class ServedSpeedSettings(Settings):
    """What to measure; without a drafter, both are trained first."""

    quick: bool = Field(
        default=False,
        description="Some ten minutes in place of hours: K=3, concurrency 1 and 4, one measurement, two minutes of "
        "training. Shows that it works, not who wins.",
    )
    target: Path | None = Field(default=None, description="Target model; None: the demo's, made if missing.")
    dataset: Path | None = Field(
        default=None, description="Directory that `prepare` wrote; None: the standard library and HumanEval."
    )
    peagle: Path | None = Field(default=None, description="Exported P-EAGLE drafter; None: trained here.")
    eagle3: Path | None = Field(default=None, description="Exported EAGLE-3 drafter; None: trained here.")
    output: Path = Field(
        default=Path(".fledge/benchmarks/served_speed"),
        description="Directory of data, drafters and results.",
    )
    server: ServerSettings = Field(default_factory=ServerSettings, description="How servers are started.")

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    @property
    def directory(self) -> Path:
        """Quick and full runs have nothing in common."""
        return self.output / ("quick" if self.quick else "full")


class Ratio(Record):
    """P-EAGLE's best K over another way of serving, at one concurrency of one domain."""

    domain: str
    concurrency: int
    over: str = Field(description="`eagle3` at its best K, or `none`.")
    ratio: float


class ServedSpeed(Record):
    """What was measured: each cell the median of `repeats` measurements."""

    cells: tuple[Cell, ...]
    ratios: tuple[Ratio, ...]
    repeats: int
    machine: str
    versions: dict[str, str]


def served_speed(settings: ServedSpeedSettings) -> ServedSpeed:
    """Prepare, extract, train both, measure."""
    target = _target(settings)
    dataset = settings.dataset or _dataset(settings, target)
    candidates = tuple(
        CandidateSettings(
            name=algorithm,
            path=getattr(settings, algorithm) or _drafter(settings, target, dataset, algorithm),
            speculation=algorithm,
        )
        for algorithm in NAMES
    )
    reports = [
        _measure(settings, target, dataset, candidates, repeat) for repeat in range(settings.sizes.repeats)
    ]
    cells = median_cells(reports)
    return ServedSpeed(
        cells=cells,
        ratios=ratios_of(cells),
        repeats=len(reports),
        machine=reports[0].machine,
        versions=reports[0].versions,
    )


# --- stages -----------------------------------------------------------------------------------------


def _target(settings: ServedSpeedSettings) -> Path:
    if settings.target is not None:
        return settings.target
    from examples.smollm2 import ensure_target

    return ensure_target()


def _dataset(settings: ServedSpeedSettings, target: Path) -> Path:
    from drafter.__main__ import run_prepare
    from examples.demo_conversations import write_conversations

    maxima = {"python-stdlib": settings.sizes.num_prompts}
    paths = write_conversations(settings.directory / "conversations", maxima)
    sources = (
        SourceSettings(uri=str(paths["python-stdlib"]), domain="python-stdlib"),
        SourceSettings(uri=str(paths["humaneval"]), domain="humaneval", use="evaluation"),
    )
    output = settings.directory / "dataset"
    run_prepare(
        PrepareSettings(sources=sources, target=target, output=output, max_length_tokens=MAX_LENGTH_TOKENS)
    )
    return output


def _drafter(settings: ServedSpeedSettings, target: Path, dataset: Path, algorithm: Algorithm) -> Path:
    """Train and export; both algorithms get the same states, depths and seconds."""
    from drafter.__main__ import run_export, run_extract, run_train

    states, sizes = settings.directory / "states", settings.sizes
    run_extract(
        ExtractSettings(
            dataset=dataset,
            target=target,
            output=states,
            max_length_tokens=MAX_LENGTH_TOKENS,
            server=settings.server,
        )
    )
    training = settings.directory / f"training-{algorithm}"
    layers = {"num_layers": 2} if algorithm == "peagle" else {}  # EAGLE-3 has one, as published
    run_train(
        TrainSettings(
            algorithm=algorithm,
            states=states,
            target=target,
            output=training,
            drafter=DrafterSettings(draft_vocab_size=8192, **layers),
            num_depths=max(sizes.num_speculative_tokens) + 1,
            max_length_tokens=MAX_LENGTH_TOKENS,
            num_epochs=1000,
            time_budget_s=sizes.training_s,
            decay="cosine",
        )
    )
    output = settings.directory / f"drafter-{algorithm}"
    run_export(ExportSettings(training=training, target=target, output=output))
    return output


def _measure(
    settings: ServedSpeedSettings,
    target: Path,
    dataset: Path,
    candidates: tuple[CandidateSettings, ...],
    repeat: int,
) -> EvaluationReport:
    from drafter.evaluation import evaluate

    sizes = settings.sizes
    domains: dict[str, dict[str, int]] = DatasetRecord.load(dataset / "dataset.json").num_per_domain
    return evaluate(
        EvaluateSettings(
            dataset=dataset,
            target=target,
            output=settings.directory / f"evaluation-{repeat + 1}",
            candidates=candidates,
            num_speculative_tokens=sizes.num_speculative_tokens,
            concurrency=sizes.concurrency,
            prompts_per_domain=sizes.prompts_per_domain,
            full_grid_domains=tuple(domains),
            measure_schedule=False,
            identity_dtypes=(),  # `python -m drafter evaluate` proves it; here only speed is asked for
            server=settings.server,
        )
    )


# --- numbers ----------------------------------------------------------------------------------------


def median_cells(reports: Sequence[EvaluationReport]) -> tuple[Cell, ...]:
    """Of each combination the measured cell in the middle, by output tokens/s."""
    by_repeat = [{_key(cell): cell for cell in report.cells} for report in reports]
    found = []
    for key in by_repeat[0]:
        cells = [cells[key] for cells in by_repeat]
        middle = statistics.median_low(cell.output_tokens_per_second for cell in cells)
        found.append(next(cell for cell in cells if cell.output_tokens_per_second == middle))
    return tuple(found)


def _key(cell: Cell) -> tuple[object, ...]:
    return cell.speculation, cell.num_speculative_tokens, cell.domain, cell.concurrency


def ratios_of(cells: Sequence[Cell]) -> tuple[Ratio, ...]:
    """Best K against best K, and against no speculation."""
    best: dict[tuple[str, str, int], float] = {}
    for cell in cells:
        key = (cell.speculation, cell.domain, cell.concurrency)
        best[key] = max(cell.output_tokens_per_second, best.get(key, 0.0))
    return tuple(
        Ratio(
            domain=domain, concurrency=concurrency, over=over, ratio=speed / best[over, domain, concurrency]
        )
        for (speculation, domain, concurrency), speed in best.items()
        if speculation == "peagle"
        for over in ("eagle3", "none")
    )


def tables(result: ServedSpeed) -> RenderableType:
    """One table a domain: ways of serving by rows, concurrency by columns, ratios below."""
    parts: list[RenderableType] = []
    for domain in dict.fromkeys(cell.domain for cell in result.cells):
        cells = [cell for cell in result.cells if cell.domain == domain]
        levels = sorted({cell.concurrency for cell in cells})
        table = Table(title=f"{domain}: output tokens/s by concurrency", title_justify="left")
        for heading in ("", "K", "AL", *map(str, levels)):
            table.add_column(heading, justify="left" if not heading else "right")
        table.add_row("no speculation", "", "", *_speeds(cells, "none", 0, levels))
        for k in sorted({cell.num_speculative_tokens for cell in cells} - {0}):
            table.add_section()
            for algorithm, name in NAMES.items():
                table.add_row(
                    name, str(k), _acceptance(cells, algorithm, k), *_speeds(cells, algorithm, k, levels)
                )
            table.add_row("P-EAGLE / EAGLE-3", str(k), "", *_ratios_at(cells, k, levels))
        table.add_section()
        for over, name in (
            ("eagle3", "best P-EAGLE / best EAGLE-3"),
            ("none", "best P-EAGLE / no speculation"),
        ):
            found = {
                one.concurrency: one.ratio
                for one in result.ratios
                if (one.domain, one.over) == (domain, over)
            }
            table.add_row(name, "", "", *(f"{found[level]:.2f}x" for level in levels))
        parts.append(table)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    parts.append(Text(f"{result.machine}; {versions}; medians of {result.repeats}"))
    return Group(*parts)


def _speed(cells: Sequence[Cell], speculation: str, k: int, level: int) -> float:
    (speed,) = (
        cell.output_tokens_per_second
        for cell in cells
        if (cell.speculation, cell.num_speculative_tokens, cell.concurrency) == (speculation, k, level)
    )
    return speed


def _speeds(cells: Sequence[Cell], speculation: str, k: int, levels: Sequence[int]) -> list[str]:
    return [f"{_speed(cells, speculation, k, level):.0f}" for level in levels]


def _ratios_at(cells: Sequence[Cell], k: int, levels: Sequence[int]) -> list[str]:
    return [f"{_speed(cells, 'peagle', k, one) / _speed(cells, 'eagle3', k, one):.2f}x" for one in levels]


def _acceptance(cells: Sequence[Cell], speculation: str, k: int) -> str:
    """At the lowest concurrency."""
    own = [c for c in cells if (c.speculation, c.num_speculative_tokens) == (speculation, k)]
    length = min(own, key=lambda cell: cell.concurrency).acceptance_length
    return "-" if length is None else f"{length:.2f}"


def show(result: ServedSpeed) -> None:
    from drafter.terminal_report import make_console

    make_console().print(tables(result))


def run(settings: ServedSpeedSettings) -> ServedSpeed:
    """As `served_speed`; the result is kept in `result.json`."""
    result = served_speed(settings)
    result.save(settings.directory / "result.json")
    return result


VERB = Verb(
    "benchmarks.served_speed",
    ServedSpeedSettings,
    run,
    "Measure serving without speculation, with EAGLE-3 and with P-EAGLE, in vLLM on this machine.",
    (
        "python -m benchmarks.served_speed --quick",
        "python -m benchmarks.served_speed --quick --json",
        "python -m benchmarks.served_speed --target models/my-model --dataset work/dataset "
        "--peagle work/drafter --eagle3 work/eagle3",
    ),
    show=show,
)


def main() -> int:
    return run_verbs("python -m", "", (VERB,), [VERB.name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
