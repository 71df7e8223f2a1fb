"""What a person sees on a run's page in Prefect: the decision, the table of cells, and links to pages."""

from __future__ import annotations

from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from drafter.records import Cell, EvaluationReport, ReleaseDecision
from tasks.find_drafters import RegisteredDrafter
from tasks.settings import Places
from tasks.validate_data import ValidationRecord

HEADINGS = {"approve": "Approved", "reject": "Rejected", "not_enough_evidence": "Not enough evidence"}


def link_validation(validation: ValidationRecord) -> None:
    """Great Expectations' page."""
    create_link_artifact(
        key="validation",
        link=Places().link(Path(validation.page)),
        link_text=f"Great Expectations: {validation.outcome}",
        description=_findings(validation),
    )


def link_release(
    evaluation: EvaluationReport, decision: ReleaseDecision, page: Path, registered: RegisteredDrafter
) -> None:
    """Decision with reasons, every cell, the report and the registered version."""
    places = Places()
    create_markdown_artifact(
        key="decision",
        markdown=decision_markdown(evaluation, decision, registered, places.link(page)),
        description="What the gate decided, and why",
    )
    create_table_artifact(
        key="cells",
        table=[_cell_row(cell) for cell in evaluation.cells],
        description="Everything that was measured",
    )
    create_link_artifact(
        key="report", link=places.link(page), link_text="Report", description=f"File: `{page}`"
    )
    version = places.version_link(registered.version)
    if version is not None:
        create_link_artifact(key="mlflow-version", link=version, link_text=registered.uri)


def decision_markdown(
    evaluation: EvaluationReport, decision: ReleaseDecision, registered: RegisteredDrafter, report: str
) -> str:
    """The decision as a page of its own."""
    lines = [f"# {HEADINGS[decision.outcome]}: `{registered.uri}`", ""]
    lines += [f"- {reason}" for reason in decision.reasons]
    lines += ["", *_speed_table(evaluation), "", f"Report: <{report}>", ""]
    if decision.approved:
        lines += ["It is `challenger` now."]
    if decision.advice is not None:
        lines += [f"How to serve it: {decision.advice.sentence}"]
    return "\n".join(lines)


def _speed_table(evaluation: EvaluationReport) -> list[str]:
    """Output tokens/s of the challenger beside no speculation, per domain, concurrency and K."""
    plain = {
        (cell.domain, cell.concurrency): cell.output_tokens_per_second
        for cell in evaluation.cells
        if cell.speculation == "none"
    }
    lines = [
        "| domain | concurrency | K | acceptance length | tokens/s | no speculation | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in evaluation.cells:
        baseline = plain.get((cell.domain, cell.concurrency))
        if cell.drafter != "challenger" or not baseline:
            continue
        lines.append(
            f"| {cell.domain} | {cell.concurrency} | {cell.num_speculative_tokens} "
            f"| {_number(cell.acceptance_length, 2)} | {cell.output_tokens_per_second:.1f} | {baseline:.1f} "
            f"| {cell.output_tokens_per_second / baseline:.2f} |"
        )
    return lines


def _cell_row(cell: Cell) -> dict[str, str]:
    return {
        "drafter": cell.drafter or "no speculation",
        "K": str(cell.num_speculative_tokens or ""),
        "concurrency": str(cell.concurrency),
        "domain": cell.domain,
        "acceptance length": _number(cell.acceptance_length, 2),
        "accepted per position": " ".join(f"{rate:.2f}" for rate in cell.acceptance_rate_per_position),
        "tokens/s": f"{cell.output_tokens_per_second:.1f}",
        "TTFT ms": f"{cell.ttft_ms:.0f}",
        "TPOT ms": f"{cell.tpot_ms:.1f}",
    }


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _findings(validation: ValidationRecord) -> str:
    lines = [f"{validation.num_conversations} conversations, {len(validation.findings)} checks"]
    lines += [
        f"- **{finding.check}** {finding.outcome} ({finding.severity}): {finding.detail}"
        for finding in validation.problems
    ]
    return "\n".join([*lines, "", f"File: `{validation.page}`"])
