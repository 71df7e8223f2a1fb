"""What a deployment's server is told of its drafter, and where that comes from."""

from __future__ import annotations

import json

import pytest

from drafter.records import BatchSizeSchedule, MeasuredGain, MeasuredSchedule, ServingAdvice
from tasks.build_endpoint import build_plan
from tasks.catalogue import find_entry
from tasks.endpoint_settings import DeploySettings, EndpointError
from tasks.speculation import choose_speculation
from tests.tasks.test_build_endpoint import SOURCES, version

SMALL, LARGE = find_entry("smollm2-135m-instruct"), find_entry("gpt-oss-20b")
SCHEDULE: BatchSizeSchedule = ((1, 4, 3), (5, 16, 0))


def gain(k: int, concurrency: int, speed: float) -> MeasuredGain:
    return MeasuredGain(
        num_speculative_tokens=k,
        concurrency=concurrency,
        output_tokens_per_second=speed,
        ratio=speed / {1: 40.0, 4: 133.0, 16: 279.0}[concurrency],
    )


ADVICE = ServingAdvice(
    expected_concurrency=1,
    num_speculative_tokens=3,
    speculate_up_to_concurrency=4,
    schedule=SCHEDULE,
    sentence="K=3 up to 4 requests in flight.",
    measured=(gain(3, 1, 62.0), gain(3, 4, 144.0), gain(3, 16, 206.0), gain(5, 4, 160.0), gain(5, 16, 150.0)),
    scheduled=(MeasuredSchedule(schedule=SCHEDULE, gains=(gain(3, 1, 62.0), gain(3, 16, 260.0))),),
    vllm_version="0.32.0",
)
ADVISED = version(advice=ADVICE)


def served_config(settings: DeploySettings) -> dict[str, object]:
    """SM_VLLM_SPECULATIVE_CONFIG of the endpoint's model."""
    made = build_plan(settings, SMALL, ADVISED, SOURCES, settings.image or SMALL.image or "", "ml.m5.xlarge")
    environment = made.create_model["PrimaryContainer"]["Environment"]
    config: dict[str, object] = json.loads(environment["SM_VLLM_SPECULATIVE_CONFIG"])
    return config


def test_the_served_config_carries_k_and_schedule_as_advised() -> None:
    assert served_config(DeploySettings()) == {
        "model": "/opt/ml/additional-model-data-sources/eagle",
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 0]],
    }


def test_without_an_advised_schedule_none_is_sent() -> None:
    plain = choose_speculation(
        DeploySettings(), version(advice=ADVICE.model_copy(update={"schedule": ()})), SMALL
    )
    assert (plain.num_speculative_tokens, plain.schedule, plain.note) == (3, (), None)


def test_k_is_the_settings_then_the_advised_then_the_judged_then_the_catalogues() -> None:
    def chosen(settings: DeploySettings, **changes: object) -> int:
        return choose_speculation(settings, version(**changes), SMALL).num_speculative_tokens

    advice = ADVICE.model_copy(update={"num_speculative_tokens": 4, "schedule": ()})
    assert chosen(DeploySettings(num_speculative_tokens=2), advice=advice) == 2
    assert chosen(DeploySettings(), advice=advice) == 4
    assert chosen(DeploySettings(), num_speculative_tokens=5) == 5
    assert chosen(DeploySettings(), num_speculative_tokens=None) == 3
    assert choose_speculation(DeploySettings(), None, SMALL).advice is None


def test_a_load_that_differs_from_the_evaluations_is_looked_up_in_what_was_measured() -> None:
    chosen = choose_speculation(DeploySettings(expected_concurrency=4), ADVISED, SMALL)
    assert (chosen.num_speculative_tokens, chosen.schedule) == (5, ())
    assert chosen.advice is not None
    assert "K=5 up to 4 requests in flight" in chosen.advice


def test_a_schedule_can_be_switched_off_and_given() -> None:
    off = served_config(DeploySettings(num_speculative_tokens_per_batch_size=()))
    assert "num_speculative_tokens_per_batch_size" not in off
    own = DeploySettings(
        num_speculative_tokens=2, num_speculative_tokens_per_batch_size=((1, 8, 2), (9, 9, 0))
    )
    assert served_config(own)["num_speculative_tokens_per_batch_size"] == [[1, 8, 2], [9, 9, 0]]


def test_a_schedule_with_another_k_than_the_drafters_is_refused() -> None:
    settings = DeploySettings(num_speculative_tokens_per_batch_size=((1, 4, 3), (5, 8, 2)))
    with pytest.raises(
        EndpointError, match=r"K=2 for 5 to 8: with parallel drafting vLLM drafts 3 .* or none"
    ):
        choose_speculation(settings, ADVISED, SMALL)


def test_a_schedule_is_left_out_where_it_was_not_measured() -> None:
    other_k = choose_speculation(DeploySettings(num_speculative_tokens=2), ADVISED, SMALL)
    assert other_k.schedule == ()
    assert "measured with K=3" in (other_k.note or "")
    older = choose_speculation(DeploySettings(), ADVISED, LARGE)
    assert older.schedule == ()
    assert "measured with vLLM 0.32.0, the image's is 0.30.0" in (older.note or "")
    unknown = choose_speculation(DeploySettings(image="own/vllm:latest"), ADVISED, SMALL)
    assert "the image's is unknown" in (unknown.note or "")
    newer = choose_speculation(DeploySettings(image="own/vllm:v0.33.1-cpu"), ADVISED, SMALL)
    assert (newer.schedule, newer.note) == (SCHEDULE, None)
