"""A drafter's way into production and out of it again, with the real vLLM and a client that never stops asking."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.deploy_endpoint import deploy_endpoint
from flows.roll_back_endpoint import roll_back_endpoint
from tasks.endpoint_settings import EndpointRolledBack, RollBackSettings, RolloutSettings
from tasks.promotion import read_version
from tasks.settings import Places
from tasks.version_record import VersionRecord
from tests.containers.control_plane import ControlPlane, forget_everything
from tests.flows.conftest import free_port
from tests.flows.endpoint_world import ENDPOINT, EndpointWorld, copy_database
from tests.flows.real_endpoints import RealEndpoints, SeenAlarms
from tests.flows.steady_load import Answered, SteadyLoad
from tests.waiting import is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
ROLLED_BACK_WITHIN_S = 60
# Longer than any alarm takes, which ends it: what a canary is judged by at its end has other words.
UNTIL_THE_ALARM = RolloutSettings(percent=30, wait_s=300, termination_wait_s=5, max_execution_s=900)


@pytest.fixture(scope="module")
def endpoints(
    harness: None,
    moto: str,
    database: Path,
    servable_target: Path,
    servable_drafter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealEndpoints]:
    """One installation for all tests here: they tell one story, in order."""
    home = tmp_path_factory.mktemp("real") / "home"
    copy_database(database, home)
    forget_everything(moto)
    plane = ControlPlane(home, moto)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in EndpointWorld.environment(home, plane, moto).items():
            patch.setenv(name, value)
        patch.setenv("FLEDGE_APPROVERS", "alice")
        patch.delenv("FLEDGE_MLFLOW_TRACKING_URI", raising=False)
        patch.setattr("tasks.catalogue.CATALOGUE", home / "catalogue.yaml")
        world = RealEndpoints(Places(), plane, moto, servable_target, servable_drafter)
        world.prepare(home)
        plane.start()
        yield world
        plane.close()


@pytest.fixture(scope="module")
def first(endpoints: RealEndpoints) -> VersionRecord:
    """A version in production."""
    version = endpoints.make("a")
    endpoints.promote(version)
    return version


@pytest.fixture(scope="module")
def second(endpoints: RealEndpoints, first: VersionRecord) -> VersionRecord:
    """Its successor, not deployed yet."""
    return endpoints.make("b")


@dataclass(frozen=True)
class Crash:
    """A server's death. Until its process is gone its port still takes requests, which nobody reads.

    Times are seconds of time.monotonic().
    """

    killed_at: float
    gone_at: float

    def may_cost(self, request: Answered) -> bool:
        """Whether a request can have been with the server as it died."""
        return request.sent_at <= self.gone_at and request.ended_at >= self.killed_at


@contextmanager
def crashing(
    endpoints: RealEndpoints, load: SteadyLoad, version: VersionRecord, after_s: float = 5
) -> Iterator[list[Crash]]:
    """Kill every instance of a version some seconds after it has begun to answer; yields what was killed."""
    crashes: list[Crash] = []
    ended = threading.Event()

    def crash() -> None:
        while not ended.wait(0.5):
            answers = load.answered_by(version)
            if not answers or time.monotonic() < answers[0].sent_at + after_s:
                continue
            for row in endpoints.plane.instances():
                if f"-v{version.version}-" in row["config_name"] and row["state"] == "in_service":
                    killed_at = time.monotonic()
                    os.killpg(os.getpgid(row["pid"]), signal.SIGKILL)
                    while is_alive(row["pid"]):
                        time.sleep(0.01)
                    crashes.append(Crash(killed_at, time.monotonic()))

    thread = threading.Thread(target=crash)
    thread.start()
    yield crashes
    ended.set()
    thread.join()


def test_a_canary_takes_over_and_no_request_fails(
    endpoints: RealEndpoints, first: VersionRecord, second: VersionRecord
) -> None:
    old_instances = endpoints.plane.pids(endpoints.config_name())
    with endpoints.load() as load:
        promoted = endpoints.promote(second)
        moved_at = time.monotonic()
        wait_until(lambda: load.num_sent_since(moved_at) >= 5)
    assert not load.failed
    assert {one.streamed for one in load.answers} == {True, False}
    began_at = load.answered_by(second)[0].sent_at
    assert load.share_of(second, began_at, began_at + 20) == pytest.approx(0.3, abs=0.1)
    assert load.share_of(second, moved_at) == 1.0
    assert not any(is_alive(pid) for pid in old_instances)
    assert endpoints.champion() == second.version
    assert promoted.endpoint.version == second.version
    # Measured by the flow's own chats with the new fleet: the drafter drafts.
    assert promoted.endpoint.acceptance_length > 1.3


@contextmanager
def taken_back(endpoints: RealEndpoints, version: VersionRecord, reason: str) -> Iterator[SteadyLoad]:
    """What every bad version has to end like: on the config of before, said in words, and no client noticed."""
    before, champion = endpoints.config_name(), endpoints.champion()
    with (
        endpoints.load() as load,
        SeenAlarms(endpoints.cloudwatch) as alarms,
        pytest.raises(EndpointRolledBack, match=reason),
    ):
        yield load
    assert load.answers
    assert not load.failed
    assert endpoints.config_name() == before
    assert {row["config_name"] for row in endpoints.plane.instances()} == {before}
    assert endpoints.champion() == champion
    assert re.search(reason, read_version(version.version).rollback_reason or "")
    answered = load.answered_by(version)
    if alarms.at:
        assert answered[-1].sent_at - min(alarms.at.values()) < ROLLED_BACK_WITHIN_S
    else:
        assert not answered


def test_a_scrambled_drafter_is_taken_back_by_its_acceptance(
    endpoints: RealEndpoints, second: VersionRecord
) -> None:
    bad = endpoints.make("c", scrambled=True)
    with taken_back(endpoints, bad, "acceptance length"):
        endpoints.promote(bad, rollout=UNTIL_THE_ALARM)


def test_a_slow_drafter_is_taken_back_by_its_latency(endpoints: RealEndpoints, second: VersionRecord) -> None:
    bad = endpoints.make("h", num_idle_layers=96)
    alarms = endpoints.alarms.model_copy(
        update={"max_latency_ratio": 2.0, "evaluation_periods": 4, "datapoints": 2}
    )
    rollout = RolloutSettings(percent=50, wait_s=120, termination_wait_s=5, max_execution_s=900)
    with taken_back(endpoints, bad, "latency over that of the fleet beside it"):
        endpoints.promote(bad, alarms=alarms, rollout=rollout)


def test_a_server_that_answers_no_ping_never_gets_a_request(
    endpoints: RealEndpoints, second: VersionRecord
) -> None:
    bad = endpoints.make("g")
    elsewhere = free_port()  # where vLLM comes up; SageMaker asks at 8080
    with taken_back(endpoints, bad, "ping health check") as load:
        endpoints.promote(bad, environment={"SM_VLLM_PORT": str(elsewhere)}, startup_timeout_s=120)
    assert not load.answered_by(bad)
    log = re.search(r"see (\S+\.log)", read_version(bad.version).rollback_reason or "")
    assert log
    assert f"'port': {elsewhere}" in Path(log[1]).read_text()


def test_a_server_that_crashes_costs_at_most_what_it_was_answering(
    endpoints: RealEndpoints, second: VersionRecord
) -> None:
    bad = endpoints.make("d")
    before, champion = endpoints.config_name(), endpoints.champion()
    with (
        endpoints.load() as load,
        crashing(endpoints, load, bad) as crashes,
        pytest.raises(EndpointRolledBack, match=r"failed calls|5xx"),
    ):
        endpoints.promote(bad, rollout=UNTIL_THE_ALARM)
    assert crashes
    of_others = [one for one in load.failed if not any(crash.may_cost(one) for crash in crashes)]
    assert not of_others, crashes
    assert all("ModelError" in (one.error or "") or one.streamed for one in load.failed), load.failed
    assert endpoints.config_name() == before
    assert endpoints.champion() == champion
    with endpoints.load() as again:
        time.sleep(2)
    assert again.answers
    assert not again.failed


def test_killed_in_the_middle_an_update_ends_on_one_of_its_two_configs(
    endpoints: RealEndpoints, second: VersionRecord
) -> None:
    third = endpoints.make("e")
    before = endpoints.config_name()
    flow = endpoints.start_deployment(third)
    wait_until(lambda: endpoints.stage() == "Baking")
    os.killpg(flow.pid, signal.SIGKILL)
    flow.wait()
    old_instances = endpoints.plane.pids(before)
    endpoints.plane.end(signal.SIGKILL)
    assert all(is_alive(pid) for pid in old_instances)

    endpoints.plane.start()
    wait_until(lambda: endpoints.plane.instances() != [])
    assert endpoints.plane.pids(before) == old_instances  # adopted, not started again
    with endpoints.load() as load:
        deployed = deploy_endpoint(endpoints.real_settings(third))
    assert not load.failed
    assert deployed.version == third.version == endpoints.champion()
    assert endpoints.config_name() == deployed.config_name
    assert deployed.previous_config_name == before
    assert len(endpoints.plane.instances()) == 1

    # Back, for the tests that follow.
    roll_back_endpoint(RollBackSettings(endpoint_name=ENDPOINT, reason="a test"))
    assert endpoints.champion() == second.version


def test_a_person_takes_the_endpoint_back(
    endpoints: RealEndpoints, first: VersionRecord, second: VersionRecord
) -> None:
    with endpoints.load() as load:
        back = roll_back_endpoint(RollBackSettings(endpoint_name=ENDPOINT, reason="it was a Tuesday"))
        moved_at = time.monotonic()
        wait_until(lambda: load.num_sent_since(moved_at) >= 5)
    assert not load.failed
    assert back.version == first.version == endpoints.champion()
    assert load.share_of(first, moved_at) == 1.0
    assert read_version(second.version).rollback_reason == "it was a Tuesday"
