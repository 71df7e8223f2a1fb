"""Bring endpoints from what is recorded to what is asked: create, update, scale, delete, each to its end.

Every step is written down before it acts, and traffic follows from the record alone. So one driver serves a new
request and a restart after a kill alike: whatever a record says is unfinished, it finishes. An update ends in
the old config or the new one:

    creating -> baking (once a traffic step) -> waiting_to_end -> the new config's variants; the old fleets end
        \\___________________|_____________________/
          a fleet that fails, an alarm, the time limit -> the old config's variants; the new fleets end
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from containers.local.arn import resource_arn
from containers.local.fleet_spec import FleetFailed, not_healthy
from containers.local.records import IN_PROGRESS, DeploymentRecord, EndpointRecord, VariantRecord
from containers.local.rollout import Rollout, plan_rollout
from containers.local.running import RunningFleets
from containers.local.shares import weighted_fleets
from containers.local.store import Store
from containers.local.traffic import Route, Traffic

# After a restart an endpoint's own fleets are tried again so long apart before it counts as failed.
_RESTORE_PAUSES_S = (5.0, 20.0)

_log = logging.getLogger(__name__)


class AlarmWatch(Protocol):
    """Where a deployment learns of alarms; `alarms.Alarms` is the real one."""

    async def wait_for_alarm(self, names: Sequence[str], timeout_s: float) -> str | None: ...
    async def missing(self, names: Sequence[str]) -> list[str]: ...


class RollBack(Exception):
    """An update must be taken back; the message becomes the FailureReason."""


class Deployments:
    """One task for each endpoint that is not at rest.

    Args:
        store: where records live.
        fleets: the processes.
        traffic: the router's table.
        alarms: tells when an alarm of a deployment is up.
    """

    def __init__(self, store: Store, fleets: RunningFleets, traffic: Traffic, alarms: AlarmWatch) -> None:
        self._store = store
        self._fleets = fleets
        self._traffic = traffic
        self._alarms = alarms
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def record(self, name: str) -> EndpointRecord | None:
        """What is known of an endpoint; None when there is none of that name."""
        stored = self._store.get("endpoint", name)
        return EndpointRecord.model_validate(stored.body) if stored is not None else None

    def begin(self, record: EndpointRecord) -> None:
        """Write down what is asked, and bring it about in the background."""
        self._save(record)
        self._drive(record.name)

    def resume(self) -> None:
        """At the start of a server: find every endpoint's processes again, and finish what was under way."""
        for stored in self._store.all("endpoint"):
            self._drive(stored.name)

    async def settled(self, name: str) -> None:
        """Wait until nothing is under way for an endpoint."""
        task = self._tasks.get(name)
        if task is not None:
            await asyncio.shield(task)

    async def shut_down(self) -> None:
        """Stop where everything stands and end the processes; records stay for the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fleets.shut_down()

    def _drive(self, name: str) -> None:
        before = self._tasks.get(name)  # of a failed endpoint that is deleted while its fleets still end
        task = asyncio.create_task(self._finish_after(before, name), name=f"endpoint {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._forget(name, done))

    def _forget(self, name: str, done: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is done:
            del self._tasks[name]
        if not done.cancelled() and done.exception() is not None:
            _log.error("endpoint %s is stuck", name, exc_info=done.exception())

    async def _finish_after(self, before: asyncio.Task[None] | None, name: str) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        await self._finish(name)

    async def _finish(self, name: str) -> None:
        """Whatever is unfinished about an endpoint, finish it."""
        if self._known(name).status == "Creating":
            await self._create(name)
        elif self._known(name).status not in {"Failed", "Deleting"}:
            try:
                await self._restore(name)
            except FleetFailed as failure:
                self._give_up(name, failure.reason)
        if self._known(name).deployment is not None:
            await self._deploy(name)
        elif self._known(name).scaling is not None:
            await self._scale(name)
        await self._end_fleets(name)

    async def _create(self, name: str) -> None:
        try:
            variants = await self._launch(self._known(name).variants)
        except FleetFailed as failure:
            self._give_up(name, failure.reason)
        else:
            self._change(name, status="InService", variants=variants)

    async def _restore(self, name: str) -> None:
        """Find the endpoint's own processes; launch what is gone, which only a restart leaves gone.

        Raises:
            FleetFailed: they cannot be brought back.
        """
        record = self._known(name)
        missing = [variant for variant in record.variants if not self._fleets.find(variant.spec)]
        if record.deployment is not None and record.deployment.stage != "creating":
            for variant in record.deployment.variants:
                self._fleets.find(variant.spec)
        self._route(record)
        if missing:
            if record.status == "InService":
                self._change(name, status="SystemUpdating")
            await self._launch_again(missing)
            self._route(record)
        if self._known(name).status == "SystemUpdating":
            self._change(name, status="InService")

    async def _launch_again(self, variants: Sequence[VariantRecord]) -> None:
        for pause_s in _RESTORE_PAUSES_S:
            try:
                await self._fleets.launch(variant.spec for variant in variants)
                return
            except FleetFailed as failure:
                _log.warning("not back yet: %s", failure.reason)
                await asyncio.sleep(pause_s)
        await self._fleets.launch(variant.spec for variant in variants)

    def _give_up(self, name: str, reason: str) -> None:
        record = self._known(name)
        newer = record.deployment.variants if record.deployment is not None else ()
        specs = tuple(variant.spec for variant in (*record.variants, *newer))
        self._change(
            name, status="Failed", failure_reason=reason, ending=specs, deployment=None, scaling=None
        )

    async def _deploy(self, name: str) -> None:
        """One update, from wherever it stands to one of its two ends."""
        deployment = self._deployment(name)
        rollout = plan_rollout(deployment.settings, deployment.instance_count)
        remaining_s = deployment.started_at + rollout.max_execution_s - time.time()
        try:
            async with asyncio.timeout(remaining_s) as limit:
                await self._bring_up(name)
                await self._shift_traffic(name, rollout)
        except RollBack as reason:
            self._roll_back(name, str(reason))
        except FleetFailed as failure:
            self._roll_back(name, failure.reason)
        except TimeoutError:
            if not limit.expired():
                raise
            self._roll_back(name, f"The deployment did not finish within {rollout.max_execution_s} seconds.")
        except Exception as error:
            _log.exception("endpoint %s: the update is taken back", name)
            self._roll_back(name, f"Internal error: {error!r}. Please retry.")
        else:
            self._commit(name)

    async def _bring_up(self, name: str) -> None:
        """The new fleets, all in service. After a restart: what was found of them, and the rest anew."""
        deployment = self._deployment(name)
        found = deployment.stage != "creating" and all(
            self._fleets.find(variant.spec) for variant in deployment.variants
        )
        if not found:
            variants = await self._launch(deployment.variants)
            self._change_deployment(name, variants=variants)

    async def _shift_traffic(self, name: str, rollout: Rollout) -> None:
        """Step by step, each watched for its wait; a restart goes on with the rest of the wait it was in.

        Raises:
            RollBack: an alarm.
            FleetFailed: a new fleet with nobody in service.
        """
        num_done = self._deployment(name).num_steps_done
        if self._deployment(name).stage != "waiting_to_end":
            for number, step in enumerate(rollout.steps, start=1):
                if number < num_done:
                    continue
                if number > num_done:
                    self._require_in_service(name)
                    self._enter(name, stage="baking", num_steps_done=number)
                await self._watch(name, rollout, step.wait_s)
            self._enter(name, stage="waiting_to_end")
        await self._watch(name, rollout, rollout.termination_wait_s)
        self._require_in_service(name)

    async def _watch(self, name: str, rollout: Rollout, wait_s: float) -> None:
        """Wait out a stage; an alarm ends it at once.

        Raises:
            RollBack: an alarm of the deployment is up, or is gone: nobody would notice then.
        """
        if missing := await self._alarms.missing(rollout.alarms):
            raise RollBack(
                f"The deployment of endpoint config {self._deployment(name).config_name} was rolled back: "
                f"CloudWatch alarms of its AutoRollbackConfiguration no longer exist: {', '.join(missing)}."
            )
        remaining_s = max(0.0, self._deployment(name).stage_started_at + wait_s - time.time())
        if not rollout.alarms:
            await asyncio.sleep(remaining_s)
            return
        alarm = await self._alarms.wait_for_alarm(rollout.alarms, remaining_s)
        if alarm is not None:
            raise RollBack(
                f"The deployment of endpoint config {self._deployment(name).config_name} was rolled back: "
                f"CloudWatch alarm {alarm} of its AutoRollbackConfiguration went into ALARM state."
            )

    def _require_in_service(self, name: str) -> None:
        """No traffic goes to a fleet that answers nobody.

        Raises:
            FleetFailed: a new fleet has no instance in service.
        """
        for variant in self._deployment(name).variants:
            if variant.spec.instance_count and not self._fleets.num_in_service(variant.spec):
                raise not_healthy(variant.spec, "none of its instances is in service any more")

    def _commit(self, name: str) -> None:
        record, deployment = self._known(name), self._deployment(name)
        _log.info("endpoint %s: %s -> %s", name, record.config_name, deployment.config_name)
        self._change(
            name,
            config_name=deployment.config_name,
            variants=deployment.variants,
            last_settings=deployment.settings,
            failure_reason=None,
            deployment=None,
            ending=tuple(variant.spec for variant in record.variants),
        )

    def _roll_back(self, name: str, reason: str) -> None:
        """All traffic to the old fleets, now; the new ones drain and end afterwards."""
        _log.warning("endpoint %s: rolled back: %s", name, reason)
        self._change(
            name,
            status="RollingBack",
            failure_reason=reason,
            deployment=None,
            ending=tuple(variant.spec for variant in self._deployment(name).variants),
        )

    async def _scale(self, name: str) -> None:
        """Weights and instance counts as asked; back to what they were when an instance does not come up."""
        record = self._known(name)
        wanted = record.scaling or ()
        try:
            await self._set_counts(wanted)
        except FleetFailed as failure:
            self._change(name, status="RollingBack", scaling=None, failure_reason=failure.reason)
            await self._set_counts(record.variants)
        else:
            self._change(name, variants=wanted, scaling=None, failure_reason=None)

    async def _set_counts(self, variants: Iterable[VariantRecord]) -> None:
        for variant in variants:
            fleet = self._fleets.get(variant.spec)
            if fleet is not None:
                await fleet.scale(variant.spec.instance_count)

    async def _end_fleets(self, name: str) -> None:
        """End what is of no more use; the endpoint is then at rest, or gone."""
        record = self._known(name)
        await self._fleets.end(record.ending)
        if record.status == "Deleting":
            self._store.delete("endpoint", name, resource_arn("endpoint", name))
        elif record.status == "Failed":
            self._change(name, ending=())
        elif record.status in IN_PROGRESS or record.ending:
            self._change(name, ending=(), status="InService")

    async def _launch(self, variants: Sequence[VariantRecord]) -> tuple[VariantRecord, ...]:
        """Launch fleets; where an instance type has no capacity, its variant goes to the next of its pools.

        Raises:
            FleetFailed: a fleet did not come up, and no other type is left to try.
        """
        while True:
            try:
                await self._fleets.launch(variant.spec for variant in variants)
                return tuple(variants)
            except FleetFailed as failure:
                others = [variant.on_next_type() for variant in variants]
                if "InsufficientInstanceCapacity" not in failure.reason or not any(others):
                    raise
                await self._fleets.end(variant.spec for variant in variants)
                variants = [other or variant for other, variant in zip(others, variants, strict=True)]

    def _known(self, name: str) -> EndpointRecord:
        record = self.record(name)
        assert record is not None, f"endpoint {name} vanished"
        return record

    def _deployment(self, name: str) -> DeploymentRecord:
        deployment = self._known(name).deployment
        assert deployment is not None, f"endpoint {name} has no deployment"
        return deployment

    def _enter(self, name: str, **changes: object) -> None:
        """The next stage of a deployment, from now on."""
        self._change_deployment(name, stage_started_at=time.time(), **changes)

    def _change_deployment(self, name: str, **changes: object) -> None:
        self._change(name, deployment=self._deployment(name).model_copy(update=changes))

    def _change(self, name: str, **changes: object) -> None:
        self._save(self._known(name).but(**changes))

    def _save(self, record: EndpointRecord) -> None:
        self._store.put("endpoint", record.name, record.model_dump(mode="json"))
        self._route(record)

    def _route(self, record: EndpointRecord) -> None:
        """Point the router at what the record says."""
        routes = []
        for spec, weight, capture in weighted_fleets(record):
            fleet = self._fleets.get(spec)
            if fleet is not None:
                routes.append(Route(fleet, weight, spec.variant_name, spec.config_name, capture))
        self._traffic.set(record.name, routes)
