"""The monitor's decision: what is bad, how often it has to be, and that it does not flap."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from tasks.monitor_settings import MonitorSettings, MonitorThresholds
from tasks.monitoring import (
    Expectation,
    History,
    MonitorDecision,
    Verdict,
    Window,
    count_in_a_row,
    decide_action,
    judge_acceptance,
    judge_errors,
)

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
WINDOW = timedelta(seconds=300)
PROMISED = Expectation(acceptance_length=2.0, output_tokens_per_second=80.0)
WITH_PREDECESSOR = History(restored_at=None, retrain_asked_at=None, previous_version="1")
THRESHOLDS = MonitorThresholds()


def window(index: int, acceptance_length: float | None = 2.0, **changes: object) -> Window:
    """A healthy window, but for what is changed."""
    values = {
        "started_at": START + index * WINDOW,
        "ended_at": START + (index + 1) * WINDOW,
        "acceptance_length": acceptance_length,
        "acceptance_from": "traffic",
        "num_answers": 40,
        "output_tokens_per_second": 78.0,
        "num_probes": 4,
        "num_requests": 40,
        "num_failed": 0,
        **changes,
    }
    return Window.model_validate(values)


def lengths(*values: float | None) -> list[Window]:
    return [window(index, value) for index, value in enumerate(values)]


def decide(
    windows: list[Window],
    history: History = WITH_PREDECESSOR,
    expected: Expectation = PROMISED,
    thresholds: MonitorThresholds = THRESHOLDS,
    now: datetime | None = None,
) -> MonitorDecision:
    return decide_action(windows, expected, history, thresholds, now or windows[-1].ended_at)


def test_a_healthy_fleet_is_ok() -> None:
    decision = decide(lengths(2.0, 1.9, 2.1, 1.8))

    assert (decision.action, decision.asks_retrain) == ("ok", False)
    assert decision.reasons == ("nothing is bad in the last 4 windows",)


@pytest.mark.parametrize(
    ("acceptance", "action"),
    [
        ((2.0, 1.5), "watch"),
        ((2.0, 1.5, 1.5), "watch"),
        ((2.0, 1.5, 1.5, 1.5), "ask_retrain"),
        ((2.0, 1.1, 1.1), "watch"),
        ((2.0, 1.1, 1.1, 1.1), "roll_back"),
        ((1.1, 1.5, 1.1), "ask_retrain"),
        ((1.5, 1.5, 1.5, 2.0), "ok"),
        ((1.1, 1.1, 2.0, 1.1), "watch"),
    ],
)
def test_only_enough_bad_windows_in_a_row_lead_to_something(
    acceptance: tuple[float, ...], action: str
) -> None:
    assert decide(lengths(*acceptance)).action == action


def test_a_rollback_for_acceptance_asks_for_a_retrain_too_and_says_why() -> None:
    decision = decide(lengths(1.1, 1.1, 1.1))

    assert (decision.action, decision.asks_retrain) == ("roll_back", True)
    assert decision.reasons == (
        "acceptance length of 40 answers (traffic) is 1.10, its evaluation promised 2.00; "
        "10% of the accepted tokens are left: bad in 3 windows in a row, 3 make it act",
        "version 1 served before",
    )


def test_without_anything_to_go_back_to_a_retrain_is_all_that_is_left() -> None:
    obstacle = WITH_PREDECESSOR.model_copy(update={"obstacle": "nothing served before it that is known"})

    decision = decide(lengths(1.1, 1.1, 1.1), obstacle)

    assert (decision.action, decision.asks_retrain) == ("ask_retrain", True)
    assert "no rollback: nothing served before it that is known" in decision.reasons


def test_windows_without_evidence_neither_lengthen_nor_end_a_row() -> None:
    assert decide(lengths(1.1, None, 1.1, None)).action == "watch"
    assert decide(lengths(1.1, None, 1.1, None, 1.1)).action == "roll_back"


def test_a_window_just_above_the_line_does_not_end_a_row_and_a_clearly_better_one_does() -> None:
    assert decide(lengths(1.5, 1.65, 1.5, 1.5)).action == "ask_retrain"
    assert decide(lengths(1.5, 1.75, 1.5, 1.5)).action == "watch"


def test_too_few_answers_say_nothing() -> None:
    few = [window(index, 1.0, num_answers=3) for index in range(5)]

    decision = decide(few)

    assert decision.action == "ok"
    assert decision.reasons == ("too few answers yet to judge its acceptance",)


def test_an_evaluation_at_another_k_promises_nothing() -> None:
    nothing = Expectation(acceptance_length=None, output_tokens_per_second=None)

    decision = decide(lengths(1.0, 1.0, 1.0), expected=nothing)

    assert decision.action == "ok"
    assert "acceptance is not judged" in decision.reasons[0]


def test_failed_requests_take_it_back_without_asking_for_a_retrain() -> None:
    failing = [window(index, num_failed=4) for index in range(3)]

    decision = decide(failing)

    assert (decision.action, decision.asks_retrain) == ("roll_back", False)
    assert "4 of 40 requests failed in the container" in decision.reasons[0]


def test_few_requests_that_fail_say_nothing() -> None:
    assert decide([window(index, num_requests=9, num_failed=9) for index in range(3)]).action == "ok"


def test_slow_probes_are_only_watched() -> None:
    decision = decide([window(index, output_tokens_per_second=20.0) for index in range(9)])

    assert (decision.action, decision.asks_retrain) == ("watch", False)
    assert "probes get 20 output tokens/s, its evaluation had 80" in decision.reasons[0]


def test_after_a_rollback_there_is_none_until_the_cool_down_is_over() -> None:
    bad = lengths(1.1, 1.1, 1.1)
    now = bad[-1].ended_at
    fresh = WITH_PREDECESSOR.model_copy(update={"restored_at": now - timedelta(seconds=3000)})
    old = WITH_PREDECESSOR.model_copy(update={"restored_at": now - timedelta(seconds=3601)})

    assert decide(bad, fresh).action == "ask_retrain"
    assert any("600 s of the cool-down to go" in reason for reason in decide(bad, fresh).reasons)
    assert decide(bad, old).action == "roll_back"


def test_a_retrain_is_not_asked_for_again_and_again() -> None:
    worn = lengths(1.5, 1.5, 1.5)
    asked = WITH_PREDECESSOR.model_copy(update={"retrain_asked_at": worn[-1].ended_at - timedelta(hours=1)})

    assert decide(worn, asked).action == "watch"
    assert decide(worn, asked, now=worn[-1].ended_at + timedelta(days=1)).action == "ask_retrain"


def test_the_same_windows_lead_to_the_same_decision() -> None:
    windows = lengths(2.0, 1.5, 1.1, 1.1, 1.1)

    assert decide(windows) == decide(windows)


def test_a_row_is_counted_from_the_newest_window() -> None:
    good, worn, unknown, undecided = Verdict.GOOD, Verdict.WORN, Verdict.UNKNOWN, Verdict.UNDECIDED

    assert count_in_a_row([good, worn, unknown, worn, undecided], Verdict.WORN) == 2
    assert count_in_a_row([worn, worn, good], Verdict.WORN) == 0
    assert count_in_a_row([Verdict.BROKEN, worn], Verdict.WORN) == 2
    assert count_in_a_row([Verdict.BROKEN, worn], Verdict.BROKEN) == 0
    assert count_in_a_row([], Verdict.WORN) == 0


@pytest.mark.parametrize(
    ("length", "verdict"),
    [(1.29, "BROKEN"), (1.31, "WORN"), (1.59, "WORN"), (1.61, "UNDECIDED"), (1.71, "GOOD"), (1.0, "BROKEN")],
)
def test_acceptance_is_judged_by_what_the_drafter_adds(length: float, verdict: str) -> None:
    assert judge_acceptance(window(0, length), PROMISED, THRESHOLDS) is Verdict[verdict]


@pytest.mark.parametrize(("failed", "verdict"), [(0, "GOOD"), (1, "GOOD"), (2, "UNDECIDED"), (3, "BROKEN")])
def test_errors_are_judged_by_their_share(failed: int, verdict: str) -> None:
    assert judge_errors(window(0, num_failed=failed), THRESHOLDS) is Verdict[verdict]


def test_noise_about_a_threshold_does_not_make_it_flap() -> None:
    """Two days of five-minute windows whose acceptance wavers about the line for a retrain."""
    noise = random.Random(0)
    history = WITH_PREDECESSOR
    actions: list[str] = []
    windows: list[Window] = []
    for index in range(576):
        windows.append(window(index, 1.6 + noise.gauss(0, 0.08)))
        decision = decide(windows[-9:], history, now=windows[-1].ended_at)
        if decision.asks_retrain:
            history = history.model_copy(update={"retrain_asked_at": windows[-1].ended_at})
        actions.append(decision.action)

    assert "roll_back" not in actions
    assert 1 <= actions.count("ask_retrain") <= 2, "once a cool-down"


def test_a_shift_of_the_traffic_leads_to_one_rollback_and_no_flapping() -> None:
    """Twenty minutes of half-minute windows: the traffic changes its domain, both versions fall off."""
    thresholds = MonitorThresholds(cool_down_s=1200)
    history, serving, actions = WITH_PREDECESSOR, "2", []
    windows: list[Window] = []
    for index in range(40):
        start = START + index * timedelta(seconds=30)
        values = {"started_at": start, "ended_at": start + timedelta(seconds=30)}
        windows.append(window(0, 2.0 if index < 8 else 1.09, **values))
        decision = decide(windows[-9:], history, thresholds=thresholds, now=windows[-1].ended_at)
        actions.append(decision.action)
        if decision.asks_retrain:
            history = history.model_copy(update={"retrain_asked_at": windows[-1].ended_at})
        if decision.action == "roll_back":
            serving, windows = "1", []
            history = History(
                restored_at=start, retrain_asked_at=start, previous_version=None, obstacle="nothing before it"
            )

    assert actions[:8] == ["ok"] * 8
    assert actions.index("roll_back") == 10, "the third bad window"
    assert actions.count("roll_back") == 1
    assert serving == "1"
    assert set(actions[11:]) <= {"watch", "ok"}


def test_thresholds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="roll_back_below must not exceed retrain_below"):
        MonitorThresholds(roll_back_below=0.7)
    with pytest.raises(ValidationError, match="window_s is 45, expected 10, 20, 30 or a multiple of 60"):
        MonitorSettings(window_s=45)
