"""Prefect's servers as tests speak to them: by HTTP, and by the flows and events of their own process."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from prefect.client.base import PrefectHttpxSyncClient
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

DRAIN_TIMEOUT_S = 60
# Of a request that a busy server puts off, by Prefect's own clients: they wait 2, 4, 8 ... 256 s.
MAX_RETRIES = "7"


def prefect_api(url: str) -> httpx.Client:
    """A client of a server's API that asks again where the server says "later", as all of Prefect's own do.

    It answers 503 while another connection writes to its SQLite.

    Args:
        url: of the server, without /api.
    """
    return PrefectHttpxSyncClient(
        base_url=f"{url}/api", trust_env=False, timeout=60, raise_on_all_errors=False
    )


@contextmanager
def flows_on(url: str) -> Iterator[None]:
    """Flows that this process runs use a server, and what they say arrives there before it ends.

    Prefect sends events through one worker a process. It stays with the server of its first event, whatever
    PREFECT_API_URL says later: once that server is gone, it tries each event for a minute, those of later
    servers too. So no worker may outlive its server.

    Args:
        url: of the server, without /api.
    """
    drain()
    with temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        try:
            yield
        finally:
            drain()


def drain() -> None:
    """Send what waits to be sent, for a while.

    What is left then is thrown away: Prefect would go on with it at the end of the process, however long it takes.
    """
    services = tuple(EventsWorker._instances.values())  # of all kinds: logs too
    EventsWorker.drain_all(timeout=DRAIN_TIMEOUT_S)
    for service in services:
        if service._done_event is not None and not service._done_event.is_set():
            _throw_away(service._queue)


def _throw_away(waiting: queue.Queue[Any]) -> None:
    """Empty the queue of a service that has been told to stop, but for the word that says so."""
    with suppress(queue.Empty):
        while True:
            waiting.get_nowait()
    waiting.put_nowait(None)
