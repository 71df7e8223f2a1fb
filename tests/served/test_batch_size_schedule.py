"""A server that drafts for small batches only: what vLLM does with the schedule that an advice may hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafter.answers import PER_REQUEST_ACCEPTANCE
from drafter.serving import VllmServer, speculative_arguments
from drafter.shards import Document
from tests.conftest import ANSWER_TOKENS, NUM_SPECULATIVE_TOKENS, serve
from tests.drafter.tiny import PROMPT_TOKENS
from tests.served.completions import complete, complete_all, token_ids

pytestmark = pytest.mark.vllm

# Long beside what requests that are sent at one moment arrive apart on a busy machine.
LONG_ANSWER_TOKENS = 4 * ANSWER_TOKENS
SCHEDULE = ((1, 2, NUM_SPECULATIVE_TOKENS), (3, 32, 0))


@pytest.fixture(scope="module")
def scheduled_server(
    servable_target: Path, servable_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """Three tokens a draft for one or two requests, none for more."""
    drafting = speculative_arguments(servable_drafter, NUM_SPECULATIVE_TOKENS, schedule=SCHEDULE)
    log_path = tmp_path_factory.mktemp("scheduled") / "server.log"
    with serve(servable_target, log_path, *drafting, *PER_REQUEST_ACCEPTANCE) as server:
        yield server


def num_drafted_steps(answer: dict[str, Any]) -> int:
    """Verification steps that had drafts."""
    figures = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    return int(figures.get("num_spec_steps") or 0)


def test_a_scheduled_server_drafts_for_small_batches_only_and_answers_the_same(
    scheduled_server: VllmServer, evaluation_documents: list[Document]
) -> None:
    prompts = [document.input_ids[:PROMPT_TOKENS].tolist() for document in evaluation_documents[:8]]
    alone = [complete(scheduled_server, prompt, LONG_ANSWER_TOKENS, temperature=0) for prompt in prompts]
    together = complete_all(scheduled_server, prompts, LONG_ANSWER_TOKENS, temperature=0)

    assert [token_ids(answer) for answer in alone] == [token_ids(answer) for answer in together]
    assert (
        min(num_drafted_steps(answer) for answer in alone)
        > LONG_ANSWER_TOKENS // (NUM_SPECULATIVE_TOKENS + 1) - 1
    )
    # The first steps may find few requests in the batch, and so may the last ones.
    assert sum(map(num_drafted_steps, together)) < 0.25 * sum(map(num_drafted_steps, alone))
