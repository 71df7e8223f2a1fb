"""Whether a challenger may be released: a pure decision over what was measured. No torch, no I/O here.

Every question is answered with one finding, in words: passed, failed, or not known. One failure rejects;
else one unknown means "not enough evidence"; else the challenger is approved. An interval that contains
the threshold is unknown, not passed: more prompts would tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from drafter.config import GateThresholds
from drafter.records import EvaluationReport, PromptAcceptance, ReleaseDecision, ServingAdvice
from drafter.serving_advice import advise, ratio_to_plain, speed_of
from drafter.statistics import acceptance_interval, bucket_order, paired_difference

Verdict = Literal["failed", "unknown", "passed", "note"]

# How a reason starts; the report colours by it.
LABELS: dict[Verdict, str] = {
    "failed": "Failed",
    "unknown": "Not known",
    "passed": "Passed",
    "note": "Note",
}


@dataclass(frozen=True)
class Finding:
    """One question, answered."""

    verdict: Verdict
    text: str


def decide_release(
    candidate: EvaluationReport,
    candidate_name: str,
    champion_name: str | None,
    thresholds: GateThresholds,
) -> ReleaseDecision:
    """Approve, reject, or say that the evidence does not carry a decision.

    Args:
        candidate: the evaluation that holds the candidate and, when there is one, the champion,
            measured on the same prompts.
        candidate_name: which of its drafters is to be judged.
        champion_name: the drafter in production; None for a first release.
        thresholds: floors, margin and how much evidence is needed.

    Returns:
        The outcome, the reasons (failures first, then unknowns, passes and notes), and how to serve it; what
        is judged is the K of that advice, at the concurrency that is expected.
    """
    domains = _gated_domains(candidate, thresholds)
    expected = thresholds.expected_concurrency
    advice = advise(candidate, candidate_name, domains, expected)
    k = advice.num_speculative_tokens if any(one.concurrency == expected for one in advice.measured) else None
    findings = list(_identity(candidate, candidate_name, thresholds))
    if k is None:
        text = (
            f"no speed of {candidate_name} at concurrency {expected} on "
            f"{_join(domains) or 'any gated domain'}: evaluate it there."
        )
        findings.append(Finding("unknown", text))
    else:
        for domain in domains:
            findings += _speed(candidate, candidate_name, k, domain, thresholds)
            findings += _floor(candidate, candidate_name, k, domain, thresholds)
            if champion_name is not None:
                findings += _against_champion(
                    candidate, (candidate_name, champion_name), k, domain, thresholds
                )
        findings += _notes(candidate, candidate_name, k, domains, thresholds)
    return _conclude(findings, k, advice)


def _conclude(findings: Sequence[Finding], k: int | None, advice: ServingAdvice) -> ReleaseDecision:
    verdicts = {finding.verdict for finding in findings}
    outcome: Literal["approve", "reject", "not_enough_evidence"] = "approve"
    if "failed" in verdicts:
        outcome = "reject"
    elif "unknown" in verdicts:
        outcome = "not_enough_evidence"
    order = list(LABELS)
    ordered = sorted(findings, key=lambda finding: order.index(finding.verdict))
    reasons = tuple(f"{LABELS[finding.verdict]}: {finding.text}" for finding in ordered)
    return ReleaseDecision(outcome=outcome, reasons=reasons, num_speculative_tokens=k, advice=advice)


def _gated_domains(report: EvaluationReport, thresholds: GateThresholds) -> tuple[str, ...]:
    """The domains asked for, else those that trained, else all that were measured."""
    measured = tuple(dict.fromkeys(cell.domain for cell in report.cells))
    return thresholds.gated_domains or report.train_domains or measured


# --- speed ------------------------------------------------------------------------------------------


def _speed(
    report: EvaluationReport, name: str, k: int, domain: str, thresholds: GateThresholds
) -> Iterator[Finding]:
    concurrency = thresholds.expected_concurrency
    plain = speed_of(report.cells, None, 0, domain, concurrency)
    drafted = speed_of(report.cells, name, k, domain, concurrency)
    if plain is None or drafted is None:
        yield Finding(
            "unknown",
            f"speed on {domain}: serving without a drafter was not measured at concurrency {concurrency}.",
        )
        return
    ratio = drafted / plain
    yield Finding(
        "passed" if ratio >= thresholds.min_speedup else "failed",
        f"speed on {domain} at concurrency {concurrency}: {drafted:.0f} output tokens/s with K={k}, {plain:.0f} "
        f"without a drafter: {ratio:.2f}x, and at least {thresholds.min_speedup:.2f}x is asked for.",
    )


# --- acceptance -------------------------------------------------------------------------------------


def _prompts_of(report: EvaluationReport, name: str, k: int, domain: str) -> list[PromptAcceptance]:
    return [p for p in report.prompts if (p.drafter, p.num_speculative_tokens, p.domain) == (name, k, domain)]


def _floor(
    report: EvaluationReport, name: str, k: int, domain: str, thresholds: GateThresholds
) -> Iterator[Finding]:
    prompts = _prompts_of(report, name, k, domain)
    if len(prompts) < thresholds.min_prompts:
        yield Finding("unknown", _too_few(f"acceptance length on {domain}", len(prompts), thresholds))
        return
    interval = acceptance_interval(prompts, thresholds.confidence)
    floor = thresholds.min_acceptance_length
    text = (
        f"acceptance length on {domain}, K={k}: {interval.value:.2f}, between {interval.lower:.2f} and "
        f"{interval.upper:.2f} with {thresholds.confidence:.0%} confidence over {len(prompts)} prompts"
    )
    if interval.lower >= floor:
        yield Finding("passed", f"{text}; the floor is {floor:.2f}.")
    elif interval.upper < floor:
        yield Finding("failed", f"{text}; all of it is below the floor of {floor:.2f}.")
    else:
        yield Finding("unknown", f"{text}; the floor of {floor:.2f} lies inside: measure more prompts.")


def _against_champion(
    report: EvaluationReport, names: tuple[str, str], k: int, domain: str, thresholds: GateThresholds
) -> Iterator[Finding]:
    """Non-inferiority over the domain, and in each length bucket that has enough prompts."""
    candidate = {p.conversation_id: p for p in _prompts_of(report, names[0], k, domain)}
    champion = {p.conversation_id: p for p in _prompts_of(report, names[1], k, domain)}
    shared = [one for one in candidate if one in champion]
    if len(shared) < thresholds.min_prompts:
        subject = f"comparison with {names[1]} on {domain} at K={k}"
        yield Finding("unknown", _too_few(subject, len(shared), thresholds))
        return
    groups = {f"on {domain}": shared}
    # Answers may differ in length by drafter (rounding); the candidate's bucket counts for both.
    for bucket in sorted({candidate[one].length_bucket for one in shared}, key=bucket_order):
        inside = [one for one in shared if candidate[one].length_bucket == bucket]
        if len(inside) == len(shared):
            continue  # one bucket holds everything: already compared
        if len(inside) < thresholds.min_prompts:
            subject = f"comparison with {names[1]} on {domain} at {bucket} tokens of context left out"
            yield Finding("note", f"{subject}: {len(inside)} prompts, {thresholds.min_prompts} are needed.")
        else:
            groups[f"on {domain} at {bucket} tokens of context"] = inside
    for where, ids in groups.items():
        interval = paired_difference(
            [candidate[one] for one in ids], [champion[one] for one in ids], thresholds.confidence
        )
        margin = thresholds.non_inferiority_margin
        text = (
            f"acceptance length {where} against {names[1]}: {interval.value:+.2f}, between {interval.lower:+.2f} "
            f"and {interval.upper:+.2f} over the same {len(ids)} prompts"
        )
        if interval.lower >= -margin:
            yield Finding("passed", f"{text}; a loss of up to {margin:.2f} is allowed.")
        elif interval.upper < -margin:
            yield Finding("failed", f"{text}; a loss of more than {margin:.2f} is certain enough.")
        else:
            yield Finding(
                "unknown", f"{text}; whether more than {margin:.2f} is lost stays open: measure more prompts."
            )


def _too_few(subject: str, count: int, thresholds: GateThresholds) -> str:
    return f"{subject}: {count} prompts were measured, {thresholds.min_prompts} are needed."


# --- identity and notes -----------------------------------------------------------------------------


def _identity(report: EvaluationReport, name: str, thresholds: GateThresholds) -> Iterator[Finding]:
    share = report.greedy_identical_share.get(name, {}).get("float32")
    severity: Verdict
    if share is None:
        severity = "unknown" if thresholds.require_identical_float32 else "note"
        yield Finding(severity, f"whether greedy output in float32 is the same with {name} was not measured.")
    elif share < 1.0:
        severity = "failed" if thresholds.require_identical_float32 else "note"
        yield Finding(
            severity, f"in float32 {1 - share:.0%} of the greedy answers differ with {name}; none may."
        )
    else:
        yield Finding(
            "passed", "greedy output in float32 is token for token the same with and without the drafter."
        )


def _notes(
    report: EvaluationReport, name: str, k: int, domains: Sequence[str], thresholds: GateThresholds
) -> Iterator[Finding]:
    """Where speculation does not pay although nothing is gated there."""
    for cell in report.cells:
        if (cell.drafter, cell.num_speculative_tokens) != (name, k):
            continue
        if cell.domain in domains and cell.concurrency == thresholds.expected_concurrency:
            continue
        ratio = ratio_to_plain(report, cell)
        if ratio is not None and ratio < 1.0:
            yield Finding(
                "note",
                f"at concurrency {cell.concurrency} on {cell.domain}, K={k} is slower than no speculation ({ratio:.2f}x).",
            )


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)
