"""A version that is deployed again with other settings stands beside itself: two fleets, one version."""

from __future__ import annotations

import json

import pytest

from flows.deploy_endpoint import deploy_endpoint
from flows.roll_back_endpoint import roll_back_endpoint
from tasks.endpoint_settings import EndpointRolledBack, RollBackSettings, RolloutSettings
from tasks.promotion import read_version
from tasks.version_record import VersionRecord
from tests.flows.endpoint_world import ENDPOINT, FAST_ALARMS, EndpointWorld

pytestmark = pytest.mark.slow


def k_of(world: EndpointWorld, config_name: str) -> int:
    """The K that a config's server is told."""
    config = world.plane.sagemaker.describe_endpoint_config(EndpointConfigName=config_name)
    model = world.plane.sagemaker.describe_model(ModelName=config["ProductionVariants"][0]["ModelName"])
    told = json.loads(model["PrimaryContainer"]["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"])
    return int(told["num_speculative_tokens"])


def test_settings_that_are_worse_are_taken_back_and_the_version_stays_champion(
    world: EndpointWorld, v1: VersionRecord
) -> None:
    before, named = world.config_name(), world.plane.answered_by(ENDPOINT)
    settings = world.settings(
        v1,
        # Told apart by name only: were it one name, no fleet would be beside the other to compare with.
        environment={"FAKE_LATENCY_S": "0.6"},
        alarms=FAST_ALARMS.model_copy(update={"max_latency_ratio": 2.0}),
        rollout=RolloutSettings(percent=50, wait_s=60, termination_wait_s=1, max_execution_s=600),
    )
    with pytest.raises(EndpointRolledBack, match="latency over that of the fleet beside it"):
        deploy_endpoint(settings)
    assert (world.config_name(), world.plane.answered_by(ENDPOINT)) == (before, named)
    assert world.champion() == "1"
    assert read_version("1").rolled_back_at is None, "it serves, as it did before"


def test_going_back_to_earlier_settings_leaves_version_and_champion_alone(
    world: EndpointWorld, v1: VersionRecord, v2: VersionRecord
) -> None:
    first = deploy_endpoint(world.settings(v2))
    again = deploy_endpoint(world.settings(v2, num_speculative_tokens=2))
    assert (k_of(world, first.config_name), k_of(world, again.config_name)) == (3, 2)
    assert again.version == first.version == "2"
    assert again.served_name != first.served_name
    assert world.plane.answered_by(ENDPOINT) == again.served_name

    back = roll_back_endpoint(RollBackSettings(endpoint_name=ENDPOINT, reason="two were too few"))
    assert back.config_name == first.config_name
    assert world.plane.answered_by(ENDPOINT) == first.served_name
    assert world.champion() == "2"
    assert read_version("2").rolled_back_at is None
