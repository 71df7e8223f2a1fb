"""How to serve a drafter, read off what was measured: K, up to which load, and a schedule by batch size. Pure.

K is chosen here and nowhere else; gate, reports, registry and deployment carry what `advise` says.

- **Noise.** A cell is one run without an interval, so a ratio counts only beyond `NOISE`: 1.54x is a gain,
  0.74x a loss, 1.02x and 0.97x are neither.
- **Between measurements nothing is interpolated.** Where speculation pays at 4 requests in flight and costs at
  16, the switch lies somewhere between, and 4 counts.
- **A schedule is recommended only if it was itself measured faster than K alone.** In vLLM a batch without
  drafts still pays for the drafter's pass, which keeps its KV cache complete; what the cells of K and of no
  speculation say of it is too good.

vLLM 0.32's `num_speculative_tokens_per_batch_size` takes [[first, last, K], ...]: inclusive ranges from 1 up,
without overlap; gaps and all beyond the last range keep the K before them. K = 0 is allowed. With
`parallel_drafting` no other K than `num_speculative_tokens` and 0 works: the drafter's placeholders stay
those of the former, and its guesses are cut into rows of the wrong length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from drafter.records import (
    BatchSizeSchedule,
    Cell,
    EvaluationReport,
    MeasuredGain,
    MeasuredSchedule,
    ServingAdvice,
)

# What one measurement may be off by: a ratio within this share of 1 is no difference.
NOISE = 0.05


def advise(
    report: EvaluationReport, name: str, domains: Sequence[str], expected_concurrency: int
) -> ServingAdvice:
    """The advice for a drafter.

    Args:
        name: which of the report's drafters.
        domains: whose speed counts; a concurrency counts where all of them were measured.
        expected_concurrency: requests that are expected in flight at once.
    """
    measured = tuple(
        gain
        for k in sorted({cell.num_speculative_tokens for cell in report.cells if cell.drafter == name})
        for gain in _gains(
            report, [c for c in report.cells if (c.drafter, c.num_speculative_tokens) == (name, k)], domains
        )
    )
    scheduled = tuple(
        MeasuredSchedule(schedule=one.schedule, gains=tuple(_gains(report, one.cells, domains)))
        for one in report.scheduled
        if one.drafter == name
    )
    return _choose(measured, scheduled, expected_concurrency, report.versions.get("vllm", ""))


def advise_for(advice: ServingAdvice, expected_concurrency: int) -> ServingAdvice:
    """The same measurements' advice for another load."""
    return _choose(advice.measured, advice.scheduled, expected_concurrency, advice.vllm_version)


def derive_schedule(gains: Sequence[MeasuredGain]) -> BatchSizeSchedule:
    """Drafts up to the last load below the first at which they cost; of the gains of one K. Empty: no switch.

    Loads at which they neither gain nor cost belong to the drafts: a batch without any still pays for a pass.
    """
    rows = _rows(gains)
    costs = next((position for position, row in enumerate(rows) if _loses(row)), 0)
    if not any(_wins(row) for row in rows[:costs]):
        return ()
    limit = rows[costs - 1].concurrency
    return ((1, limit, rows[0].num_speculative_tokens), (limit + 1, rows[-1].concurrency, 0))


def schedules_to_measure(
    report: EvaluationReport, name: str, domains: Sequence[str]
) -> tuple[BatchSizeSchedule, ...]:
    """The schedule of each K that is the fastest at some concurrency and pays at some, but not at all."""
    measured = advise(report, name, domains, 1).measured
    best = {_best_k(measured, level) for level in _levels(measured)}
    found = [
        derive_schedule([one for one in measured if one.num_speculative_tokens == k]) for k in sorted(best)
    ]
    return tuple(filter(None, found))


def schedule_problem(schedule: BatchSizeSchedule, k: int) -> str | None:
    """Why vLLM would refuse a schedule, or serve it wrong, with parallel drafting and this K; None: it is fine."""
    end = 0
    for first, last, drafted in schedule:
        if first > last:
            return f"the range {first} to {last} ends before it begins"
        if first <= end:
            return f"the range from {first} begins within the one before it, or below 1"
        if end == 0 and first != 1:
            return f"the first range begins at {first}, and must at 1"
        if drafted not in (0, k):
            return f"K={drafted} for {first} to {last}: with parallel drafting vLLM drafts {k} tokens or none (0)"
        end = last
    return None


# --- what was measured ------------------------------------------------------------------------------


