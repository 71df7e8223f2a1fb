"""The plan of an update as pure arithmetic, and its driver killed at every single write, with fleets in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from containers.local.deployment import Deployments
from containers.local.fleet_spec import FleetFailed, FleetSpec
from containers.local.records import DeploymentRecord, EndpointRecord, VariantRecord
from containers.local.rollout import plan_rollout
from containers.local.running import RunningFleets
from containers.local.shares import weighted_fleets
from containers.local.store import Kind, Store
from containers.local.traffic import Traffic

ENDPOINT = "fledge"


def policy(kind: str, **fields: Any) -> dict[str, Any]:
    routing = {"Type": kind, "WaitIntervalInSeconds": 60, **fields}
    return {"BlueGreenUpdatePolicy": {"TrafficRoutingConfiguration": routing}}


def percent(value: int) -> dict[str, Any]:
    return {"Type": "CAPACITY_PERCENT", "Value": value}


@pytest.mark.parametrize(
    ("settings", "shares", "wait_s"),
    [
        (None, [1.0], 0),
        (policy("ALL_AT_ONCE"), [1.0], 60),
        (policy("CANARY", CanarySize=percent(10)), [0.1, 1.0], 60),
        (policy("CANARY", CanarySize={"Type": "INSTANCE_COUNT", "Value": 1}), [0.25, 1.0], 60),
        (policy("LINEAR", LinearStepSize=percent(30)), [0.3, 0.6, 0.9, 1.0], 60),
        (policy("LINEAR", LinearStepSize=percent(50)), [0.5, 1.0], 60),
        (
            {"RollingUpdatePolicy": {"MaximumBatchSize": percent(25), "WaitIntervalInSeconds": 60}},
            [0.25, 0.5, 0.75, 1.0],
            60,
        ),
    ],
)
def test_traffic_steps(settings: dict[str, Any] | None, shares: list[float], wait_s: int) -> None:
    steps = plan_rollout(settings, instance_count=4).steps
    assert [step.share for step in steps] == pytest.approx(shares)
    assert {step.wait_s for step in steps} == {wait_s}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (policy("CANARY", CanarySize=percent(60)), "between 0% and 50%"),
        (policy("LINEAR", LinearStepSize=percent(5)), "between 10% and 50%"),
        (policy("LINEAR", CanarySize=percent(10)), "CanarySize is not allowed"),
        (policy("CANARY", CanarySize={"Type": "INSTANCE_COUNT", "Value": 5}), "the fleet's 4 instances"),
    ],
)
def test_sizes_that_sagemaker_refuses(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_rollout(settings, instance_count=4)


class MemoryFleet:
    """A fleet whose process is an entry in a set that outlives the server."""

    def __init__(self, spec: FleetSpec, processes: set[str], failure: Exception | None = None) -> None:
        self.spec = spec
        self._processes = processes
        self._failure = failure

    def in_service_instances(self) -> tuple[int, ...]:
        return (1,) if self.spec.fleet_id in self._processes else ()

    def adopt(self) -> bool:
        return self.spec.fleet_id in self._processes

    async def launch(self) -> None:
        await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        self._processes.add(self.spec.fleet_id)

    async def scale(self, instance_count: int) -> None: ...

    async def stop(self, drain_s: float = 0, keep_files: bool = False) -> None:
        await asyncio.sleep(0)
        self._processes.discard(self.spec.fleet_id)

    async def watch(self) -> None:
        await asyncio.sleep(3600)


class Killed(BaseException):
    """The server died here."""


class DyingStore(Store):
    """Dies at one of its writes, before or after it reached the disk."""

    def __init__(self, path: Path, dies_at: int, written: bool) -> None:
        super().__init__(path)
        self.num_writes = 0
        self._dies_at = dies_at
        self._written = written

    def put(self, kind: Kind, name: str, body: dict[str, Any]) -> None:
        self.num_writes += 1
        if self.num_writes > self._dies_at or (self.num_writes == self._dies_at and not self._written):
            raise Killed
        super().put(kind, name, body)
        if self.num_writes == self._dies_at:
            raise Killed


class QuietAlarms:
    """No alarm, ever; or one that is up whenever the new fleet has traffic."""

    def __init__(self, up: str | None = None) -> None:
        self._up = up

    async def wait_for_alarm(self, names: Sequence[str], timeout_s: float) -> str | None:
        await asyncio.sleep(0)
        return self._up

    async def missing(self, names: Sequence[str]) -> list[str]:
        return []


def variant(config_name: str) -> VariantRecord:
    spec = FleetSpec(
        fleet_id=config_name,
        endpoint_name=ENDPOINT,
        config_name=config_name,
        variant_name="v",
        instance_type="ml.g7e.2xlarge",
        instance_count=1,
        image="i",
        environment={},
        download_timeout_s=60,
        startup_timeout_s=60,
    )
    return VariantRecord(spec=spec, weight=1.0, resolved_at=0.0)


def updating(settings: dict[str, Any] | None, started_at: float) -> EndpointRecord:
    deployment = DeploymentRecord(
        config_name="new",
        variants=(variant("new"),),
        settings=settings,
        started_at=started_at,
        stage_started_at=started_at,
    )
    return EndpointRecord(
        name=ENDPOINT,
        config_name="old",
        status="Updating",
        variants=(variant("old"),),
        deployment=deployment,
    )


class Server:
    """One life of the server over a store and processes that outlive it."""

    def __init__(
        self,
        store: Store,
        processes: set[str],
        alarms: QuietAlarms | None = None,
        failures: dict[str, Exception] | None = None,
    ) -> None:
        known = failures or {}
        self.traffic = Traffic()
        self.fleets = RunningFleets(
            lambda spec: MemoryFleet(spec, processes, known.get(spec.fleet_id))  # type: ignore[arg-type]
        )
        self.deployments = Deployments(store, self.fleets, self.traffic, alarms or QuietAlarms())

    async def live(self, record: EndpointRecord | None = None) -> EndpointRecord:
        """Take a request or resume, until the endpoint is at rest or the server dies."""
        if record is not None:
            self.deployments.begin(record)
        else:
            self.deployments.resume()
        await self.deployments.settled(ENDPOINT)
        found = self.deployments.record(ENDPOINT)
        assert found is not None
        return found


ALARMED = {
    "BlueGreenUpdatePolicy": {
        "TrafficRoutingConfiguration": {
            "Type": "CANARY",
            "CanarySize": {"Type": "CAPACITY_PERCENT", "Value": 10},
            "WaitIntervalInSeconds": 0,
        }
    },
    "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": "a"}]},
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("alarm", [None, "a"])
@pytest.mark.parametrize("dies_at", range(2, 9))
def test_killed_at_any_write_an_update_ends_in_one_of_its_two_configs(
    tmp_path: Path, dies_at: int, alarm: str | None, written: bool
) -> None:
    path, processes = tmp_path / "state.db", {"old"}

    async def first_life() -> bool:
        store = DyingStore(path, dies_at, written)
        server = Server(store, processes, QuietAlarms(alarm))
        with contextlib.suppress(Killed):
            await server.live(updating(ALARMED, time.time()))
            return False
        return True

    died = asyncio.run(first_life())
    after = asyncio.run(Server(Store(path), processes, QuietAlarms(alarm)).live())
    wanted = "old" if alarm else "new"
    assert (after.status, after.config_name) == ("InService", wanted)
    assert processes == {wanted}, "exactly the fleets of the config that won"
    assert (after.deployment, after.ending) == (None, ())
    assert [spec.fleet_id for spec, _, _ in weighted_fleets(after)] == [wanted]
    assert died or dies_at > 5


def run_update(
    tmp_path: Path, processes: set[str], started_at: float | None = None, **server: Any
) -> EndpointRecord:
    record = updating(ALARMED, time.time() if started_at is None else started_at)
    return asyncio.run(Server(Store(tmp_path / "state.db"), processes, **server).live(record))


def test_an_update_over_its_time_limit_is_taken_back(tmp_path: Path) -> None:
    processes = {"old"}
    after = run_update(tmp_path, processes, started_at=time.time() - 28_801)
    assert (after.status, after.config_name) == ("InService", "old")
    assert after.failure_reason == "The deployment did not finish within 28800 seconds."
    assert processes == {"old"}


def test_an_error_of_this_servers_own_takes_an_update_back_too(tmp_path: Path) -> None:
    processes = {"old"}
    after = run_update(tmp_path, processes, failures={"new": RuntimeError("a bug")})
    assert (after.status, after.config_name) == ("InService", "old")
    assert "a bug" in (after.failure_reason or "")


def test_a_failed_fleet_gives_its_own_reason(tmp_path: Path) -> None:
    after = run_update(tmp_path, {"old"}, failures={"new": FleetFailed("No capacity.")})
    assert (after.config_name, after.failure_reason) == ("old", "No capacity.")


def test_old_fleets_that_were_lost_come_back_before_the_update_goes_on(tmp_path: Path) -> None:
    """SIGTERM ended everything in mid-update; the next start brings both up and finishes."""
    processes: set[str] = set()
    store = Store(tmp_path / "state.db")
    record = updating(ALARMED, time.time())
    assert record.deployment is not None
    baking = record.deployment.model_copy(update={"stage": "baking", "num_steps_done": 1})
    store.put("endpoint", ENDPOINT, record.but(deployment=baking).model_dump(mode="json"))
    after = asyncio.run(Server(store, processes).live())
    assert (after.status, after.config_name) == ("InService", "new")
    assert processes == {"new"}


def test_an_endpoint_that_cannot_be_brought_back_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("containers.local.deployment._RESTORE_PAUSES_S", (0.0, 0.0))
    store = Store(tmp_path / "state.db")
    record = updating(None, time.time()).but(status="InService", deployment=None)
    store.put("endpoint", ENDPOINT, record.model_dump(mode="json"))
    after = asyncio.run(Server(store, set(), failures={"old": FleetFailed("Gone.")}).live())
    assert (after.status, after.failure_reason) == ("Failed", "Gone.")


def test_a_failed_endpoint_can_be_deleted_while_its_fleets_still_end(tmp_path: Path) -> None:
    async def fail_and_delete() -> EndpointRecord | None:
        server = Server(Store(tmp_path / "state.db"), set(), failures={"old": FleetFailed("No capacity.")})
        creating = updating(None, time.time()).but(status="Creating", deployment=None)
        server.deployments.begin(creating)
        while (record := server.deployments.record(ENDPOINT)) is None or record.status != "Failed":
            await asyncio.sleep(0)
        assert record.ending, "meant to be deleted in the middle of it"
        server.deployments.begin(record.but(status="Deleting"))
        await server.deployments.settled(ENDPOINT)
        return server.deployments.record(ENDPOINT)

    assert asyncio.run(fail_and_delete()) is None
