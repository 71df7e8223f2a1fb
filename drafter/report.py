"""The evaluation as one self-contained HTML page, and as JSON for scripts. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.files import write_text_atomically
from drafter.gate import LABELS
from drafter.metrics import read_metrics
from drafter.records import AcceptanceSummary, Cell, EvaluationReport, ReleaseDecision
from drafter.serving_advice import NOISE, ratio_to_plain
from drafter.statistics import ALL_LENGTHS

_TEMPLATES = Path(__file__).parent / "templates"
_CHAMPION = "champion"
_OUTCOMES = {
    "approve": ("Approved", "The challenger may be released, once a person agrees."),
    "reject": ("Rejected", "The challenger must not be released."),
    "not_enough_evidence": ("Not enough evidence", "What was measured does not carry a decision either way."),
}


@dataclass(frozen=True)
class Reason:
    """One finding of the gate."""

    verdict: str
    label: str
    text: str


@dataclass(frozen=True)
class Headline:
    """One number at the top of the page."""

    value: str
    label: str
    detail: str
    tone: str = ""


@dataclass(frozen=True)
class Speed:
    """One entry of the speed table."""

    tokens_per_s: float | None
    ratio: float | None

    @property
    def tone(self) -> str:
        """`bad` where speculation loses, `good` where it clearly gains."""
        if self.ratio is None:
            return ""
        return "bad" if self.ratio < 1 else "good" if self.ratio >= 1 + NOISE else "even"


@dataclass(frozen=True)
class SpeedTable:
    """OTPS of one domain: rows are concurrency, columns drafter and K, then no speculation and the best ratio."""

    domain: str
    trained: bool
    columns: tuple[str, ...]
    rows: tuple[tuple[int, tuple[Speed, ...], float | None, Speed], ...]


def write_report(
    evaluation: EvaluationReport,
    decision: ReleaseDecision,
    training_metrics: Path | None,
    provenance: Mapping[str, Any],
    output: Path,
    candidate: str | None = None,
) -> Path:
    """Write the page and return its path.

    Args:
        training_metrics: `metrics.jsonl` of the training; None leaves the training out.
        provenance: nested names and values, shown as they are.
        output: the HTML file.
        candidate: the drafter that the decision is about; None takes `challenger`, else the first one.
    """
    import jinja2

    from drafter import plots

    name = candidate or default_candidate(evaluation)
    steps = list(read_metrics(training_metrics)) if training_metrics is not None else []
    figures = {
        "positions": plots.acceptance_per_position(_position_curves(evaluation, name)),
        "speedup": plots.speedup_over_concurrency(_speedup_curves(evaluation, name)),
        "lengths": plots.acceptance_ranges(_ranges(evaluation, name)) if evaluation.acceptance else "",
        "loss": plots.training_loss(steps) if steps else "",
        "accuracy": plots.training_accuracy(steps) if steps else "",
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    outcome, meaning = _OUTCOMES[decision.outcome]
    page = environment.get_template("report.html.j2").render(
        evaluation=evaluation,
        candidate=name,
        outcome=outcome,
        outcome_key=decision.outcome,
        meaning=meaning,
        reasons=_reasons(decision),
        advice=decision.advice,
        headlines=tuple(_headlines(evaluation, decision, name)),
        tables=tuple(_speed_tables(evaluation, name)),
        buckets=[one for one in evaluation.acceptance if one.length_bucket != ALL_LENGTHS],
        overall=[one for one in evaluation.acceptance if one.length_bucket == ALL_LENGTHS],
        figures={key: _Markup(svg) for key, svg in figures.items()},
        last_step=steps[-1] if steps else None,
        provenance=tuple(_flatten(provenance)),
    )
    write_text_atomically(output, page)
    return output


class _Markup(str):
    """SVG of our own making, exempt from escaping (jinja's protocol for safe text)."""

    def __html__(self) -> str:
        return self


def report_as_json(
    evaluation: EvaluationReport,
    decision: ReleaseDecision,
    registry_uri: str | None,
    provenance: Mapping[str, Any],
    candidate: str | None = None,
) -> dict[str, Any]:
    """The evaluation for scripts: decision, serving advice, registry URI, cells, identity, provenance."""
    name = candidate or default_candidate(evaluation)
    return {
        "decision": decision.model_dump(mode="json", exclude={"advice"}),
        "serving_advice": decision.advice and decision.advice.model_dump(mode="json"),
        "registry_uri": registry_uri,
        "candidate": name,
        "cells": [cell.model_dump(mode="json") for cell in evaluation.cells],
        "acceptance": [summary.model_dump(mode="json") for summary in evaluation.acceptance],
        "greedy_identical_share": dict(evaluation.greedy_identical_share.get(name or "", {})),
        "train_domains": list(evaluation.train_domains),
        "provenance": {
            **provenance,
            "evaluation_digest": evaluation.digest,
            "dataset_digest": evaluation.dataset_digest,
            "target_fingerprint": evaluation.target_fingerprint,
            "drafters": evaluation.drafters,
            "machine": evaluation.machine,
            "versions": evaluation.versions,
        },
    }


def default_candidate(evaluation: EvaluationReport) -> str | None:
    """`challenger` if it was measured, else the first drafter that is not the champion."""
    names = list(evaluation.drafters)
    if "challenger" in names:
        return "challenger"
    return next((name for name in names if name != _CHAMPION), names[0] if names else None)


# --- words and numbers ------------------------------------------------------------------------------


def _reasons(decision: ReleaseDecision) -> tuple[Reason, ...]:
    """Split the gate's label off each reason."""
    verdicts = {label: verdict for verdict, label in LABELS.items()}
    found = []
    for text in decision.reasons:
        label, _, rest = text.partition(": ")
        if label in verdicts:
            found.append(Reason(verdicts[label], label, rest[:1].upper() + rest[1:]))
        else:
            found.append(Reason("note", "", text))
    return tuple(found)


def _headlines(
    evaluation: EvaluationReport, decision: ReleaseDecision, name: str | None
) -> Iterator[Headline]:
    k = decision.num_speculative_tokens
    domains = _ordered_domains(evaluation)
    for domain in domains[:1]:
        for summary in _summaries(evaluation, name, domain, k):
            interval = f"{summary.lower:.2f} to {summary.upper:.2f} over {summary.num_prompts} prompts"
            yield Headline(
                f"{summary.acceptance_length:.2f}", f"acceptance length on {domain}", f"{interval}, K={k}"
            )
    for domain in domains:
        cells = [
            c
            for c in evaluation.cells
            if (c.drafter, c.num_speculative_tokens, c.domain) == (name, k, domain)
        ]
        for cell in sorted(cells, key=lambda one: one.concurrency)[:1]:
            ratio = ratio_to_plain(evaluation, cell)
            if ratio is None:
                continue
            seen = "" if domain in evaluation.train_domains else ", a domain it never saw"
            detail = (
                f"{cell.output_tokens_per_second:.0f} tokens/s, {cell.concurrency} request at a time{seen}"
            )
            if cell.concurrency > 1:
                detail = detail.replace("request at a time", "requests at a time")
            tone = Speed(None, ratio).tone
            yield Headline(f"{ratio:.2f}×", f"speed on {domain}", detail, tone)
    share = evaluation.greedy_identical_share.get(name or "", {}).get("float32")
    if share is not None:
        detail = "of greedy answers in float32 unchanged by the drafter"
        yield Headline(f"{share:.0%}", "identical output", detail, "good" if share == 1 else "bad")


def _ordered_domains(evaluation: EvaluationReport) -> list[str]:
    """Domains as measured, those that trained first."""
    measured = dict.fromkeys(cell.domain for cell in evaluation.cells)
    return sorted(measured, key=lambda domain: domain not in evaluation.train_domains)


def _summaries(
    evaluation: EvaluationReport, name: str | None, domain: str, k: int | None
) -> list[AcceptanceSummary]:
    wanted = (name, domain, k, ALL_LENGTHS)
    return [
        one
        for one in evaluation.acceptance
        if (one.drafter, one.domain, one.num_speculative_tokens, one.length_bucket) == wanted
    ]


def _drafter_columns(evaluation: EvaluationReport, name: str | None) -> list[tuple[str, int]]:
    """(drafter, K) pairs, the candidate's first."""
    pairs = {
        (cell.drafter, cell.num_speculative_tokens) for cell in evaluation.cells if cell.drafter is not None
    }
    return sorted(pairs, key=lambda pair: (pair[0] != name, pair))


def _label(evaluation: EvaluationReport, pair: tuple[str, int], pairs: Sequence[tuple[str, int]]) -> str:
    """`K=3`, with the drafter's name where several were measured; EAGLE-3 is told from P-EAGLE."""
    several = len({drafter for drafter, _ in pairs}) > 1
    cell = next(c for c in evaluation.cells if (c.drafter, c.num_speculative_tokens) == pair)
    return f"{pair[0]} {cell.column}" if several else cell.column


def _speed_tables(evaluation: EvaluationReport, name: str | None) -> Iterator[SpeedTable]:
    pairs = _drafter_columns(evaluation, name)
    by_key: dict[tuple[str | None, int, str, int], Cell] = {
        (c.drafter, c.num_speculative_tokens, c.domain, c.concurrency): c for c in evaluation.cells
    }
    for domain in _ordered_domains(evaluation):
        rows = []
        for level in sorted({cell.concurrency for cell in evaluation.cells if cell.domain == domain}):
            plain = by_key.get((None, 0, domain, level))
            speeds = []
            for drafter, k in pairs:
                cell = by_key.get((drafter, k, domain, level))
                if cell is None:
                    speeds.append(Speed(None, None))
                else:
                    speeds.append(Speed(cell.output_tokens_per_second, ratio_to_plain(evaluation, cell)))
            own = [
                one.ratio for one, pair in zip(speeds, pairs, strict=True) if pair[0] == name and one.ratio
            ]
            best = Speed(None, max(own, default=None))
            rows.append((level, tuple(speeds), plain.output_tokens_per_second if plain else None, best))
        columns = tuple(_label(evaluation, pair, pairs) for pair in pairs)
        yield SpeedTable(domain, domain in evaluation.train_domains, columns, tuple(rows))


# --- what the figures show --------------------------------------------------------------------------


def _position_curves(evaluation: EvaluationReport, name: str | None) -> list[Any]:
    """One curve per domain: the candidate at its largest K and the lowest concurrency measured."""
    from drafter.plots import Curve

    curves = []
    pairs = _drafter_columns(evaluation, name)
    for drafter in dict.fromkeys(pair[0] for pair in pairs):
        largest = max(k for one, k in pairs if one == drafter)
        for domain in _ordered_domains(evaluation):
            cells = [
                c
                for c in evaluation.cells
                if (c.drafter, c.num_speculative_tokens, c.domain) == (drafter, largest, domain)
            ]
            for cell in sorted(cells, key=lambda one: one.concurrency)[:1]:
                rates = cell.acceptance_rate_per_position
                label = domain if drafter == name else f"{domain}, {drafter}"
                curves.append(Curve(label, tuple(float(i) for i in range(1, len(rates) + 1)), rates))
    return curves


def _speedup_curves(evaluation: EvaluationReport, name: str | None) -> list[Any]:
    """One curve per domain and K of the candidate."""
    from drafter.plots import Curve

    curves = []
    for domain in _ordered_domains(evaluation):
        for drafter, k in _drafter_columns(evaluation, name):
            cells = [
                c
                for c in evaluation.cells
                if (c.drafter, c.num_speculative_tokens, c.domain) == (drafter, k, domain)
            ]
            points = [
                (float(c.concurrency), ratio)
                for c in sorted(cells, key=lambda one: one.concurrency)
                if (ratio := ratio_to_plain(evaluation, c)) is not None
            ]
            if drafter == name and points:
                x, y = zip(*points, strict=True)
                curves.append(Curve(f"{domain}, K={k}", x, y))
    return curves


def _ranges(evaluation: EvaluationReport, name: str | None) -> list[Any]:
    """AL over all lengths, one row per domain, drafter and K; coloured by domain."""
    from drafter.plots import Range

    domains = _ordered_domains(evaluation)
    pairs = _drafter_columns(evaluation, name)
    return [
        Range(
            f"{domain}, {_label(evaluation, pair, pairs)}",
            number,
            one.acceptance_length,
            one.lower,
            one.upper,
        )
        for number, domain in enumerate(domains)
        for pair in pairs
        for one in _summaries(evaluation, pair[0], domain, pair[1])
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested provenance as (dotted name, value) rows."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, ", ".join(str(one) for one in value)
        else:
            yield name, str(value)
