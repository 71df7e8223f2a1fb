"""Deployments to the SageMaker of this machine: created, moved, taken back, interrupted, refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from flows.delete_endpoint import delete_endpoint
from flows.deploy_endpoint import deploy_endpoint
from flows.roll_back_endpoint import roll_back_endpoint
from tasks.aws import AwsError
from tasks.endpoint_settings import (
    DeleteSettings,
    DrafterUnfit,
    EndpointError,
    EndpointRolledBack,
    RollBackSettings,
)
from tasks.endpoints import list_endpoints
from tasks.promotion import PromotionError, read_version
from tasks.version_record import VersionRecord
from tests.containers.control_plane import steady_load
from tests.flows.endpoint_world import ENDPOINT, FAST_ALARMS, EndpointWorld
from tests.tasks.drafters_on_disk import REJECTED
from tests.tasks.registered_versions import register_version
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


def test_a_version_is_created_moved_to_rolled_back_and_deleted(
    world: EndpointWorld, v1: VersionRecord, v2: VersionRecord
) -> None:
    (endpoint,) = list_endpoints()
    assert (endpoint.status, endpoint.version, endpoint.usd_per_hour) == ("InService", "1", 0.25)
    first_config = world.config_name()
    assert world.champion() == "1"

    with steady_load(world.plane, ENDPOINT) as seen:
        moved = deploy_endpoint(world.settings(v2))
    assert not [answer for answer in seen if answer.startswith("failed")]
    assert moved.config_name == world.config_name() != first_config
    assert moved.previous_config_name == first_config
    assert moved.acceptance_length == pytest.approx(2.0)
    assert world.champion() == "2"
    assert world.plane.answered_by(ENDPOINT).startswith(f"{v2.served_name}-")

    # The same again changes nothing.
    again = deploy_endpoint(world.settings(v2))
    assert (again.config_name, again.previous_config_name) == (moved.config_name, first_config)

    with steady_load(world.plane, ENDPOINT) as seen:
        back = roll_back_endpoint(RollBackSettings(endpoint_name=ENDPOINT, reason="it was a Tuesday"))
    assert not [answer for answer in seen if answer.startswith("failed")]
    assert (back.config_name, back.version) == (first_config, "1")
    assert world.champion() == "1"
    assert read_version("2").rollback_reason == "it was a Tuesday"
    with pytest.raises(EndpointError, match="nothing ran before it"):
        roll_back_endpoint(RollBackSettings(endpoint_name=ENDPOINT, reason="once more"))

    deleted = delete_endpoint(DeleteSettings(endpoint_name=ENDPOINT))
    assert f"endpoint {ENDPOINT}" in deleted
    assert not world.plane.sagemaker.list_endpoint_configs()["EndpointConfigs"]
    assert not world.plane.sagemaker.list_models()["Models"]
    assert delete_endpoint(DeleteSettings(endpoint_name=ENDPOINT)) == ()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"FAKE_ACCEPTANCE_LENGTH": "1.0"}, "acceptance length"),
        ({"FAKE_STATUS": "500"}, "5xx answers"),
        ({"FAKE_NEVER_HEALTHY": "true"}, "ping health check"),
    ],
)
def test_a_bad_version_is_taken_back_in_silence_and_reported_aloud(
    world: EndpointWorld, v1: VersionRecord, v2: VersionRecord, environment: dict[str, str], reason: str
) -> None:
    before = world.config_name()
    settings = world.settings(v2, environment=environment, startup_timeout_s=60)
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"wait_s": 60})})
    with pytest.raises(EndpointRolledBack, match=reason):
        deploy_endpoint(settings)
    assert world.config_name() == before
    assert world.champion() == "1"
    assert world.plane.answered_by(ENDPOINT).startswith(f"{v1.served_name}-")
    assert reason in (read_version("2").rollback_reason or "")
    # The drafter was at fault, not the endpoint: the next version goes through.
    assert deploy_endpoint(world.settings(v2)).version == "2"
    assert read_version("2").rollback_reason is None


def test_a_version_three_times_as_slow_as_the_fleet_beside_it_is_taken_back(
    world: EndpointWorld, tmp_path: Path
) -> None:
    first, second = world.register(tmp_path, "a"), world.register(tmp_path, "b")
    deploy_endpoint(world.settings(first, environment={"FAKE_LATENCY_S": "0.3"}))
    before = world.config_name()
    settings = world.settings(
        second,
        environment={"FAKE_LATENCY_S": "0.9"},
        alarms=FAST_ALARMS.model_copy(update={"max_latency_ratio": 2.0}),
        rollout={"percent": 50, "wait_s": 60, "termination_wait_s": 1, "max_execution_s": 600},
    )
    with pytest.raises(EndpointRolledBack, match="latency over that of the fleet beside it"):
        deploy_endpoint(settings)
    assert world.config_name() == before
    assert world.champion() == "1"


def test_a_version_that_fails_its_first_chats_is_moved_back(
    world: EndpointWorld, v1: VersionRecord, v2: VersionRecord
) -> None:
    before = world.config_name()
    # A shift so short that no alarm has a whole period to judge.
    rollout = {"kind": "all_at_once", "wait_s": 0, "termination_wait_s": 0, "max_execution_s": 600}
    settings = world.settings(v2, environment={"FAKE_ACCEPTANCE_LENGTH": "1.1"}, rollout=rollout)
    with pytest.raises((DrafterUnfit, EndpointRolledBack), match=r"acceptance length"):
        deploy_endpoint(settings)
    assert world.config_name() == before
    assert world.champion() == "1"
    assert "acceptance length" in (read_version("2").rollback_reason or "")


def test_a_killed_deployment_is_taken_up_again(
    world: EndpointWorld, v1: VersionRecord, v2: VersionRecord
) -> None:
    before = world.config_name()
    settings = world.settings(v2)
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"wait_s": 15})})
    process = world.start_flow(settings)
    wait_until(lambda: world.plane.describe(ENDPOINT)["EndpointStatus"] == "Updating")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert world.champion() == "1"
    ended = deploy_endpoint(settings)
    assert ended.previous_config_name == before
    assert world.champion() == "2"


def test_the_next_instance_type_is_tried_where_there_is_no_capacity(
    world: EndpointWorld, tmp_path: Path
) -> None:
    version = world.register(tmp_path, "a")
    world.plane.order_fault(kind="capacity", times=1)
    endpoint = deploy_endpoint(world.settings(version))
    assert endpoint.instance_type == "ml.c5.2xlarge"


def test_a_creation_that_fails_leaves_nothing_and_says_why(world: EndpointWorld, tmp_path: Path) -> None:
    version = world.register(tmp_path, "a")
    with pytest.raises(EndpointError, match=r"could not be created with .*: .*"):
        deploy_endpoint(world.settings(version, environment={"FAKE_EXIT_AT_START": "true"}))
    assert not world.plane.sagemaker.list_endpoints()["Endpoints"]
    assert world.champion() is None
    assert deploy_endpoint(world.settings(version)).status == "InService"


def test_an_update_of_somebody_else_is_not_disturbed(
    world: EndpointWorld, v1: VersionRecord, v2: VersionRecord
) -> None:
    world.plane.create_config("by-hand", {"FAKE_START_S": str(2 * PATIENCE_S)})
    world.plane.sagemaker.update_endpoint(EndpointName=ENDPOINT, EndpointConfigName="by-hand")
    with pytest.raises(EndpointError, match=r"is Updating to by-hand, not by this deployment"):
        deploy_endpoint(world.settings(v2))
    with pytest.raises(EndpointError, match=r"is Updating"):
        roll_back_endpoint(RollBackSettings(endpoint_name=ENDPOINT, reason="impatience"))


def test_a_config_deleted_by_hand_is_named(
    world: EndpointWorld, v1: VersionRecord, v2: VersionRecord
) -> None:
    world.plane.sagemaker.delete_endpoint_config(EndpointConfigName=world.config_name())
    with pytest.raises(EndpointError, match=r"deleted by hand.*\n.*\n.*fledge delete"):
        deploy_endpoint(world.settings(v2))


def test_refused_before_anything_is_created(
    world: EndpointWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = world.register(tmp_path, "a")
    with pytest.raises(PromotionError, match="version '99'"):
        deploy_endpoint(world.settings(version, version="99"))
    rejected = register_version(world.places, tmp_path, "b", REJECTED)
    with pytest.raises(PromotionError, match="did not pass the gate"):
        deploy_endpoint(world.settings(rejected))
    with pytest.raises(PromotionError, match="has not been approved"):
        deploy_endpoint(world.settings(register_version(world.places, tmp_path, "c")))
    with pytest.raises(EndpointError, match="num_speculative_tokens is 0"):
        deploy_endpoint(world.settings(version, num_speculative_tokens=0))
    with pytest.raises(EndpointError, match=r"instance type ml\.g5\.xlarge"):
        deploy_endpoint(world.settings(version, instance_type="ml.g5.xlarge"))
    with pytest.raises(EndpointError, match="1025 bytes"):
        deploy_endpoint(world.settings(version, environment={"X": "x" * 1025}))
    monkeypatch.setenv("FLEDGE_BUCKET", "no-such-bucket")
    with pytest.raises(AwsError, match="no S3 bucket 'no-such-bucket'"):
        deploy_endpoint(world.settings(version))
    for listed in ("list_models", "list_endpoint_configs", "list_endpoints"):
        answer = getattr(world.plane.sagemaker, listed)()
        assert [value for key, value in answer.items() if key != "ResponseMetadata"] == [[]]
