"""What the approver reads above the form."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks.approval_page import approval_text
from tasks.endpoint_settings import DeploySettings, EndpointError, RolloutSettings
from tasks.promotion import read_version, record_rollback, set_champion
from tasks.settings import Places
from tests.tasks.registered_versions import register_version

EXPIRES_AT = datetime(2026, 3, 8, 12, tzinfo=UTC)


def test_it_shows_what_was_measured_and_what_the_gate_found(places: Places, tmp_path: Path) -> None:
    text = approval_text(register_version(places, tmp_path), None, EXPIRES_AT)

    assert text.startswith("### Put version 1 of fledge-drafter into production?")
    assert "There is no champion yet" in text
    assert "| acceptance, K=3 | this | champion |" in text
    assert "| code | 1.86 (1.76 to 1.96) | 1.74 (1.64 to 1.84) |" in text
    assert "| general | 1.09 (0.99 to 1.19) |  |" in text
    assert "| code | 72.0 | 67.0 | 58.0 |" in text
    assert "| general | 44.0 |  |  |" in text
    assert "**How to serve it.** K=3 up to 1 request in flight: 1.24x at 1. Above 1 do not speculate" in text
    assert "- AL 2.0 is above 1.5" in text
    assert f"[Report]({(tmp_path / 'evaluation-a/report.html').as_uri()})" in text
    assert "nothing is deployed" in text
    assert "2026-03-08 12:00 UTC" in text


def test_it_says_which_champion_would_go_and_that_the_version_was_taken_back_before(
    places: Places, tmp_path: Path
) -> None:
    register_version(places, tmp_path, "a")
    register_version(places, tmp_path, "b")
    set_champion.fn("1", "fledge", "one")
    record_rollback.fn("2", "alarm fledge-v2-5xx")

    text = approval_text(read_version("2"), None, EXPIRES_AT)

    assert "It would replace version 1, the champion." in text
    assert "It was taken back once" in text
    assert "alarm fledge-v2-5xx" in text


def test_it_says_what_will_be_deployed(places: Places, tmp_path: Path) -> None:
    deployment = DeploySettings(
        endpoint_name="birds",
        instance_type="ml.g5.2xlarge",
        instance_count=2,
        rollout=RolloutSettings(percent=25, wait_s=120),
    )

    text = approval_text(register_version(places, tmp_path), deployment, EXPIRES_AT)

    assert "- endpoint `birds`, model `smollm2-135m-instruct`, on 2 x ml.g5.2xlarge" in text
    assert "- K=3, drafted in parallel\n" in text
    assert "25 % of the traffic first, the rest after 120 s without an alarm" in text


def test_it_says_which_batches_will_be_drafted_for(places: Places, tmp_path: Path) -> None:
    deployment = DeploySettings(num_speculative_tokens_per_batch_size=((1, 4, 3), (5, 16, 0)))

    text = approval_text(register_version(places, tmp_path), deployment, EXPIRES_AT)

    assert "- K=3, drafted in parallel, by requests in the batch: 3 for 1 to 4, none for 5 to 16" in text


def test_a_model_that_is_not_in_the_catalogue_is_refused_before_anybody_is_asked(
    places: Places, tmp_path: Path
) -> None:
    with pytest.raises(EndpointError, match="model 'tinyllama' is not in the catalogue"):
        approval_text(register_version(places, tmp_path), DeploySettings(model="tinyllama"), EXPIRES_AT)
