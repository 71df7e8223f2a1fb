"""What is advised on how to serve a drafter, from tables of measured speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from drafter.records import BatchSizeSchedule, EvaluationReport, ScheduledServing, ServingAdvice
from drafter.serving_advice import advise, advise_for, schedule_problem, schedules_to_measure
from tests.drafter.synthetic_evaluation import DOMAIN, UNSEEN, make_cell, make_report

Speeds = Mapping[int, float]  # concurrency -> output tokens/s

PLAIN: Speeds = {1: 40.0, 4: 133.0, 16: 279.0}
SWITCH: Speeds = {1: 62.0, 4: 144.0, 16: 206.0}  # 1.55x, 1.08x, 0.74x
SCHEDULE: BatchSizeSchedule = ((1, 4, 3), (5, 16, 0))


def table(
    by_k: Mapping[int, Speeds], plain: Speeds = PLAIN, scheduled: Speeds | None = None, domain: str = DOMAIN
) -> EvaluationReport:
    """A report of the challenger at each K; `scheduled` is of a server with SCHEDULE."""
    cells = [make_cell(None, 0, level, speed, domain) for level, speed in plain.items()]
    for k, speeds in by_k.items():
        cells += [make_cell("challenger", k, level, speed, domain) for level, speed in speeds.items()]
    report = make_report(cells, [])
    if scheduled is None:
        return report
    measured = tuple(make_cell("challenger", 3, level, speed, domain) for level, speed in scheduled.items())
    one = ScheduledServing(drafter="challenger", schedule=SCHEDULE, cells=measured)
    return report.model_copy(update={"scheduled": (one,)})


def advice(report: EvaluationReport, expected: int = 1, domains: Sequence[str] = (DOMAIN,)) -> ServingAdvice:
    return advise(report, "challenger", domains, expected)


def ratios(*values: float) -> EvaluationReport:
    """K=3 at 1, 4, 16, ... with these ratios to no speculation."""
    levels = [4**position for position in range(len(values))]
    return table(
        {3: {level: 100 * value for level, value in zip(levels, values, strict=True)}},
        plain=dict.fromkeys(levels, 100.0),
    )


@pytest.mark.parametrize(
    ("report", "limit", "said"),
    [
        (ratios(1.5, 1.2, 1.1), None, "K=3 at every load measured: 1.50x at 1, 1.20x at 4, 1.10x at 16."),
        (ratios(0.9, 0.8), 0, "Do not speculate here: with K=3 0.90x at 1, 0.80x at 4."),
        (ratios(1.5), None, "K=3: 1.50x at 1, the only load measured."),
        (ratios(0.9), 0, "Do not speculate here: with K=3 0.90x at 1."),
        (ratios(1.5, 0.8), 1, "where between 1 and 4 it stops paying was not measured."),
        # A ratio within the noise is no gain, and no loss.
        (ratios(1.04), 0, "Do not speculate here: with K=3 1.04x at 1 (within 5% of 1 is no difference)."),
        (ratios(1.05), None, "K=3: 1.05x at 1"),
        (ratios(1.5, 1.02), 1, "Above 1 it gains nothing: 1.02x at 4 (within 5% of 1 is no difference)"),
        (ratios(1.5, 0.97, 1.2), None, "1.50x at 1, 0.97x at 4, 1.20x at 16"),
        (ratios(1.5, 0.97, 0.7), 1, "Above 1 do not speculate: 0.97x at 4, 0.70x at 16"),
        # What comes back above a loss does not count.
        (ratios(1.5, 0.8, 1.3), 1, "Above 1 do not speculate: 0.80x at 4, 1.30x at 16"),
        (ratios(0.8, 1.3), 0, "Do not speculate here"),
    ],
)  # fmt: skip
def test_speculation_is_advised_up_to_the_last_clear_gain_below_the_first_clear_loss(
    report: EvaluationReport, limit: int | None, said: str
) -> None:
    found = advice(report)
    assert found.speculate_up_to_concurrency == limit
    assert said in found.sentence


def test_the_switch_lies_at_the_lower_of_the_two_measured_loads() -> None:
    found = advice(table({3: SWITCH}))
    assert found.speculate_up_to_concurrency == 4
    assert found.sentence == (
        "K=3 up to 4 requests in flight: 1.55x at 1, 1.08x at 4. Above 4 do not speculate: 0.74x at 16; where "
        "between 4 and 16 it stops paying was not measured. Whether vLLM's schedule by batch size does better than one K "
        "was not measured."
    )


def test_a_switch_between_neighbours_leaves_nothing_open() -> None:
    found = advice(table({3: {1: 60.0, 2: 50.0}}, plain={1: 40.0, 2: 80.0}))
    assert "Above 1 do not speculate: 0.62x at 2." in found.sentence


def test_k_is_the_fastest_at_the_expected_load_and_of_equals_the_smallest() -> None:
    report = table({3: {1: 60.0, 4: 150.0}, 5: {1: 60.0, 4: 140.0}, 7: {1: 70.0, 4: 120.0}})
    assert advice(report, 1).num_speculative_tokens == 7
    assert advice(report, 4).num_speculative_tokens == 3
    without = table({3: {1: 60.0}, 5: {1: 60.0}})
    assert advice(without).num_speculative_tokens == 3


def test_a_load_that_was_not_measured_takes_k_from_the_next_lower_one_and_says_so() -> None:
    report = table({3: {1: 60.0, 4: 200.0, 16: 400.0}, 5: {1: 70.0, 4: 180.0, 16: 390.0}})
    between = advice(report, 3)
    assert between.num_speculative_tokens == 5
    assert "3 requests in flight expected, which was not measured; K is that of 1." in between.sentence
    beyond = advice(report, 64)
    assert beyond.num_speculative_tokens == 3
    assert "How it is under more load than was measured is not known." in beyond.sentence
    only_under_load = table({3: {4: 200.0}}, plain={4: 133.0})
    assert "K is that of 4." in advice(only_under_load, 1).sentence


def test_who_expects_more_than_it_pays_for_is_told() -> None:
    assert "At the 16 expected, speculation costs." in advice(table({3: SWITCH}), 16).sentence
    assert "At the 8 expected, speculation is not known to pay." in advice(table({3: SWITCH}), 8).sentence
    assert "expected" not in advice(table({3: SWITCH}), 4).sentence


def test_without_anything_measured_nothing_is_claimed() -> None:
    nothing = advice(make_report([make_cell(None, 0, 1, 58.0)], []))
    assert (nothing.num_speculative_tokens, nothing.speculate_up_to_concurrency) == (None, 0)
    assert nothing.sentence == "No K was measured, so nothing is known of how to serve it."
    alone = advice(table({3: SWITCH}, plain={}))
    assert (alone.num_speculative_tokens, alone.speculate_up_to_concurrency) == (3, 0)
    assert "whether it pays is not known" in alone.sentence


def test_several_domains_count_by_their_geometric_mean_and_only_where_all_were_measured() -> None:
    cells = [
        make_cell(None, 0, 1, 50.0), make_cell("challenger", 3, 1, 100.0),
        make_cell(None, 0, 1, 50.0, UNSEEN), make_cell("challenger", 3, 1, 32.0, UNSEEN),
        make_cell(None, 0, 4, 50.0), make_cell("challenger", 3, 4, 10.0),
    ]  # fmt: skip
    found = advice(make_report(cells, []), domains=(DOMAIN, UNSEEN))
    assert [(one.concurrency, round(one.ratio or 0, 2)) for one in found.measured] == [(1, 1.13)]


# --- schedules --------------------------------------------------------------------------------------


def test_a_schedule_is_measured_where_there_is_a_switch_and_nowhere_else() -> None:
    assert schedules_to_measure(table({3: SWITCH}), "challenger", [DOMAIN]) == (SCHEDULE,)
    for report in (ratios(1.5, 1.2), ratios(0.9, 0.8), ratios(1.5), ratios(1.5, 1.02)):
        assert schedules_to_measure(report, "challenger", [DOMAIN]) == ()


def test_a_schedule_drafts_as_long_as_that_costs_nothing() -> None:
    """A batch without drafts still pays for the drafter's pass, so an even ratio is no reason to stop."""
    even = ratios(1.4, 1.02, 0.7)
    assert advice(even).speculate_up_to_concurrency == 1
    assert schedules_to_measure(even, "challenger", [DOMAIN]) == (SCHEDULE,)


