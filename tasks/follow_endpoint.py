"""Lines about an endpoint that is being created or updated, while something else waits for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from drafter.errors import FledgeError
from tasks.aws import Aws
from tasks.endpoint_status import EndpointStatus, read_status

_POLL_S = 5.0
_LEAST_CHANGE_OF_SHARE = 0.05


@contextmanager
def followed(
    aws: Aws, endpoint_name: str, out: TextIO | None = None, poll_s: float = _POLL_S
) -> Iterator[None]:
    """Say on stderr what changes at the endpoint for as long as the block runs."""
    stop = threading.Event()
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {line}", file=out or sys.stderr, flush=True)

    thread = threading.Thread(target=_follow, args=(aws, endpoint_name, say, stop, poll_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=poll_s + 5)


def _follow(
    aws: Aws, endpoint_name: str, say: Callable[[str], None], stop: threading.Event, poll_s: float
) -> None:
    before: EndpointStatus | None = None
    while not stop.is_set():
        try:
            now = read_status(aws, endpoint_name)
        except FledgeError:  # not made yet, or AWS is busy: whoever waits for it says so
            stop.wait(poll_s)
            continue
        if before is None or _changed(before, now):
            say(describe(now))
            before = now
        stop.wait(poll_s)


def describe(status: EndpointStatus) -> str:
    """An endpoint in one line: status, and each fleet with its share of the last requests."""
    fleets = [
        f"{fleet.config_name} {fleet.state}"
        + ("" if fleet.share_of_traffic is None else f" with {fleet.share_of_traffic:.0%} of the requests")
        for fleet in status.fleets
    ]
    return f"{status.endpoint_name} {status.status}: {', '.join(fleets)}"


def _changed(before: EndpointStatus, now: EndpointStatus) -> bool:
    """Whether it is worth a line; shares wobble with every request."""
    if (before.status, before.failure_reason) != (now.status, now.failure_reason):
        return True
    if [(one.config_name, one.state) for one in before.fleets] != [
        (one.config_name, one.state) for one in now.fleets
    ]:
        return True
    return any(
        abs((old.share_of_traffic or 0) - (new.share_of_traffic or 0)) > _LEAST_CHANGE_OF_SHARE
        for old, new in zip(before.fleets, now.fleets, strict=True)
    )
