"""vLLM as an extractor: servers that write the hidden states of what they read and answer, and their client.

L is the number of the target's layers. One file per request appears in the spool directory, through the
connector of `containers/vllm`. Layer id i is the state entering layer i; id L is the state before the last norm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from drafter.answering import Answer
from drafter.config import ExtractSettings
from drafter.errors import DataError, ServerError
from drafter.serving import Share, VllmServer
from drafter.target import Target

# vLLM leaves out the states of a step that comes this close to its own limit.
WINDOW_MARGIN_TOKENS = 4
_POLL_S = 0.01
_FILE_TIMEOUT_S = 60.0
_REQUEST_TIMEOUT_S = 1800.0


class VllmExtractor:
    """Client of running extraction servers; a request goes to the least busy one. Use `start_extractor`."""

    def __init__(self, servers: Sequence[VllmServer], client: httpx.AsyncClient, temperature: float) -> None:
        self._in_flight = dict.fromkeys(servers, 0)
        self._client = client
        self._temperature = temperature

    async def answer(self, prompt: tuple[int, ...], max_tokens: int, seed: int, keep_states: bool) -> Answer:
        """Generate; the states of prompt and answer come along if `keep_states`."""
        transfer = {"include_output_tokens": True} if keep_states else {"save_hidden_states": False}
        with self._least_busy() as server:
            body = await self._complete(
                server, prompt, max_tokens, transfer, temperature=self._temperature, seed=seed
            )
            states = await self._wait_for_file(server, body) if keep_states else None
        choice = body["choices"][0]
        return Answer(tuple(choice["token_ids"]), choice["finish_reason"] == "stop", states)

    async def states(self, ids: tuple[int, ...]) -> Path:
        """Read given tokens; the one token that a request has to generate is thrown away."""
        with self._least_busy() as server:
            return await self._wait_for_file(
                server, await self._complete(server, ids, 1, {}, temperature=0.0)
            )

    @contextlib.contextmanager
    def _least_busy(self) -> Iterator[VllmServer]:
        server = min(self._in_flight, key=self._in_flight.__getitem__)
        self._in_flight[server] += 1
        try:
            yield server
        finally:
            self._in_flight[server] -= 1

    async def _complete(
        self,
        server: VllmServer,
        prompt: Sequence[int],
        max_tokens: int,
        transfer: dict[str, Any],
        **sampling: Any,
    ) -> dict[str, Any]:
        request = {
            "model": server.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "kv_transfer_params": transfer,
            **sampling,
        }
        try:
            response = await self._client.post(f"{server.url}/v1/completions", json=request)
        except httpx.TransportError as error:
            await asyncio.sleep(1.0)  # a dying server closes connections before its process has ended
            server.raise_if_dead()
            raise ServerError(
                f"a request to the vLLM server failed: {type(error).__name__}: {error}; log: {server.log_path}",
                f"an answer within {_REQUEST_TIMEOUT_S:.0f} s",
                "lower concurrency or max_answer_tokens; the run continues where it stopped",
            ) from None
        if response.status_code != 200:
            raise ServerError(
                f"the vLLM server refused a request ({response.status_code}): {response.text[:500]}",
                "a request that fits the server",
                f"read {server.log_path}; report it if the settings are not at fault",
            )
        body: dict[str, Any] = response.json()
        return body

    async def _wait_for_file(self, server: VllmServer, body: dict[str, Any]) -> Path:
        """The file is written just after the answer; it appears when it is whole."""
        path = Path((body.get("kv_transfer_params") or {}).get("hidden_states_path") or "")
        error = path.with_name(f"{path.name}.error")
        give_up_at = time.monotonic() + _FILE_TIMEOUT_S
        while path.name and not path.exists() and time.monotonic() < give_up_at:
            if error.exists():
                raise DataError(
                    f"vLLM could not write {path}: {error.read_text() or 'no reason given'}",
                    "room for the states of the requests in flight",
                    "free disk space and run again; finished conversations are kept",
                )
            await asyncio.sleep(_POLL_S)
        if not path.name or not path.exists():
            server.raise_if_dead()
            raise ServerError(
                f"vLLM answered, but wrote no states ({path or 'no path given'}) within {_FILE_TIMEOUT_S:.0f} s",
                "the fledge-vllm package in the vLLM environment",
                f"install containers/vllm there (make setup); read {server.log_path}",
            )
        return path


@asynccontextmanager
async def start_extractor(
    settings: ExtractSettings, target: Target, layers: Sequence[int], spool: Path, window: int
) -> AsyncIterator[VllmExtractor]:
    """Start the servers for extraction and end them with the block.

    Args:
        layers: layer ids whose entering states are written.
        spool: directory for the servers' files.
        window: most tokens of a conversation.

    Raises:
        ServerError: one does not start.
    """
    server_settings = settings.server.model_copy(
        update={
            "max_num_seqs": settings.concurrency,
            "max_model_len_tokens": window + WINDOW_MARGIN_TOKENS,
        }
    )
    count = settings.num_servers
    if count > 1 and server_settings.port is not None:
        raise ServerError(
            f"server.port {server_settings.port} for {count} servers",
            "a port for each",
            "leave server.port out: each takes a free one",
        )
    names = ["server.log"] if count == 1 else [f"server-{index}.log" for index in range(count)]
    servers = [
        VllmServer(
            target.path,
            server_settings,
            log_path=settings.output / name,
            extra_args=extraction_arguments(layers, spool),
            share=Share(index, count),
        )
        for index, name in enumerate(names)
    ]
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each of thousands of requests
    limits = httpx.Limits(max_connections=count * settings.concurrency + 8)
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.callback(_stop, server)
            await asyncio.to_thread(server.start)
        for server in servers:
            await asyncio.to_thread(server.wait_until_ready)
        client = httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S, limits=limits, trust_env=False)
        yield VllmExtractor(servers, await stack.enter_async_context(client), settings.temperature)


def _stop(server: VllmServer) -> None:
    with contextlib.suppress(ServerError):
        server.stop()


def extraction_arguments(layers: Sequence[int], spool: Path) -> tuple[str, ...]:
    """Command-line arguments that make vLLM write states. Facts behind them: `containers/vllm`."""
    extract = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    connector = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "fledge_vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(spool.resolve()),
            "use_synchronization_lock": False,
        },
    }
    return (
        "--speculative-config", json.dumps(extract),
        "--kv-transfer-config", json.dumps(connector),
        # States of cached prefixes would be missing from the last pass over a conversation.
        "--no-enable-prefix-caching",
        "--scheduler-cls", "fledge_vllm.scheduler.DraftlessScheduler",
        "--no-async-scheduling",
    )  # fmt: skip