def speed_of(
    cells: Sequence[Cell], drafter: str | None, k: int, domain: str, concurrency: int
) -> float | None:
    """Output tokens/s of a combination; None when it was not measured."""
    for cell in cells:
        found = (cell.drafter, cell.num_speculative_tokens, cell.domain, cell.concurrency)
        if found == (drafter, k, domain, concurrency):
            speed = cell.output_tokens_per_second
            return speed if math.isfinite(speed) and speed > 0 else None
    return None


def ratio_to_plain(report: EvaluationReport, cell: Cell) -> float | None:
    """Output tokens/s of a cell over those without a drafter at the same domain and concurrency."""
    plain = speed_of(report.cells, None, 0, cell.domain, cell.concurrency)
    return cell.output_tokens_per_second / plain if plain else None


def _gains(report: EvaluationReport, cells: Sequence[Cell], domains: Sequence[str]) -> Iterator[MeasuredGain]:
    """Of one drafter at one K: one gain for each concurrency at which every domain was measured."""
    for level in sorted({cell.concurrency for cell in cells}):
        at_level = [cell for cell in cells if cell.concurrency == level]
        drafted = [
            speed_of(at_level, at_level[0].drafter, at_level[0].num_speculative_tokens, one, level)
            for one in domains
        ]
        plain = [speed_of(report.cells, None, 0, domain, level) for domain in domains]
        speed, baseline = _mean(drafted), _mean(plain)
        if speed is not None:
            yield MeasuredGain(
                num_speculative_tokens=at_level[0].num_speculative_tokens,
                concurrency=level,
                output_tokens_per_second=speed,
                ratio=speed / baseline if baseline else None,
            )


def _mean(speeds: Sequence[float | None]) -> float | None:
    """Geometric mean; None unless every speed is known."""
    known = [speed for speed in speeds if speed is not None]
    if not known or len(known) < len(speeds):
        return None
    return float(math.prod(known) ** (1 / len(known)))


def _rows(gains: Sequence[MeasuredGain]) -> list[MeasuredGain]:
    """Those with a ratio, by concurrency."""
    return sorted((one for one in gains if one.ratio is not None), key=lambda one: one.concurrency)


def _levels(gains: Sequence[MeasuredGain]) -> list[int]:
    return sorted({one.concurrency for one in gains})


# --- what follows from it ---------------------------------------------------------------------------


def _choose(
    measured: tuple[MeasuredGain, ...],
    scheduled: tuple[MeasuredSchedule, ...],
    expected_concurrency: int,
    vllm_version: str,
) -> ServingAdvice:
    level = _stand_in(_levels(measured), expected_concurrency)
    k = None if level is None else _best_k(measured, level)
    gains = [one for one in measured if one.num_speculative_tokens == k]
    tried = next((one for one in scheduled if one.schedule == derive_schedule(gains)), None)
    adopted = tried is not None and _is_better(tried.gains, gains)
    words = [_k_in_words(gains), _expectation_in_words(gains, expected_concurrency, level)]
    words.append(_schedule_in_words(gains, tried, adopted))
    return ServingAdvice(
        expected_concurrency=expected_concurrency,
        num_speculative_tokens=k,
        speculate_up_to_concurrency=_speculate_up_to(gains),
        schedule=tried.schedule if tried is not None and adopted else (),
        sentence=" ".join(filter(None, words)),
        measured=measured,
        scheduled=scheduled,
        vllm_version=vllm_version,
    )


def _stand_in(levels: Sequence[int], expected: int) -> int | None:
    """The measured concurrency that speaks for the expected one: itself, the next lower one, else the lowest."""
    lower = [level for level in levels if level <= expected]
    return lower[-1] if lower else min(levels, default=None)


def _best_k(measured: Sequence[MeasuredGain], level: int) -> int:
    """K with the most output tokens/s; of equals the smallest, which costs least under load."""
    rows = [one for one in measured if one.concurrency == level]
    return max(
        rows, key=lambda one: (one.output_tokens_per_second, -one.num_speculative_tokens)
    ).num_speculative_tokens


def _speculate_up_to(gains: Sequence[MeasuredGain]) -> int | None:
    """As `ServingAdvice.speculate_up_to_concurrency`, of the gains of one K."""
    rows, limit = _rows(gains), 0
    for row in rows:
        if _loses(row):
            return limit
        if _wins(row):
            limit = row.concurrency
    return None if rows and limit == rows[-1].concurrency else limit


