"""What people are told of costs, models and endpoints."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flows.endpoint_commands import what_comes_next
from flows.endpoint_tables import answer_line, endpoint_words, show_endpoint, show_models, total_cost
from tasks.chat_stream import StreamedAnswer
from tasks.endpoint_settings import EndpointRecord
from tasks.endpoint_status import EndpointStatus, FleetStatus
from tasks.model_cards import list_cards, model_card
from tasks.settings import Places


def fleet(usd_per_hour: float | None) -> FleetStatus:
    return FleetStatus(
        config_name="birds-v3-0123abcd",
        state="serving",
        version="3",
        served_name="fledge-drafter-v3",
        model="gpt-oss-20b",
        instance_type="ml.g7e.2xlarge",
        instance_count=2,
        requests=0,
        share_of_traffic=None,
        usd_per_hour=usd_per_hour,
    )


def status(*prices: float | None) -> EndpointStatus:
    return EndpointStatus(
        endpoint_name="birds",
        status="InService",
        config_name="birds-v3-0123abcd",
        created_at=datetime.now(UTC),
        modified_at=datetime.now(UTC),
        failure_reason=None,
        fleets=tuple(fleet(price) for price in prices),
        usd_per_hour=None if None in prices else sum(price or 0 for price in prices),
    )


def test_costs_are_added_and_what_is_unknown_is_not_taken_for_nothing() -> None:
    assert total_cost([status(1.5), status(2.5)]) == "$4.00 an hour, $2,920.00 a month"
    assert (
        total_cost([status(1.5, None)])
        == "$1.50 an hour, $1,095.00 a month and more: not every price is known"
    )
    assert "unknown" in total_cost([status(None)])


def test_who_deletes_is_told_what_runs_and_what_it_costs() -> None:
    assert endpoint_words("birds", status(3.0)) == (
        "birds is InService: fledge-drafter-v3 on 2 x ml.g7e.2xlarge; $3.00 an hour"
    )
    assert "there is no endpoint birds" in endpoint_words("birds", None)


def test_an_answer_without_a_drafter_claims_no_acceptance() -> None:
    answer = StreamedAnswer(
        text="",
        served_name="plain",
        latency_s=0.5,
        first_token_s=0.0,
        prompt_tokens=3,
        output_tokens=0,
        tokens_per_second=None,
        acceptance_length=None,
    )
    assert answer_line(answer).endswith("0 tokens, no tokens, no acceptance told")


def test_a_deployment_ends_with_what_one_may_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    show_endpoint(
        EndpointRecord(
            endpoint_name="birds",
            status="InService",
            config_name="birds-v4-0123abcd",
            previous_config_name="birds-v3-0123abcd",
            served_name="fledge-drafter-v4",
            latency_ms=1234.0,
            acceptance_length=1.875,
        )
    )
    said = capsys.readouterr().out
    assert "first answers: 1.23 s, acceptance length 1.88" in said
    assert "unknown an hour until: fledge delete birds" in said
    assert "back to birds-v3-0123abcd: fledge roll-back birds --reason ..." in said


def test_a_card_shows_the_speculative_config_as_it_is_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    card = model_card(Places(), "gpt-oss-20b", num_speculative_tokens=5)
    show_models(card)
    lines = capsys.readouterr().out.splitlines()
    sent = card.environment["SM_VLLM_SPECULATIVE_CONFIG"]
    assert sent in lines
    assert card.speculative_config == {
        "model": "/opt/ml/additional-model-data-sources/eagle",
        "method": "eagle3",
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }


def test_every_model_is_listed_by_the_name_that_deploys_it(capsys: pytest.CaptureFixture[str]) -> None:
    cards = list_cards(Places())
    show_models(cards)
    said = capsys.readouterr().out
    assert {card.name for card in cards} >= {"gpt-oss-120b", "smollm2-135m-instruct"}
    assert [card.name for card in cards if card.name not in said] == []


def test_nobody_is_told_to_deploy_beside_a_run_that_deploys() -> None:
    assert what_comes_next("4", deploys=False) == "next: fledge deploy 4"
    assert "fledge deploy" not in what_comes_next("4", deploys=True)
