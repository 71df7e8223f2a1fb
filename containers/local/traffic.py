"""Which fleets answer for an endpoint, and with what share. In memory: set by deployments, read by the router."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from containers.local.fleet import Fleet

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Route:
    """One fleet's part in an endpoint.

    Args:
        weight: share of the requests, relative to the other routes' weights; 0 takes none.
        capture: the endpoint config's DataCaptureConfig; None captures nothing.
    """

    fleet: Fleet
    weight: float
    variant_name: str
    config_name: str
    capture: dict[str, Any] | None = None


class Traffic:
    """The routing table."""

    def __init__(self) -> None:
        self._routes: dict[str, tuple[Route, ...]] = {}
        self._drawn: dict[str, int] = {}
        self._start = random.random()

    def set(self, endpoint_name: str, routes: Sequence[Route]) -> None:
        """Replace an endpoint's routes at once; requests in flight stay where they are."""
        if routes:
            self._routes[endpoint_name] = tuple(routes)
        else:
            self._routes.pop(endpoint_name, None)
            self._drawn.pop(endpoint_name, None)

    def routes(self, endpoint_name: str) -> tuple[Route, ...]:
        """An endpoint's routes; empty when nothing is known of it."""
        return self._routes.get(endpoint_name, ())

    def order(self, endpoint_name: str, variant_name: str | None = None) -> list[Route]:
        """Routes to try for one request: the one chosen by weight, then those that step in when it has nobody.

        A request is better answered by the wrong fleet than by none, so routes without weight come too, last.

        Args:
            variant_name: asked for by the caller; then its routes alone count, weight or not.
        """
        routes = [route for route in self.routes(endpoint_name) if variant_name in (None, route.variant_name)]
        if not routes:
            return []
        chosen = self._choose(endpoint_name, routes)
        others = sorted((route for route in routes if route is not chosen), key=lambda route: -route.weight)
        return [chosen, *others]

    def _choose(self, endpoint_name: str, routes: Sequence[Route]) -> Route:
        """By weight, along a golden-ratio sequence.

        Its points fill [0, 1) evenly from the first few on, so that a 10 % canary gets its 10 % of a hundred
        requests (random draws: 4 to 16 %), and no rhythm of a client falls in step with it.
        """
        total = sum(route.weight for route in routes)
        weights = [route.weight / total if total else 1 / len(routes) for route in routes]
        drawn = self._drawn[endpoint_name] = self._drawn.get(endpoint_name, 0) + 1
        point = (self._start + drawn * _GOLDEN_RATIO) % 1.0
        for route, weight in zip(routes, weights, strict=True):
            point -= weight
            if point < 0:
                return route
        return max(routes, key=lambda route: route.weight)  # rounding left a crumb
