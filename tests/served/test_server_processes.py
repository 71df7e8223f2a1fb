"""A vLLM server is three processes; none outlives the first."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from drafter.config import ServerSettings
from drafter.serving import VllmServer
from tests.waiting import is_alive, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_server_that_is_killed_frees_its_port_and_takes_its_processes_along(
    servable_target: Path, tmp_path: Path
) -> None:
    settings = ServerSettings(max_num_seqs=4, kv_cache_gb=1, max_model_len_tokens=256)
    with VllmServer(servable_target, settings, tmp_path / "server.log") as server:
        api_server = next(
            one
            for one in psutil.Process().children(recursive=True)
            if any("api_server" in word for word in one.cmdline())
            and str(server.port) in one.cmdline()
            and "process_guard" not in " ".join(one.cmdline())
        )
        others = api_server.children(recursive=True)
        titles = " ".join(one.name() for one in others)
        assert "VLLM::EngineCor" in titles
        assert "VLLM::Worker" in titles

        api_server.kill()

        wait_until(lambda: not any(is_alive(one.pid) for one in others))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", trust_env=False)
