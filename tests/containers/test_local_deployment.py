"""Create, update, roll back, scale and delete, with real processes behind the API and kills in between."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.containers.control_plane import (
    VARIANT,
    ControlPlane,
    canary,
    forget_everything,
    refusal,
    steady_load,
)
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.slow

ENDPOINT = "fledge"
V1, V2 = "fledge-v1", "fledge-v2"


@pytest.fixture(scope="module")
def server(moto: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A server for all tests: a start takes seconds."""
    plane = ControlPlane(tmp_path_factory.mktemp("home"), moto)
    plane.start()
    yield plane
    plane.close()


@pytest.fixture
def plane(server: ControlPlane, moto: str) -> Iterator[ControlPlane]:
    """The running server, with nothing but endpoint `fledge` in service on config `fledge-v1`."""
    server.create_endpoint(ENDPOINT, server.create_config(V1))
    forget_everything(moto)  # configs have the same names in all tests, and alarms look back
    yield server
    server.delete_everything()


def update(plane: ControlPlane, config_name: str, deployment: dict | None = None) -> None:
    request = {"DeploymentConfig": deployment} if deployment else {}
    plane.sagemaker.update_endpoint(EndpointName=ENDPOINT, EndpointConfigName=config_name, **request)


def wait_for_canary(plane: ControlPlane) -> None:
    """Until the new fleet has its first share of the traffic."""

    def is_baking() -> bool:
        pending = plane.describe(ENDPOINT).get("PendingDeploymentSummary", {})
        variants = pending.get("ProductionVariants", [{}])
        return variants[0].get("VariantStatus", [{}])[0].get("Status") == "Baking"

    wait_until(is_baking)


def pending_weight(plane: ControlPlane) -> float:
    pending = plane.describe(ENDPOINT)["PendingDeploymentSummary"]
    return float(pending["ProductionVariants"][0]["CurrentWeight"])


def test_canary_takes_its_share_then_everything_and_no_request_fails(plane: ControlPlane) -> None:
    old_pids = plane.pids(V1)
    plane.create_config(V2)
    with steady_load(plane, ENDPOINT) as seen:
        update(plane, V2, canary(percent=20, wait_s=30, TerminationWaitInSeconds=3))
        assert refusal(plane.sagemaker.update_endpoint, EndpointName=ENDPOINT, EndpointConfigName=V2) == (
            "ValidationException",
            'Cannot update in-progress endpoint "arn:aws:sagemaker:us-east-1:123456789012:endpoint/fledge".',
        )
        assert refusal(plane.sagemaker.delete_endpoint, EndpointName=ENDPOINT)[1].startswith(
            "Cannot update in-progress endpoint"
        )
        wait_for_canary(plane)
        during = plane.describe(ENDPOINT)
        asked = len(seen) + 1  # one may be on its way since before
        wait_until(lambda: len(seen) >= asked + 30)
        share = seen[asked : asked + 30].count(V2) / 30
        assert pending_weight(plane) == pytest.approx(0.2), "measured into the next step"
        assert abs(share - 0.2) <= 0.1
        after = plane.settled(ENDPOINT)
        assert plane.share(ENDPOINT, V2, 20) == 1.0

    assert during["EndpointStatus"] == "Updating"
    assert during["EndpointConfigName"] == V1
    pending = during["PendingDeploymentSummary"]
    assert pending["EndpointConfigName"] == V2
    assert pending["ProductionVariants"][0]["CurrentWeight"] == pytest.approx(0.2)
    assert during["ProductionVariants"][0]["CurrentWeight"] == pytest.approx(0.8)
    assert after["EndpointConfigName"] == V2
    assert "PendingDeploymentSummary" not in after
    assert "FailureReason" not in after
    assert after["LastDeploymentConfig"] == canary(percent=20, wait_s=30, TerminationWaitInSeconds=3)
    assert [answer for answer in seen if answer not in (V1, V2)] == []
    assert not any(is_alive(pid) for pid in old_pids)


def test_an_alarm_puts_all_traffic_on_the_old_fleet_within_seconds(plane: ControlPlane) -> None:
    plane.create_config(V2, {"FAKE_STATUS": "500"})
    plane.create_alarm("v2-5xx", ENDPOINT, V2)
    with steady_load(plane, ENDPOINT, every_s=0.05) as seen:
        update(plane, V2, canary(percent=50, wait_s=120, alarms=("v2-5xx",)))
        wait_until(lambda: "ALARM" in alarm_states(plane))
        alarm_at = time.monotonic()
        wait_until(lambda: plane.describe(ENDPOINT)["EndpointStatus"] != "Updating")
        assert time.monotonic() - alarm_at < 60
        asked = len(seen)
        wait_until(lambda: len(seen) > asked + 20)
        assert all(answer == V1 for answer in seen[asked + 1 : asked + 20])
    after = plane.settled(ENDPOINT)
    assert after["EndpointStatus"] == "InService"
    assert after["EndpointConfigName"] == V1
    assert "v2-5xx" in after["FailureReason"]
    assert plane.pids(V2) == []
    assert any(answer.startswith("failed") for answer in seen), "v2 was meant to fail"


