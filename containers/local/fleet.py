"""The instances of one production variant of one endpoint config: launched, watched, replaced, drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from containers.local.bring_up import download_sources, start_instance
from containers.local.faults import Faults
from containers.local.fleet_spec import FleetFailed, FleetSpec, not_healthy
from containers.local.instance import Instance, end_strays, read_instances
from containers.local.machine import InsufficientCapacity, Machine, insufficient_capacity

__all__ = ["Fleet", "FleetFailed", "FleetSpec"]

logger = logging.getLogger(__name__)

PING_EVERY_S = 0.5  # while starting
WATCH_EVERY_S = 1.0
# So many pings in a row without an answer make an instance unhealthy. A busy CPU answers late now and then.
FAILED_PINGS_UNHEALTHY = 5
# Unhealthy for so many pings, it is replaced.
FAILED_PINGS_REPLACED = 15
_REPLACE_AGAIN_AFTER_S = 10.0


class Fleet:
    """The running instances of a spec.

    Args:
        spec: what to launch.
        machine: gives memory, ports and folders.
        faults: failures to order, see `faults.py`.
    """

    def __init__(self, spec: FleetSpec, machine: Machine, faults: Faults) -> None:
        self.spec = spec
        self.machine = machine
        self.faults = faults
        self._wanted = spec.instance_count
        self._instances: list[Instance] = []
        self._stopping = False
        self._changed = asyncio.Event()
        self._retry_at = 0.0
        self._replacing: asyncio.Task[None] | None = None
        # A new connection for each ping; loopback requests must not take a detour through a proxy.
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    @property
    def folder(self) -> Path:
        """Downloads and records of this fleet."""
        return self.machine.fleet_folder(self.spec.fleet_id)

    @property
    def container_root(self) -> Path:
        """What its containers see as `/opt/ml`."""
        return self.folder / "opt-ml"

    @property
    def _records(self) -> Path:
        return self.folder / "instances"

    @property
    def in_flight(self) -> int:
        """Requests that its instances are answering now."""
        return sum(instance.in_flight for instance in self._instances)

    @property
    def instance_count(self) -> int:
        """Instances wanted: the spec's number, or what `scale` made of it."""
        return self._wanted

    def in_service_instances(self) -> tuple[Instance, ...]:
        """Instances that requests may go to now, the least busy first."""
        if self._stopping:
            return ()
        ready = [instance for instance in self._instances if instance.state == "in_service"]
        return tuple(sorted(ready, key=lambda instance: instance.in_flight))

    def latency_fault(self) -> tuple[float, float]:
        """What was ordered for answers: seconds to add, and how many times as long the container is to take."""
        fault = self.faults.active("latency", self.spec.endpoint_name, self.spec.config_name)
        return (fault.delay_s, fault.factor) if fault is not None else (0.0, 1.0)

    def report_unreachable(self, instance: Instance) -> None:
        """The router could not connect: out of routing until a ping says otherwise; looked after at once."""
        instance.take_out_of_service()
        self._changed.set()

    async def launch(self) -> None:
        """Download, start, and wait until every instance answers /ping. Continues what `adopt` found.

        Raises:
            FleetFailed: no capacity, no model data, or an instance that did not become healthy in time. Nothing
                of the fleet runs then.
        """
        instance_ids = self._reserve(self._wanted - len(self._instances))
        try:
            await download_sources(self.spec, self.machine, self.container_root)
            self._start(instance_ids)
            await self._wait_until_healthy(self._instances)
        except BaseException:
            self._release(instance_ids)
            await self._end(self._instances)
            raise

    def adopt(self) -> bool:
        """Take over the processes of this spec that a server before this one started.

        Returns:
            Whether any still runs. `watch` replaces those that do not.
        """
        for instance in read_instances(self._records):
            if instance.is_alive():
                self.machine.take_over(instance.instance_id, instance.record.port)
                self._instances.append(instance)
            else:
                instance.end_now()  # what its server left behind
                instance.record_path.unlink(missing_ok=True)
        end_strays(self._records, self._instances)
        return bool(self._instances)

    async def scale(self, instance_count: int) -> None:
        """Make it this many instances.

        Raises:
            FleetFailed: the further ones did not come into service; the number stays what it was.
        """
        surplus = len(self._instances) - instance_count
        if surplus > 0:
            self._wanted = instance_count
            await self._retire(sorted(self._instances, key=lambda instance: instance.in_flight)[:surplus])
            return
        await self._add(-surplus)
        self._wanted = instance_count

    async def stop(self, drain_s: float = 60.0, keep_files: bool = False) -> None:
        """Take no new request, let those in flight finish, end the processes.

        Args:
            drain_s: longest wait for requests in flight; 60 s is the longest that one may take.
            keep_files: keep what was downloaded, for a launch of the same spec later.
        """
        self._stopping = True
        await self._drain(self._instances, drain_s)
        await self._end(self._instances)
        await self._client.aclose()
        if not keep_files:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def watch(self) -> None:
        """For ever: ping; what is dead or unhealthy leaves the routing at once and is replaced."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), WATCH_EVERY_S)
                self._changed.clear()
                await self._look_after()
        finally:
            if self._replacing is not None:
                self._replacing.cancel()
                await asyncio.gather(self._replacing, return_exceptions=True)

    async def _look_after(self) -> None:
        await asyncio.gather(*(self._check(instance) for instance in self._instances))
        lost = [instance for instance in self._instances if self._is_lost(instance)]
        for instance in lost:
            logger.warning("%s: lost instance %s", self.spec.fleet_id, instance.instance_id)
        await self._end(lost)
        is_replacing = self._replacing is not None and not self._replacing.done()
        if len(self._instances) < self._wanted and not is_replacing and time.monotonic() >= self._retry_at:
            # Beside this loop: the other instances want to be looked after while a new one starts.
            self._replacing = asyncio.create_task(self._replace())

    def describe(self) -> list[dict[str, Any]]:
        """Its instances, for a person."""
        return [
            {
                "instance_id": instance.instance_id,
                "pid": instance.record.pid,
                "port": instance.record.port,
                "state": instance.state,
                "in_flight": instance.in_flight,
                "log": str(instance.record.log_path),
                "started_at": instance.record.started_at.isoformat(),
                "endpoint_name": self.spec.endpoint_name,
                "config_name": self.spec.config_name,
                "variant_name": self.spec.variant_name,
            }
            for instance in self._instances
        ]

    def _reserve(self, count: int) -> list[str]:
        """Memory for so many further instances; their ids.

        Raises:
            FleetFailed: there is none for all of them, or so it was ordered.
        """
        if self.faults.take("capacity", self.spec.endpoint_name, self.spec.config_name) is not None:
            raise FleetFailed(str(insufficient_capacity("ordered")))
        instance_ids = [f"i-{uuid.uuid4().hex[:12]}" for _ in range(count)]
        try:
            for instance_id in instance_ids:
                self.machine.reserve(instance_id)
        except InsufficientCapacity as error:
            self._release(instance_ids)
            raise FleetFailed(str(error)) from error
        return instance_ids

    def _release(self, instance_ids: Iterable[str]) -> None:
        for instance_id in instance_ids:
            self.machine.release(instance_id, None)

    def _start(self, instance_ids: Iterable[str]) -> list[Instance]:
        """Start instances without waiting for them.

        Raises:
            FleetFailed: one cannot be started.
        """
        started = []
        for instance_id in instance_ids:
            if self._stopping:
                raise FleetFailed("The fleet was stopped while it was being launched.")
            instance = start_instance(
                self.spec, self.machine, self.container_root, instance_id, self._records
            )
            self._instances.append(instance)
            started.append(instance)
        return started

    async def _add(self, count: int) -> None:
        """Bring further instances into service.

        Raises:
            FleetFailed: not all came; none of them is left.
        """
        instance_ids = self._reserve(count)
        try:
            await download_sources(self.spec, self.machine, self.container_root)
            await self._wait_until_healthy(self._start(instance_ids))
        except BaseException:
            self._release(instance_ids)
            await self._end([i for i in self._instances if i.instance_id in instance_ids])
            raise

    async def _wait_until_healthy(self, instances: Iterable[Instance]) -> None:
        """Until each has answered a ping.

        Raises:
            FleetFailed: one ended, or time is up.
        """
        deadline = time.monotonic() + self.spec.startup_timeout_s
        slow = self.faults.take("slow_start", self.spec.endpoint_name, self.spec.config_name)
        not_before = time.monotonic() + (slow.delay_s if slow is not None else 0.0)
        waiting = [instance for instance in instances if instance.state != "in_service"]
        while waiting:
            for instance in list(waiting):
                if not instance.is_alive():
                    raise not_healthy(self.spec, f"its process ended; see {instance.record.log_path}")
                if time.monotonic() >= not_before and await self._ping(instance):
                    instance.put_in_service()
                    waiting.remove(instance)
            if waiting and time.monotonic() > deadline:
                log = waiting[0].record.log_path
                raise not_healthy(self.spec, f"no answer within {self.spec.startup_timeout_s} s; see {log}")
            if waiting:
                await asyncio.sleep(PING_EVERY_S)

    async def _ping(self, instance: Instance) -> bool:
        if self.faults.active("ping_failure", self.spec.endpoint_name, self.spec.config_name) is not None:
            return False
        return await instance.ping(self._client)

    async def _check(self, instance: Instance) -> None:
        """One look at an instance: in service when it answers, out of it when it is dead or silent for long."""
        if instance.state in ("draining", "ended"):
            return
        if not instance.is_alive():
            instance.take_out_of_service()
        elif await self._ping(instance):
            instance.put_in_service()
        elif instance.state != "starting":
            instance.failed_pings += 1
            if instance.failed_pings >= FAILED_PINGS_UNHEALTHY:
                instance.take_out_of_service()

    def _is_lost(self, instance: Instance) -> bool:
        if not instance.is_alive() or instance.failed_pings >= FAILED_PINGS_REPLACED:
            return True
        age_s = (datetime.now(UTC) - instance.record.started_at).total_seconds()
        return instance.state == "starting" and age_s > self.spec.startup_timeout_s

    async def _replace(self) -> None:
        """Bring the fleet back to its number; after a failure wait a little before the next try."""
        try:
            await self._add(self._wanted - len(self._instances))
        except FleetFailed as error:
            logger.warning("%s: no replacement: %s", self.spec.fleet_id, error.reason)
            self._retry_at = time.monotonic() + _REPLACE_AGAIN_AFTER_S

    async def _retire(self, instances: list[Instance]) -> None:
        for instance in instances:
            instance.state = "draining"
        await self._drain(instances, drain_s=60.0)
        await self._end(instances)

    async def _drain(self, instances: list[Instance], drain_s: float) -> None:
        deadline = time.monotonic() + drain_s
        while any(instance.in_flight for instance in instances) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _end(self, instances: Iterable[Instance]) -> None:
        ending = list(instances)
        await asyncio.gather(*(instance.end() for instance in ending))
        for instance in ending:
            self.machine.release(instance.instance_id, instance.record.port)
        self._instances = [instance for instance in self._instances if instance not in ending]
