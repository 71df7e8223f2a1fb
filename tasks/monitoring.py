"""Whether an endpoint still does what its drafter's evaluation promised: a pure decision, no I/O here.

Every window is judged by itself for each criterion; then bad windows in a row are counted, newest first.
A window without enough evidence, and one only just above the line, neither lengthen a row nor end it. So a
figure that wavers about a threshold does not make the monitor act now and recant next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Literal

from pydantic import Field

from drafter.records import Record
from tasks.monitor_settings import MonitorThresholds

Action = Literal["ok", "watch", "ask_retrain", "roll_back"]


class Window(Record):
    """What was seen of the fleet within one stretch of time."""

    started_at: datetime
    ended_at: datetime
    acceptance_length: float | None = Field(description="Of production's answers, or of probes.")
    acceptance_from: Literal["traffic", "probes"] | None
    num_answers: int = Field(description="Answers behind the acceptance length.")
    output_tokens_per_second: float | None = Field(description="Mean of the probes, one at a time.")
    num_probes: int
    num_requests: int
    num_failed: int = Field(description="Requests that the container failed.")


class Expectation(Record):
    """What the version's own evaluation measured at the K that serves. None: it did not."""

    acceptance_length: float | None = Field(description="Lowest over the domains that it was trained on.")
    output_tokens_per_second: float | None = Field(description="Likewise, at the lowest concurrency.")


class History(Record):
    """What has been done already."""

    restored_at: datetime | None = Field(description="When a rollback brought this version back.")
    retrain_asked_at: datetime | None = Field(description="Last time that a retrain was asked for.")
    previous_version: str | None = Field(description="Version to go back to; None: there is none.")
    obstacle: str | None = Field(default=None, description="Why the endpoint cannot go back; None: it can.")


class MonitorDecision(Record):
    """What to do, and why."""

    action: Action
    asks_retrain: bool = Field(description="Whether a successor is to be asked for.")
    reasons: tuple[str, ...]


class Verdict(IntEnum):
    """Of one window and one criterion, the better the lower. Unknown and undecided stand apart."""

    UNKNOWN = -2
    UNDECIDED = -1
    GOOD = 0
    SLOW = 1
    WORN = 2
    BROKEN = 3


def decide_action(
    windows: Sequence[Window],
    expected: Expectation,
    history: History,
    thresholds: MonitorThresholds,
    now: datetime,
) -> MonitorDecision:
    """Keep on, watch, ask for a retrain, or go back.

    Args:
        windows: of the version that serves, since it does; oldest first.
        expected: what its evaluation measured.
        history: for the cool-downs, and for whether there is anything to go back to.
        thresholds: what is bad, and how much of it.
        now: the time of the decision.
    """
    needed = thresholds.num_bad_windows
    acceptance = [judge_acceptance(window, expected, thresholds) for window in windows]
    errors = [judge_errors(window, thresholds) for window in windows]
    speed = [judge_speed(window, expected, thresholds) for window in windows]
    worn, spent = count_in_a_row(acceptance, Verdict.WORN), count_in_a_row(acceptance, Verdict.BROKEN)
    failing, slow = count_in_a_row(errors, Verdict.BROKEN), count_in_a_row(speed, Verdict.SLOW)
    reasons = [
        *_in_words(worn, needed, _acceptance_words(windows, acceptance, expected, Verdict.WORN)),
        *_in_words(failing, needed, _error_words(windows, errors)),
        *_in_words(slow, needed, _speed_words(windows, speed, expected)),
    ]
    if not reasons:
        return MonitorDecision(
            action="ok", asks_retrain=False, reasons=_all_well(windows, acceptance, expected)
        )
    asks, why_not_asking = _may_ask(worn >= needed, history, thresholds, now)
    goes_back, why_not_going = _may_go_back(spent >= needed or failing >= needed, history, thresholds, now)
    reasons += [*why_not_going, *why_not_asking]
    action: Action = "roll_back" if goes_back else "ask_retrain" if asks else "watch"
    return MonitorDecision(action=action, asks_retrain=asks, reasons=tuple(reasons))


def judge_acceptance(window: Window, expected: Expectation, thresholds: MonitorThresholds) -> Verdict:
    """By the share of the evaluation's accepted tokens a step."""
    share = accepted_share(window, expected)
    if share is None or window.num_answers < thresholds.min_answers:
        return Verdict.UNKNOWN
    if share < thresholds.roll_back_below:
        return Verdict.BROKEN
    if share < thresholds.retrain_below:
        return Verdict.WORN
    return (
        Verdict.UNDECIDED if share < thresholds.retrain_below + thresholds.recovery_margin else Verdict.GOOD
    )


def judge_errors(window: Window, thresholds: MonitorThresholds) -> Verdict:
    """By the share of requests that the container failed; half the limit ends a row of bad windows."""
    if window.num_requests < thresholds.min_requests:
        return Verdict.UNKNOWN
    share = window.num_failed / window.num_requests
    if share > thresholds.max_error_share:
        return Verdict.BROKEN
    return Verdict.UNDECIDED if share > thresholds.max_error_share / 2 else Verdict.GOOD


