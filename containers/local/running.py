"""The fleets that run now, each with the watch that keeps it at its number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator

from containers.local.fleet import Fleet
from containers.local.fleet_spec import FleetSpec

# On a stop of the server: long enough for most answers, short enough for whoever asked it to stop.
SHUTDOWN_DRAIN_S = 2.0

_log = logging.getLogger(__name__)


class RunningFleets:
    """Fleets by their id. A fleet is here from its launch or adoption until it is ended.

    Args:
        new_fleet: makes the (not yet launched) fleet of a spec.
    """

    def __init__(self, new_fleet: Callable[[FleetSpec], Fleet]) -> None:
        self._new_fleet = new_fleet
        self._fleets: dict[str, Fleet] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Fleet]:
        return iter(list(self._fleets.values()))

    def get(self, spec: FleetSpec) -> Fleet | None:
        return self._fleets.get(spec.fleet_id)

    def num_in_service(self, spec: FleetSpec) -> int:
        fleet = self.get(spec)
        return len(fleet.in_service_instances()) if fleet is not None else 0

    def find(self, spec: FleetSpec) -> bool:
        """Take over what a server before this one left running; True when there is something to go on with."""
        if spec.fleet_id in self._fleets:
            return True
        fleet = self._new_fleet(spec)
        if not fleet.adopt():
            return False
        self._keep(fleet)
        return True

    async def launch(self, specs: Iterable[FleetSpec]) -> None:
        """Bring fleets up side by side, those found half-way included.

        Raises:
            FleetFailed: one did not come up. The others are left running, for the caller to end.
        """
        outcomes = await asyncio.gather(*(self._launch(spec) for spec in specs), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def end(self, specs: Iterable[FleetSpec]) -> None:
        """Drain and end fleets, and whatever still runs of them from before a restart."""
        outcomes = await asyncio.gather(*(self._end(spec) for spec in specs), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # an endpoint must not stay in progress for what is left over
                _log.error("a fleet did not end", exc_info=outcome)

    async def shut_down(self) -> None:
        """End all processes, keeping downloads: the next start launches the same fleets again."""
        for spec_id in list(self._watches):
            await self._stop_watching(spec_id)
        fleets = list(self._fleets.values())
        self._fleets.clear()
        await asyncio.gather(
            *(fleet.stop(drain_s=SHUTDOWN_DRAIN_S, keep_files=True) for fleet in fleets),
            return_exceptions=True,
        )

    async def _launch(self, spec: FleetSpec) -> None:
        fleet = self._fleets.get(spec.fleet_id)
        if fleet is None:
            fleet = self._new_fleet(spec)
            fleet.adopt()
            self._fleets[spec.fleet_id] = fleet
        await self._stop_watching(spec.fleet_id)  # it would replace what the launch is waiting for
        await fleet.launch()
        self._keep(fleet)

    async def _end(self, spec: FleetSpec) -> None:
        await self._stop_watching(spec.fleet_id)
        fleet = self._fleets.pop(spec.fleet_id, None)
        if fleet is None:
            fleet = self._new_fleet(spec)
            fleet.adopt()
        await fleet.stop()

    def _keep(self, fleet: Fleet) -> None:
        self._fleets[fleet.spec.fleet_id] = fleet
        watch = asyncio.create_task(fleet.watch(), name=f"watch {fleet.spec.fleet_id}")
        watch.add_done_callback(_log_failure)
        self._watches[fleet.spec.fleet_id] = watch

    async def _stop_watching(self, fleet_id: str) -> None:
        watch = self._watches.pop(fleet_id, None)
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


def _log_failure(watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and watch.exception() is not None:
        _log.error("%s ended", watch.get_name(), exc_info=watch.exception())