def _wins(row: MeasuredGain) -> bool:
    return row.ratio is not None and _clearly(row.ratio) > 0


def _loses(row: MeasuredGain) -> bool:
    return row.ratio is not None and _clearly(row.ratio) < 0


def _clearly(ratio: float) -> int:
    """1: faster, -1: slower, 0: within the noise."""
    if ratio >= 1 + NOISE:
        return 1
    return -1 if ratio <= 1 - NOISE else 0


def _over(gains: Sequence[MeasuredGain], others: Sequence[MeasuredGain]) -> list[tuple[int, float]]:
    """(concurrency, ratio of speeds), where both were measured."""
    speeds = {one.concurrency: one.output_tokens_per_second for one in others}
    return [
        (one.concurrency, one.output_tokens_per_second / speeds[one.concurrency])
        for one in gains
        if one.concurrency in speeds
    ]


def _is_better(gains: Sequence[MeasuredGain], alone: Sequence[MeasuredGain]) -> bool:
    """Whether a schedule is clearly faster than K alone somewhere, and clearly slower nowhere."""
    found = [_clearly(ratio) for _, ratio in _over(gains, alone)]
    return 1 in found and -1 not in found


# --- words ------------------------------------------------------------------------------------------


def _k_in_words(gains: Sequence[MeasuredGain]) -> str:
    if not gains:
        return "No K was measured, so nothing is known of how to serve it."
    k, rows, limit = gains[0].num_speculative_tokens, _rows(gains), _speculate_up_to(gains)
    if not rows:
        return (
            f"K={k} is the fastest; whether it pays is not known: no speculation was not measured beside it."
        )
    if limit is None and len(rows) == 1:
        return f"K={k}: {_at(rows)}, the only load measured."
    if limit is None:
        return f"K={k} at every load measured: {_at(rows)}."
    above = [row for row in rows if row.concurrency > limit]
    if limit == 0:
        return f"Do not speculate here: with K={k} {_at(rows)}{_hint_at_noise(rows)}."
    below = [row for row in rows if row.concurrency <= limit]
    return f"K={k} up to {_requests(limit)}: {_at(below)}{_hint_at_noise(below)}. {_above_in_words(above, limit)}"


def _above_in_words(above: Sequence[MeasuredGain], limit: int) -> str:
    first = above[0].concurrency
    advice = "do not speculate" if any(_loses(row) for row in above) else "it gains nothing"
    gap = (
        "" if first == limit + 1 else f"; where between {limit} and {first} it stops paying was not measured"
    )
    return f"Above {limit} {advice}: {_at(above)}{_hint_at_noise(above)}{gap}."


def _expectation_in_words(gains: Sequence[MeasuredGain], expected: int, level: int | None) -> str:
    if level is None:
        return ""
    words = (
        f"{_requests(expected)} expected, which was not measured; K is that of {level}."
        if level != expected
        else ""
    )
    limit = _speculate_up_to(gains)
    if limit and expected > limit:
        costs = any(_loses(row) for row in gains if row.concurrency == expected)
        words += f" At the {expected} expected, speculation {'costs' if costs else 'is not known to pay'}."
    elif limit is None and level != expected and expected > level == max(_levels(gains)):
        words += " How it is under more load than was measured is not known."
    return words.strip()


def _schedule_in_words(gains: Sequence[MeasuredGain], tried: MeasuredSchedule | None, adopted: bool) -> str:
    if not derive_schedule(gains):
        return ""
    if tried is None:
        return "Whether vLLM's schedule by batch size does better than one K was not measured."
    found = ", ".join(f"{ratio:.2f}x at {level}" for level, ratio in _over(tried.gains, gains))
    if adopted:
        (_, limit, k), (above, _, _) = tried.schedule
        return f"With a schedule, K={k} for up to {_requests(limit)} and none from {above}, it is {found} of K={k} alone."
    return f"No schedule by batch size: it was {found} of K={gains[0].num_speculative_tokens} alone."


def _at(rows: Sequence[MeasuredGain]) -> str:
    """`1.54x at 1, 1.08x at 4`."""
    return ", ".join(f"{row.ratio:.2f}x at {row.concurrency}" for row in rows)


def _hint_at_noise(rows: Sequence[MeasuredGain]) -> str:
    even = [row for row in rows if not _wins(row) and not _loses(row)]
    return f" (within {NOISE:.0%} of 1 is no difference)" if even else ""


def _requests(count: int) -> str:
    return "1 request in flight" if count == 1 else f"{count} requests in flight"