def judge_speed(window: Window, expected: Expectation, thresholds: MonitorThresholds) -> Verdict:
    """By the probes' output tokens/s."""
    speed, promised = window.output_tokens_per_second, expected.output_tokens_per_second
    if speed is None or promised is None or window.num_probes < thresholds.min_answers:
        return Verdict.UNKNOWN
    return Verdict.SLOW if speed < promised * thresholds.min_speed_share else Verdict.GOOD


def accepted_share(window: Window, expected: Expectation) -> float | None:
    """Accepted tokens a step over those of the evaluation; None where one of them is not known."""
    if window.acceptance_length is None or expected.acceptance_length is None:
        return None
    promised = expected.acceptance_length - 1
    return (window.acceptance_length - 1) / promised if promised > 0 else None


def count_in_a_row(verdicts: Sequence[Verdict], level: Verdict) -> int:
    """Windows at least so bad, newest first, until one that is clearly better.

    GOOD WORN UNKNOWN WORN UNDECIDED -> 2 at WORN; WORN WORN GOOD -> 0.
    """
    count = 0
    for verdict in reversed(verdicts):
        if verdict >= level:
            count += 1
        elif verdict >= Verdict.GOOD:
            break
    return count


def _may_ask(
    is_due: bool, history: History, thresholds: MonitorThresholds, now: datetime
) -> tuple[bool, list[str]]:
    wait = _left(history.retrain_asked_at, thresholds.retrain_cool_down_s, now)
    if not is_due:
        return False, []
    if wait is None:
        return True, []
    return False, [f"a retrain was asked for at {history.retrain_asked_at:%Y-%m-%d %H:%M} UTC; {wait} to go"]


def _may_go_back(
    is_due: bool, history: History, thresholds: MonitorThresholds, now: datetime
) -> tuple[bool, list[str]]:
    if not is_due:
        return False, []
    if history.obstacle is not None:
        return False, [f"no rollback: {history.obstacle}"]
    wait = _left(history.restored_at, thresholds.cool_down_s, now)
    if wait is None:
        return True, [f"version {history.previous_version} served before"]
    return False, [f"no rollback: the last one was at {history.restored_at:%Y-%m-%d %H:%M} UTC; {wait} to go"]


def _left(since: datetime | None, cool_down_s: int, now: datetime) -> str | None:
    """What is left of a cool-down, in words; None: it is over, or there was none."""
    if since is None:
        return None
    left = since + timedelta(seconds=cool_down_s) - now
    return f"{left.total_seconds():.0f} s of the cool-down" if left > timedelta(0) else None


def _in_words(count: int, needed: int, words: Callable[[], str]) -> list[str]:
    return (
        [f"{words()}: bad in {count} window{'s' * (count > 1)} in a row, {needed} make it act"]
        if count
        else []
    )


def _newest(windows: Sequence[Window], verdicts: Sequence[Verdict], level: Verdict) -> Window:
    return next(
        window
        for window, verdict in zip(reversed(windows), reversed(verdicts), strict=True)
        if verdict >= level
    )


def _acceptance_words(
    windows: Sequence[Window], verdicts: Sequence[Verdict], expected: Expectation, level: Verdict
) -> Callable[[], str]:
    def words() -> str:
        window = _newest(windows, verdicts, level)
        share = accepted_share(window, expected)
        return (
            f"acceptance length of {window.num_answers} answers ({window.acceptance_from}) is "
            f"{window.acceptance_length:.2f}, its evaluation promised {expected.acceptance_length:.2f}; "
            f"{share:.0%} of the accepted tokens are left"
        )

    return words


def _error_words(windows: Sequence[Window], verdicts: Sequence[Verdict]) -> Callable[[], str]:
    def words() -> str:
        window = _newest(windows, verdicts, Verdict.BROKEN)
        return f"{window.num_failed} of {window.num_requests} requests failed in the container"

    return words


def _speed_words(
    windows: Sequence[Window], verdicts: Sequence[Verdict], expected: Expectation
) -> Callable[[], str]:
    def words() -> str:
        window = _newest(windows, verdicts, Verdict.SLOW)
        return (
            f"probes get {window.output_tokens_per_second:.0f} output tokens/s, "
            f"its evaluation had {expected.output_tokens_per_second:.0f} (only watched)"
        )

    return words


def _all_well(
    windows: Sequence[Window], verdicts: Sequence[Verdict], expected: Expectation
) -> tuple[str, ...]:
    if expected.acceptance_length is None:
        return ("its evaluation has no acceptance length at the K that serves: acceptance is not judged",)
    if all(verdict is Verdict.UNKNOWN for verdict in verdicts):
        return ("too few answers yet to judge its acceptance",)
    return (f"nothing is bad in the last {len(windows)} windows",)
