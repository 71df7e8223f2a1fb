"""What was measured and decided, as tables on a terminal. The HTML page is in `drafter/report.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafter.records import Cell, EvaluationReport, ReleaseDecision

OUTCOMES = {
    "approve": ("approved", "bold green"),
    "reject": ("rejected", "bold red"),
    "not_enough_evidence": ("not enough evidence", "bold yellow"),
}


def show_evaluation(report: EvaluationReport, console: Console | None = None) -> None:
    """Print speed and acceptance, domain by domain."""
    (console or make_console()).print(evaluation_tables(report))


def make_console() -> Console:
    """The terminal, at its own width; into a file or a log, wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else 120)


def evaluation_tables(report: EvaluationReport) -> RenderableType:
    """For each domain: tokens/s by concurrency beside no speculation, and acceptance by K."""
    domains = sorted({cell.domain for cell in report.cells}, key=lambda name: _order(report, name))
    parts: list[RenderableType] = []
    for domain in domains:
        known = "trained on" if domain in report.train_domains else "never seen in training"
        parts.append(Text(f"\n{domain} ({known})", style="bold"))
        parts.append(_speed_table([cell for cell in report.cells if cell.domain == domain]))
        if any(row.domain == domain for row in report.acceptance):
            parts.append(_acceptance_table(report, domain))
    parts.append(_identity_text(report))
    return Group(*parts)


def decision_text(decision: ReleaseDecision) -> Text:
    """Outcome and reasons, one a line, and how to serve it."""
    name, style = OUTCOMES[decision.outcome]
    text = Text("decision: ").append(name, style=style)
    if decision.num_speculative_tokens is not None:
        text.append(f", K={decision.num_speculative_tokens} measured best")
    for reason in decision.reasons:
        text.append(f"\n  - {reason}")
    if decision.advice is not None:
        text.append("\nserving: ", style="bold").append(decision.advice.sentence)
    return text


def columns_of(cells: Iterable[Cell]) -> list[tuple[str, int]]:
    """Drafter and K of each column, challenger first."""
    found = {(cell.drafter, cell.num_speculative_tokens) for cell in cells if cell.drafter is not None}
    return sorted(found, key=lambda column: (column[0] != "challenger", column))


def _speed_table(cells: list[Cell]) -> Table:
    columns = columns_of(cells)
    several = len({name for name, _ in columns}) > 1
    table = Table(title="output tokens/s", title_justify="left")
    table.add_column("concurrency", justify="right")
    headings = {(cell.drafter, cell.num_speculative_tokens): cell.column for cell in cells}
    for column in columns:
        heading = headings[column]
        table.add_column(f"{column[0]} {heading}" if several else heading, justify="right")
    table.add_column("no speculation", justify="right")
    table.add_column("ratio", justify="right")
    for concurrency in sorted({cell.concurrency for cell in cells}):
        speed = {
            (cell.drafter, cell.num_speculative_tokens): cell.output_tokens_per_second
            for cell in cells
            if cell.concurrency == concurrency
        }
        table.add_row(
            str(concurrency),
            *(_number(speed.get(column)) for column in columns),
            _number(speed.get((None, 0))),
            _ratio([speed[column] for column in columns if column in speed], speed.get((None, 0))),
        )
    return table


def _acceptance_table(report: EvaluationReport, domain: str) -> Table:
    table = Table(title="acceptance length (interval over prompts)", title_justify="left")
    for heading in ("drafter", "K", "AL", "interval", "prompts", "accepted at 1, 2, ..."):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for row in report.acceptance:
        if row.domain == domain and row.length_bucket == "all":
            table.add_row(
                row.drafter,
                str(row.num_speculative_tokens),
                f"{row.acceptance_length:.2f}",
                f"{row.lower:.2f} to {row.upper:.2f}",
                str(row.num_prompts),
                _rates(report, row.drafter, row.num_speculative_tokens, domain),
            )
    return table


def _rates(report: EvaluationReport, drafter: str, k: int, domain: str) -> str:
    """Acceptance per position at the lowest concurrency that was measured."""
    cells = [
        cell
        for cell in report.cells
        if (cell.drafter, cell.num_speculative_tokens, cell.domain) == (drafter, k, domain)
    ]
    if not cells:
        return "-"
    cell = min(cells, key=lambda cell: cell.concurrency)
    return ", ".join(f"{rate:.2f}" for rate in cell.acceptance_rate_per_position)


def _identity_text(report: EvaluationReport) -> Text:
    text = Text()
    for drafter, shares in report.greedy_identical_share.items():
        for dtype, share in shares.items():
            text.append(f"\n{drafter}: {share:.0%} of greedy answers in {dtype} identical to no speculation")
    return text


def _order(report: EvaluationReport, domain: str) -> tuple[bool, str]:
    return domain not in report.train_domains, domain


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _ratio(with_drafter: list[float], without: float | None) -> str:
    """The best column over no speculation; below 1 speculation costs."""
    if not with_drafter or not without:
        return "-"
    ratio = max(with_drafter) / without
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}x[/]"
