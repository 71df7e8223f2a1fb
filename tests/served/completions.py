"""Asking a test server for tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from drafter.serving import VllmServer
from tests.waiting import PATIENCE_S

# One for all: making a client takes longer than many an answer, and requests that are to meet would come one
# by one. It keeps no connection, which the server might close in the moment that it is used again.
_CLIENT = httpx.Client(timeout=PATIENCE_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def complete(server: VllmServer, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> dict[str, Any]:
    """One request of token ids; the answer as vLLM gives it, with token ids, never ending early."""
    body = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **sampling,
    }
    response = _CLIENT.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete_all(
    server: VllmServer, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any
) -> list[dict[str, Any]]:
    """One answer per prompt, eight at a time, in order."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, max_tokens, **sampling), prompts))


def token_ids(answer: dict[str, Any]) -> list[list[int]]:
    """Tokens of each choice."""
    return [choice["token_ids"] for choice in answer["choices"]]
