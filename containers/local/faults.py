"""Failures to order: the next launch finds no capacity, every ping fails, each answer is late.

Ordered with `POST /_local/faults`, or before the start with `FLEDGE_LOCAL_FAULTS` (a JSON list). They live in
memory: a restart forgets them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from drafter.errors import FledgeError

FAULTS_VARIABLE = "FLEDGE_LOCAL_FAULTS"

FaultKind = Literal["capacity", "quota", "throttling", "ping_failure", "slow_start", "latency"]


class Fault(BaseModel):
    """One order: what fails, for whom, and how often."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FaultKind = Field(
        description="`capacity`: a launch finds none. `quota`: Create/Update are over an account limit. "
        "`throttling`: API calls are refused. `ping_failure`: /ping counts as failed. "
        "`slow_start`: a launch takes longer. `latency`: answers are late."
    )
    endpoint: str = Field(default="*", description="Endpoint names it applies to, as a shell pattern.")
    config: str = Field(default="*", description="Endpoint config names it applies to, as a shell pattern.")
    operation: str = Field(default="*", description="API operations that throttling and quota apply to.")
    times: int | None = Field(
        default=None, ge=1, description="How many times it strikes; None: until it is cleared."
    )
    delay_s: float = Field(default=0.0, ge=0, description="Seconds added (slow_start, latency).")
    factor: float = Field(default=1.0, ge=1, description="Answers take this many times as long (latency).")


_ORDERS = TypeAdapter(list[Fault])


class Faults:
    """The orders in force. Read from threads as well as from the event loop."""

    def __init__(self, orders: list[Fault] | None = None) -> None:
        self._lock = threading.Lock()
        self._orders: list[tuple[Fault, int | None]] = [(order, order.times) for order in orders or []]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Faults:
        """Read `FLEDGE_LOCAL_FAULTS`.

        Raises:
            FledgeError: it is not a JSON list of faults.
        """
        text = environment.get(FAULTS_VARIABLE, "").strip()
        if not text:
            return cls()
        try:
            return cls(_ORDERS.validate_json(text))
        except ValidationError as error:
            raise FledgeError(
                f"{FAULTS_VARIABLE}={text}: {error.errors()[0]['msg']}",
                'a JSON list such as [{"kind": "capacity", "times": 1}]',
                "correct the variable or unset it",
            ) from None

    def order(self, fault: Fault) -> None:
        """From now on, until it struck `fault.times` times or `clear`."""
        with self._lock:
            self._orders.append((fault, fault.times))

    def clear(self) -> None:
        """Nothing fails on order any more."""
        with self._lock:
            self._orders.clear()

    def orders(self) -> list[Fault]:
        """What is in force, each with the number of times still to come."""
        with self._lock:
            return [fault.model_copy(update={"times": left}) for fault, left in self._orders]

    def active(
        self, kind: FaultKind, endpoint_name: str = "", config_name: str = "", operation: str = ""
    ) -> Fault | None:
        """The first order that applies, without using it up."""
        with self._lock:
            return self._find(kind, endpoint_name, config_name, operation)

    def take(
        self, kind: FaultKind, endpoint_name: str = "", config_name: str = "", operation: str = ""
    ) -> Fault | None:
        """The first order that applies; it counts as having struck once."""
        with self._lock:
            fault = self._find(kind, endpoint_name, config_name, operation)
            if fault is not None:
                self._use_up(fault)
            return fault

    def _find(self, kind: FaultKind, endpoint: str, config: str, operation: str) -> Fault | None:
        for fault, _ in self._orders:
            names = ((endpoint, fault.endpoint), (config, fault.config), (operation, fault.operation))
            if fault.kind == kind and all(fnmatchcase(name, pattern) for name, pattern in names):
                return fault
        return None

    def _use_up(self, struck: Fault) -> None:
        remaining: list[tuple[Fault, int | None]] = []
        for fault, left in self._orders:
            if fault is struck and left is not None:
                left -= 1
            if left != 0:
                remaining.append((fault, left))
        self._orders = remaining
