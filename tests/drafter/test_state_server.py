"""The client of several extraction servers: who is asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import pytest

from drafter.config import ExtractSettings, ServerSettings
from drafter.errors import ServerError
from drafter.serving import VllmServer
from drafter.state_server import VllmExtractor, start_extractor
from drafter.target import load_target


def stand_ins(directory: Path, count: int) -> list[VllmServer]:
    """Servers that were never started, with ports 1, 2, ..."""
    servers = [VllmServer(directory, ServerSettings(), directory / f"{i}.log") for i in range(count)]
    for port, server in enumerate(servers, start=1):
        server.port = port
    return servers


def test_the_least_busy_server_is_asked(tmp_path: Path) -> None:
    """Answers of the first server wait until all six conversations are read or on their way."""
    asked: Counter[int | None] = Counter()
    in_flight: Counter[int | None] = Counter()
    most: Counter[int | None] = Counter()
    release = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        port = request.url.port
        asked[port] += 1
        in_flight[port] += 1
        most[port] = max(most[port], in_flight[port])
        if port == 1:
            await release.wait()
        else:
            await asyncio.sleep(0.01)  # until all four have asked
            if asked[2] == 4:
                release.set()
        in_flight[port] -= 1
        prompt = json.loads(request.content)["prompt"]
        return httpx.Response(200, json={"choices": [{"token_ids": prompt, "finish_reason": "stop"}]})

    async def ask_all() -> list[tuple[int, ...]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            extractor = VllmExtractor(stand_ins(tmp_path, 2), client, temperature=0.0)
            todo = iter(range(6))
            answers: list[tuple[int, ...]] = []

            async def work() -> None:
                for number in todo:
                    got = await extractor.answer((number,), 1, seed=0, keep_states=False)
                    answers.append(got.ids)

            async with asyncio.timeout(60):
                await asyncio.gather(*(work() for _ in range(4)))
            return answers

    assert sorted(asyncio.run(ask_all())) == [(number,) for number in range(6)]
    assert asked == {1: 2, 2: 4}, "a server that answers sooner gets more"
    assert most == {1: 2, 2: 2}, "never more at one than at the other by two"


def test_several_servers_cannot_have_one_port(tiny_target: Path, tmp_path: Path) -> None:
    settings = ExtractSettings(
        dataset=tmp_path,
        target=tiny_target,
        output=tmp_path / "states",
        num_servers=2,
        server={"port": 8000},
    )

    async def start() -> None:
        async with start_extractor(settings, load_target(tiny_target), (1, 2, 3, 4), tmp_path, 64):
            pytest.fail("started")

    with pytest.raises(ServerError, match=r"server\.port 8000 for 2 servers"):
        asyncio.run(start())
