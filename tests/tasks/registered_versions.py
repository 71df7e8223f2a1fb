"""Versions in a real MLflow registry whose figures are written down here instead of measured."""

from __future__ import annotations

from pathlib import Path

from drafter.provenance import read_provenance
from drafter.records import AcceptanceSummary, Cell, EvaluationReport, ReleaseDecision
from drafter.serving_advice import advise
from tasks.promotion import read_version
from tasks.register_drafter import Candidate, register_drafter
from tasks.settings import Places
from tasks.track_runs import connect, experiment_id
from tasks.version_record import VersionRecord
from tests.tasks.drafters_on_disk import APPROVED, evaluation_of, export_drafter

K = 3


def summary(
    drafter: str, domain: str, acceptance_length: float, length_bucket: str = "all"
) -> AcceptanceSummary:
    """An acceptance length with an interval of a tenth to each side."""
    return AcceptanceSummary(
        drafter=drafter,
        num_speculative_tokens=K,
        domain=domain,
        length_bucket=length_bucket,
        num_prompts=24,
        acceptance_length=acceptance_length,
        lower=acceptance_length - 0.1,
        upper=acceptance_length + 0.1,
    )


def cell(drafter: str | None, domain: str, output_tokens_per_second: float, concurrency: int = 1) -> Cell:
    """A measured speed."""
    return Cell(
        speculation="peagle" if drafter else "none",
        drafter=drafter,
        num_speculative_tokens=K if drafter else 0,
        concurrency=concurrency,
        domain=domain,
        num_requests=8,
        output_tokens=800,
        acceptance_length=None,
        acceptance_rate_per_position=(),
        output_tokens_per_second=output_tokens_per_second,
        ttft_ms=50,
        tpot_ms=12,
    )


def measured(report: EvaluationReport) -> EvaluationReport:
    """The report with figures: fast on code, where it learned; slow on general questions."""
    report = report.model_copy(
        update={
            "acceptance": (
                summary("challenger", "code", 1.86),
                summary("challenger", "code", 1.9, "<=256"),
                summary("challenger", "general", 1.09),
                summary("champion", "code", 1.74),
            ),
            "cells": (
                cell(None, "code", 58.0),
                cell("challenger", "code", 72.0),
                cell("champion", "code", 67.0),
                cell("challenger", "code", 162.0, concurrency=4),
                cell(None, "code", 176.0, concurrency=4),
                cell("challenger", "general", 44.0),
            ),
        }
    )
    report.save(Path(report.path) / "evaluation.json")
    return report


def register_version(
    places: Places, directory: Path, name: str = "a", decision: ReleaseDecision = APPROVED
) -> VersionRecord:
    """Register a drafter whose weights and fingerprint are those of its one-letter name."""
    client = connect(places)
    run = client.create_run(experiment_id(client, places))
    files = directory / f"drafter-{name}"
    if not files.exists():
        export_drafter(files, "target0", weight=float(ord(name)))
    drafter = read_provenance(files).drafter
    evaluation = measured(evaluation_of(drafter, directory / f"evaluation-{name}"))
    (Path(evaluation.path) / "report.html").write_text("<p>a report</p>")
    registered = register_drafter.fn(
        Candidate(
            drafter=drafter,
            fingerprint=f"fingerprint-{name}",
            attempt="first",
            run_id=run.info.run_id,
            evaluation=evaluation,
            decision=decision.model_copy(
                update={"advice": advise(evaluation, "challenger", evaluation.train_domains, 1)}
            ),
        )
    )
    return read_version(registered.version)
