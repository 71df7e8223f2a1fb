"""Bootstrap over prompts: how sure a measured acceptance length is. P prompts, R resamples.

The unit is the prompt, because tokens of one answer are not independent. AL of a group is a ratio of sums,
1 + accepted tokens / verification steps, so that long answers count by their length, as they do in production.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter.records import AcceptanceSummary, PromptAcceptance

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95
ALL_LENGTHS = "all"


@dataclass(frozen=True)
class Interval:
    """A value and its two-sided percentile interval."""

    value: float
    lower: float
    upper: float


def acceptance_interval(
    prompts: Sequence[PromptAcceptance], confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """AL over a group of prompts of one drafter and K."""
    assert prompts, "no prompts"
    chosen = _resample(len(prompts), seed)
    drafts, accepted = _counts(prompts)
    return _interval(_ratio(accepted, drafts), _ratio(accepted[chosen], drafts[chosen]), confidence)


def paired_difference(
    candidate: Sequence[PromptAcceptance],
    champion: Sequence[PromptAcceptance],
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """AL(candidate) - AL(champion), both resampled over the same prompts.

    Args:
        candidate: P measurements.
        champion: P measurements of the same prompts in the same order.
    """
    assert [p.conversation_id for p in candidate] == [p.conversation_id for p in champion], "not paired"
    assert candidate, "no prompts"
    chosen = _resample(len(candidate), seed)
    drafts, accepted = _counts(candidate)
    other_drafts, other_accepted = _counts(champion)
    value = _ratio(accepted, drafts) - _ratio(other_accepted, other_drafts)
    samples = _ratio(accepted[chosen], drafts[chosen]) - _ratio(other_accepted[chosen], other_drafts[chosen])
    return _interval(value, samples, confidence)


def length_bucket(context_tokens: int, edges: Sequence[int]) -> str:
    """Name of the context-length bucket: `<=256`, `<=1024`, ... or `>4096` beyond the last edge.

    Args:
        context_tokens: prompt + answer.
        edges: upper edges, ascending, each inside its bucket.
    """
    for edge in edges:
        if context_tokens <= edge:
            return f"<={edge}"
    return f">{edges[-1]}" if edges else ALL_LENGTHS


def bucket_order(name: str) -> tuple[int, int]:
    """Sort key of bucket names: `all`, then by edge, then `>`."""
    if name == ALL_LENGTHS:
        return (0, 0)
    return (1, int(name[2:])) if name.startswith("<=") else (2, int(name[1:]))


def summarise(
    prompts: Iterable[PromptAcceptance], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[AcceptanceSummary, ...]:
    """AL with its interval for each drafter, K, domain and length bucket, and over all lengths."""
    groups: dict[tuple[str, int, str, str], list[PromptAcceptance]] = {}
    for prompt in prompts:
        for bucket in dict.fromkeys((ALL_LENGTHS, prompt.length_bucket)):
            key = (prompt.drafter, prompt.num_speculative_tokens, prompt.domain, bucket)
            groups.setdefault(key, []).append(prompt)
    summaries = []
    for key in sorted(groups, key=lambda k: (*k[:3], bucket_order(k[3]))):
        interval = acceptance_interval(groups[key], confidence, seed)
        summaries.append(
            AcceptanceSummary(
                drafter=key[0],
                num_speculative_tokens=key[1],
                domain=key[2],
                length_bucket=key[3],
                num_prompts=len(groups[key]),
                acceptance_length=interval.value,
                lower=interval.lower,
                upper=interval.upper,
            )
        )
    return tuple(summaries)


def _counts(prompts: Sequence[PromptAcceptance]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    drafts = np.array([prompt.num_drafts for prompt in prompts], dtype=np.float64)  # [P]
    accepted = np.array([prompt.num_accepted_tokens for prompt in prompts], dtype=np.float64)  # [P]
    return drafts, accepted


def _resample(count: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(count, size=(NUM_RESAMPLES, count))  # [R, P]


def _ratio(accepted: npt.NDArray[np.float64], drafts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """AL over the last axis; a group that never drafted (answers of one token) counts as 1."""
    return np.asarray(1.0 + accepted.sum(-1) / np.maximum(drafts.sum(-1), 1.0))


def _interval(
    value: npt.NDArray[np.float64], samples: npt.NDArray[np.float64], confidence: float
) -> Interval:
    tail = 100 * (1 - confidence) / 2
    lower, upper = np.percentile(samples, [tail, 100 - tail])
    return Interval(float(value), float(lower), float(upper))
