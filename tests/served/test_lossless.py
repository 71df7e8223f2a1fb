"""Speculation must not change what a greedy target writes; float32 shows it to the token."""

from __future__ import annotations

import pytest

from drafter.serving import VllmServer
from drafter.shards import Document
from tests.conftest import ANSWER_TOKENS
from tests.drafter.tiny import PROMPT_TOKENS
from tests.served.completions import complete_all, token_ids

pytestmark = pytest.mark.vllm


def test_greedy_output_in_float32_is_the_same_with_and_without_the_drafter(
    plain_server: VllmServer, drafting_server: VllmServer, evaluation_documents: list[Document]
) -> None:
    prompts = [document.input_ids[:PROMPT_TOKENS].tolist() for document in evaluation_documents]
    plain = complete_all(plain_server, prompts, ANSWER_TOKENS, temperature=0)
    drafted = complete_all(drafting_server, prompts, ANSWER_TOKENS, temperature=0)
    assert [token_ids(answer) for answer in plain] == [token_ids(answer) for answer in drafted]
    accepted = [answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for answer in drafted]
    assert min(accepted) > 0, "nothing was accepted, so nothing was shown"
