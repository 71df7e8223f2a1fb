"""The served-speed benchmark: its numbers, its table, and once with real servers."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.served_speed import FULL, QUICK, ServedSpeed, median_cells, ratios_of, tables
from drafter.records import Cell
from tests.drafter.synthetic_evaluation import make_cell, make_report
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def cell(speculation: str, k: int, concurrency: int, speed: float) -> Cell:
    drafter = None if speculation == "none" else speculation
    return make_cell(drafter, k, concurrency, speed).model_copy(update={"speculation": speculation})


def cells_of(plain: float, eagle3: tuple[float, float], peagle: tuple[float, float]) -> list[Cell]:
    """One concurrency, K = 3 and 7."""
    speeds = {("none", 0): plain}
    speeds |= {("eagle3", k): speed for k, speed in zip((3, 7), eagle3, strict=True)}
    speeds |= {("peagle", k): speed for k, speed in zip((3, 7), peagle, strict=True)}
    return [cell(speculation, k, 1, speed) for (speculation, k), speed in speeds.items()]


def test_the_median_is_a_measured_cell_of_each_combination() -> None:
    runs = [
        cells_of(50, (60, 40), (80, 70)),
        cells_of(52, (66, 44), (70, 75)),
        cells_of(48, (63, 42), (90, 71)),
    ]
    found = median_cells([make_report(cells, []) for cells in runs])
    assert [one.output_tokens_per_second for one in found] == [50, 63, 42, 80, 71]


def test_ratios_compare_the_best_k_of_each() -> None:
    ratios = {one.over: one.ratio for one in ratios_of(cells_of(50, (60, 40), (72, 90)))}
    assert ratios == {"eagle3": 90 / 60, "none": 90 / 50}


def test_the_table_shows_every_way_its_acceptance_and_the_ratios() -> None:
    cells = tuple(cells_of(50, (60, 40), (72, 90)))
    result = ServedSpeed(
        cells=cells, ratios=ratios_of(cells), repeats=3, machine="two cores", versions={"vllm": "0.32.0"}
    )
    stream = io.StringIO()
    Console(file=stream, width=160).print(tables(result))
    rows = [[part.strip() for part in line.strip("│").split("│")] for line in stream.getvalue().splitlines()]
    assert ["no speculation", "", "", "50"] in rows
    assert ["P-EAGLE / EAGLE-3", "3", "", "1.20x"] in rows
    assert ["P-EAGLE / EAGLE-3", "7", "", "2.25x"] in rows
    assert ["best P-EAGLE / best EAGLE-3", "", "", "1.50x"] in rows
    assert ["best P-EAGLE / no speculation", "", "", "1.80x"] in rows
    assert "two cores; vllm 0.32.0; medians of 3" in stream.getvalue()


def test_the_full_run_measures_what_is_published() -> None:
    assert FULL.num_speculative_tokens == (3, 7, 11)
    assert FULL.concurrency == (1, 4, 8, 32)
    assert FULL.repeats >= 3
    assert set(QUICK.concurrency) < set(FULL.concurrency)


def test_help_says_what_it_does() -> None:
    command = [sys.executable, "-m", "benchmarks.served_speed", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m benchmarks.served_speed" in done.stdout
    assert "--quick" in done.stdout
