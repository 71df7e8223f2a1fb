"""Answers held back as the `latency` fault orders: a container that takes longer than it does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import httpx


async def late_pieces(
    answer: httpx.Response, sent: float, delay_s: float = 0.0, factor: float = 1.0
) -> AsyncGenerator[bytes, None]:
    """The pieces of a streamed answer, each when it came, or when a slower container would have sent it.

    Args:
        sent: when the request went out, on time.perf_counter().
        delay_s: seconds added once.
        factor: how many times as long after the request each piece comes.

    Raises:
        httpx.TransportError: the answer breaks off.
    """
    if delay_s == 0.0 and factor == 1.0:
        async for prompt_piece in answer.aiter_raw():
            yield prompt_piece
        return
    # Read at the container's own pace meanwhile: a piece fetched only when the last one has gone out would look as
    # late as that one.
    arrivals: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()

    async def read() -> None:
        try:
            async for piece in answer.aiter_raw():
                arrivals.put_nowait((time.perf_counter(), piece))
        finally:
            arrivals.put_nowait((time.perf_counter(), None))

    reading = asyncio.create_task(read())
    try:
        while True:
            arrived, piece = await arrivals.get()
            await asyncio.sleep(sent + delay_s + factor * (arrived - sent) - time.perf_counter())
            if piece is None:
                await reading  # raises what broke it off
                return
            yield piece
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.TransportError):
            await reading