def test_a_canary_that_crashes_is_taken_back_and_costs_at_most_what_it_was_answering(
    plane: ControlPlane,
) -> None:
    plane.create_config(V2, {"FAKE_CRASH_AFTER_S": "15"})
    plane.create_alarm("v2-crash", ENDPOINT, V2)
    lost_before = plane.log.count("lost instance")
    with steady_load(plane, ENDPOINT, every_s=0.05) as seen:
        update(plane, V2, canary(percent=50, wait_s=120, alarms=("v2-crash",)))
        after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V1
    assert after["FailureReason"]
    assert V2 in seen, "it was meant to have traffic before it crashed"
    failed = [answer for answer in seen if answer.startswith("failed")]
    # One client: at most one request is on its way in each crash. The alarm may end the update before the last
    # crash is noticed by the health check.
    crashes = plane.log.count("lost instance") - lost_before + 1
    assert len(failed) <= crashes, failed
    assert all("ModelError" in answer for answer in failed)


def alarm_states(plane: ControlPlane) -> list[str]:
    return [alarm["StateValue"] for alarm in plane.cloudwatch.describe_alarms()["MetricAlarms"]]


def test_an_alarm_in_the_termination_wait_still_rolls_back(plane: ControlPlane) -> None:
    plane.create_config(V2)
    plane.create_alarm("late", ENDPOINT, V2, MetricName="Late", Namespace="Fledge")
    update(plane, V2, canary(wait_s=1, alarms=("late",), TerminationWaitInSeconds=120))
    wait_until(lambda: plane.share(ENDPOINT, V2, 10) == 1.0)
    dimensions = plane.cloudwatch.describe_alarms(AlarmNames=["late"])["MetricAlarms"][0]["Dimensions"]
    plane.cloudwatch.put_metric_data(
        Namespace="Fledge", MetricData=[{"MetricName": "Late", "Dimensions": dimensions, "Value": 1.0}]
    )
    after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V1
    assert plane.share(ENDPOINT, V1, 10) == 1.0


def test_an_update_whose_alarm_vanished_while_the_server_was_away_is_taken_back(plane: ControlPlane) -> None:
    """A restart of everything empties moto: going on would be an unwatched update."""
    plane.create_config(V2)
    plane.create_alarm("gone", ENDPOINT, V2)
    update(plane, V2, canary(wait_s=120, alarms=("gone",)))
    wait_for_canary(plane)
    plane.end(signal.SIGKILL)
    plane.cloudwatch.delete_alarms(AlarmNames=["gone"])
    plane.start()
    after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V1
    assert "no longer exist: gone" in after["FailureReason"]


@pytest.mark.parametrize(
    ("environment", "fault", "reason"),
    [
        ({"FAKE_EXIT_AT_START": "true"}, None, "did not pass the ping health check"),
        ({}, "capacity", "InsufficientInstanceCapacity"),
    ],
)
def test_a_fleet_that_does_not_come_up_leaves_the_old_config(
    plane: ControlPlane, environment: dict[str, str], fault: str | None, reason: str
) -> None:
    plane.create_config(V2, environment)
    if fault:
        plane.order_fault(kind=fault, config=V2, times=1)
    with steady_load(plane, ENDPOINT) as seen:
        update(plane, V2, canary())
        after = plane.settled(ENDPOINT)
        wait_until(lambda: len(seen) > 5)
    assert after["EndpointStatus"] == "InService"
    assert after["EndpointConfigName"] == V1
    assert reason in after["FailureReason"]
    assert set(seen) == {V1}


def test_without_capacity_for_one_instance_type_the_next_of_its_pools_is_taken(plane: ControlPlane) -> None:
    types = ["ml.g7e.2xlarge", "ml.g6e.2xlarge"]
    pools = [{"InstanceType": name, "Priority": number} for number, name in enumerate(types, start=1)]
    plane.create_config(V2, InstancePools=pools)
    plane.order_fault(kind="capacity", config=V2, times=1)
    update(plane, V2)
    after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V2
    assert after["ProductionVariants"][0]["InstancePools"] == [
        {"InstanceType": "ml.g6e.2xlarge", "CurrentInstanceCount": 1}
    ]


def test_an_update_cut_by_sigkill_in_its_canary_goes_on_with_the_same_processes(plane: ControlPlane) -> None:
    plane.create_config(V2)
    update(plane, V2, canary(percent=20, wait_s=8))
    wait_for_canary(plane)
    pids = plane.pids(V1) + plane.pids(V2)
    plane.end(signal.SIGKILL)
    assert all(is_alive(pid) for pid in pids), "instances must outlive the server"
    plane.start()
    assert sorted(plane.pids(V1) + plane.pids(V2)) == sorted(pids)
    after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V2
    assert plane.share(ENDPOINT, V2, 10) == 1.0
    assert plane.pids(V1) == []
    assert [is_alive(pid) for pid in pids] == [False, True]