def test_only_ks_that_are_the_fastest_somewhere_get_a_schedule() -> None:
    slower = {1: 61.0, 4: 143.0, 16: 150.0}
    assert schedules_to_measure(table({3: SWITCH, 5: slower}), "challenger", [DOMAIN]) == (SCHEDULE,)


@pytest.mark.parametrize(
    ("scheduled", "adopted", "said"),
    [
        ({1: 62.0, 4: 142.0, 16: 260.0}, True, "K=3 for up to 4 requests in flight and none from 5"),
        ({1: 62.0, 4: 120.0, 16: 260.0}, False, "No schedule by batch size: it was 1.00x at 1, 0.83x at 4, 1.26x at 16"),
        ({1: 62.0, 4: 144.0, 16: 210.0}, False, "No schedule by batch size"),
    ],
)  # fmt: skip
def test_a_schedule_is_recommended_only_if_it_measured_clearly_better_than_k_alone(
    scheduled: Speeds, adopted: bool, said: str
) -> None:
    found = advice(table({3: SWITCH}, scheduled=scheduled))
    assert found.schedule == (SCHEDULE if adopted else ())
    assert said in found.sentence


def test_a_schedule_of_another_switch_is_not_taken_for_this_one() -> None:
    """The gate may judge other domains than the evaluation derived its schedule from."""
    report = table({3: {1: 62.0, 4: 100.0, 16: 206.0}}, scheduled={1: 62.0, 4: 142.0, 16: 260.0})
    found = advice(report)
    assert found.schedule == ()
    assert "was not measured" in found.sentence


def test_the_same_measurements_advise_for_another_load() -> None:
    report = table({3: {1: 60.0, 4: 150.0}, 7: {1: 70.0, 4: 120.0}})
    assert advise_for(advice(report, 1), 4) == advice(report, 4)
    scheduled = table({3: SWITCH}, scheduled={1: 62.0, 4: 142.0, 16: 260.0})
    assert advise_for(advice(scheduled, 1), 4).schedule == SCHEDULE


def test_advice_reads_back_as_it_was_written() -> None:
    found = advice(table({3: SWITCH}, scheduled={1: 62.0, 4: 142.0, 16: 260.0}))
    assert ServingAdvice.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ((), None),
        (SCHEDULE, None),
        (((1, 4, 3), (32, 64, 0)), None),
        (((2, 4, 3),), "begins at 2"),
        (((0, 4, 3),), "below 1"),
        (((1, 4, 3), (4, 8, 0)), "within the one before"),
        (((1, 4, 3), (8, 5, 0)), "ends before it begins"),
        (((1, 4, 3), (5, 8, 2)), "drafts 3 tokens or none"),
    ],
)
def test_a_schedule_that_vllm_would_refuse_or_serve_wrong_is_named(
    schedule: BatchSizeSchedule, said: str | None
) -> None:
    problem = schedule_problem(schedule, 3)
    assert problem is None if said is None else said in (problem or "")
