"""One answer per held-out prompt, with the acceptance that vLLM counted for it. No torch here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from drafter.errors import ServerError
from drafter.held_out import HeldOutPrompt
from drafter.progress import track
from drafter.records import Record
from drafter.serving import VllmServer

PER_REQUEST_ACCEPTANCE = ("--per-request-spec-decode-metrics", "summary")
_REQUEST_TIMEOUT_S = 600.0
_TIME_TO_NOTICE_DEATH_S = 3.0


class Answer(Record):
    """What the server wrote for one prompt."""

    conversation_id: str
    domain: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    num_drafts: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class Sampling:
    """How to answer."""

    max_tokens: int
    temperature: float
    seed: int


def ask(
    server: VllmServer, prompts: Sequence[HeldOutPrompt], sampling: Sampling, concurrency: int
) -> tuple[Answer, ...]:
    """Answer all prompts, so many at a time; the order of the prompts is kept.

    Raises:
        ServerError: the server died, or refused a request.
    """
    limits = httpx.Limits(max_connections=concurrency)
    timeout = httpx.Timeout(_REQUEST_TIMEOUT_S)
    with (
        httpx.Client(base_url=server.url, timeout=timeout, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(concurrency) as pool,
        track(len(prompts), "answering held-out prompts", "prompts") as progress,
    ):
        pending = [pool.submit(_ask_one, client, server, prompt, sampling) for prompt in prompts]
        answers = []
        try:
            for future in pending:
                answers.append(future.result())
                progress.advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(answers)


def _ask_one(client: httpx.Client, server: VllmServer, prompt: HeldOutPrompt, sampling: Sampling) -> Answer:
    body = {
        "model": server.model,
        "prompt": prompt.text,
        "add_special_tokens": False,  # the chat template wrote them
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "return_token_ids": True,
    }
    try:
        response = client.post("/v1/completions", json=body)
    except httpx.TransportError as error:
        raise _lost(server, error) from None
    if response.status_code != 200:
        raise ServerError(
            f"vLLM answered {response.status_code} to the prompt of conversation {prompt.conversation_id}: "
            f"{response.text[:500]}",
            "an answer",
            f"read {server.log_path}",
        )
    return _answer(response.json(), prompt)


def _answer(response: dict[str, Any], prompt: HeldOutPrompt) -> Answer:
    counted = (response.get("metrics") or {}).get("speculative_decoding") or {}
    return Answer(
        conversation_id=prompt.conversation_id,
        domain=prompt.domain,
        prompt_tokens=response["usage"]["prompt_tokens"],
        token_ids=tuple(response["choices"][0]["token_ids"]),
        num_drafts=counted.get("num_spec_steps", 0),
        num_accepted_tokens=counted.get("num_accepted_draft_tokens", 0),
    )


def _lost(server: VllmServer, error: httpx.TransportError) -> ServerError:
    """A broken connection usually means a dead server; its end is noticed a moment later."""
    deadline = time.monotonic() + _TIME_TO_NOTICE_DEATH_S
    while server.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        server.raise_if_dead()
    except ServerError as death:
        return death
    return ServerError(
        f"the connection to vLLM broke: {type(error).__name__}: {error}",
        "a server that answers",
        f"read {server.log_path}",
    )