def test_an_update_cut_by_sigkill_while_it_launches_is_finished(plane: ControlPlane) -> None:
    plane.create_config(V2, {"FAKE_START_S": "4"})
    update(plane, V2)
    wait_until(lambda: plane.pids(V2))
    launching = plane.pids(V2)
    plane.end(signal.SIGKILL)
    plane.start()
    assert plane.answered_by(ENDPOINT) in (V1, V2)
    after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V2
    assert plane.pids(V2) == launching, "the process that was starting is used, not a second one"


def test_sigterm_ends_the_instances_and_the_next_start_brings_them_back(plane: ControlPlane) -> None:
    pids = plane.pids(V1)
    plane.end(signal.SIGTERM)
    assert not any(is_alive(pid) for pid in pids)
    plane.start()
    assert plane.describe(ENDPOINT)["EndpointStatus"] in ("SystemUpdating", "InService")
    after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V1
    assert plane.answered_by(ENDPOINT) == V1


def test_an_instance_killed_during_an_update_is_replaced_and_the_update_ends(plane: ControlPlane) -> None:
    plane.create_config(V2)
    with steady_load(plane, ENDPOINT) as seen:
        update(plane, V2, canary(percent=50, wait_s=6))
        wait_for_canary(plane)
        os.kill(plane.pids(V1)[0], signal.SIGKILL)
        after = plane.settled(ENDPOINT)
    assert after["EndpointConfigName"] == V2
    failed = [answer for answer in seen if answer.startswith("failed")]
    assert len(failed) <= 1, failed  # the one that it was answering, if any


def test_weights_and_counts_change_and_go_back_when_there_is_no_capacity(plane: ControlPlane) -> None:
    change = plane.sagemaker.update_endpoint_weights_and_capacities
    wanted = {"VariantName": VARIANT, "DesiredInstanceCount": 2, "DesiredWeight": 3.0}
    change(EndpointName=ENDPOINT, DesiredWeightsAndCapacities=[wanted])
    variant = plane.settled(ENDPOINT)["ProductionVariants"][0]
    assert (variant["CurrentInstanceCount"], variant["DesiredInstanceCount"]) == (2, 2)
    assert variant["CurrentWeight"] == 3.0
    assert len(plane.pids(V1)) == 2

    change(EndpointName=ENDPOINT, DesiredWeightsAndCapacities=[{**wanted, "DesiredInstanceCount": 1}])
    assert plane.settled(ENDPOINT)["ProductionVariants"][0]["CurrentInstanceCount"] == 1

    # More than this machine's memory.
    change(EndpointName=ENDPOINT, DesiredWeightsAndCapacities=[{**wanted, "DesiredInstanceCount": 200}])
    after = plane.settled(ENDPOINT)
    assert "InsufficientInstanceCapacity" in after["FailureReason"]
    assert after["ProductionVariants"][0]["DesiredInstanceCount"] == 1
    assert plane.answered_by(ENDPOINT) == V1


def test_a_create_that_fails_is_failed_and_can_only_be_deleted(plane: ControlPlane) -> None:
    plane.create_config("bad", {"FAKE_EXIT_AT_START": "true"})
    plane.sagemaker.create_endpoint(EndpointName="other", EndpointConfigName="bad")
    failed = plane.settled("other")
    assert failed["EndpointStatus"] == "Failed"
    assert "ping health check" in failed["FailureReason"]
    code, message = refusal(plane.sagemaker.update_endpoint, EndpointName="other", EndpointConfigName=V1)
    assert code == "ValidationException"
    assert "deleted" in message
    plane.sagemaker.delete_endpoint(EndpointName="other")
    wait_until(lambda: "other" not in names(plane))


def test_deleting_ends_the_processes_and_forgets_the_endpoint(plane: ControlPlane) -> None:
    pids = plane.pids(V1)
    plane.sagemaker.delete_endpoint(EndpointName=ENDPOINT)
    wait_until(lambda: names(plane) == [])
    assert not any(is_alive(pid) for pid in pids)
    code, message = refusal(plane.sagemaker.describe_endpoint, EndpointName=ENDPOINT)
    assert (code, message) == (
        "ValidationException",
        'Could not find endpoint "arn:aws:sagemaker:us-east-1:123456789012:endpoint/fledge".',
    )
    plane.create_endpoint(ENDPOINT, V1)  # the name is free again


def names(plane: ControlPlane) -> list[str]:
    return [item["EndpointName"] for item in plane.sagemaker.list_endpoints()["Endpoints"]]
