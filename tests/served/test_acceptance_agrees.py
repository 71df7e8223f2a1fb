"""What the trainer's estimate promises is what the server does."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.config import EstimateSettings
from drafter.estimate import estimate
from drafter.serving import VllmServer
from drafter.shards import Document
from tests.conftest import ANSWER_TOKENS, NUM_SPECULATIVE_TOKENS
from tests.drafter.tiny import PROMPT_TOKENS, write_states
from tests.served.completions import complete_all

pytestmark = pytest.mark.vllm


def test_served_acceptance_length_is_the_estimated_one(
    drafting_server: VllmServer,
    servable_target: Path,
    servable_drafter: Path,
    evaluation_documents: list[Document],
    tmp_path: Path,
) -> None:
    states = write_states(tmp_path / "evaluation", servable_target, evaluation_documents, split="evaluation")
    promised = estimate(
        EstimateSettings(
            drafter=servable_drafter,
            states=states,
            target=servable_target,
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        )
    )
    prompts = [document.input_ids[:PROMPT_TOKENS].tolist() for document in evaluation_documents]
    answers = complete_all(drafting_server, prompts, ANSWER_TOKENS, temperature=0)
    counted = [answer["metrics"]["speculative_decoding"] for answer in answers]
    num_drafts = sum(one["num_spec_steps"] for one in counted)
    served = 1 + sum(one["num_accepted_draft_tokens"] for one in counted) / num_drafts
    assert served > 1.3, "a drafter that hardly guesses would agree with anything"
    assert served == pytest.approx(promised.acceptance_length, abs=0.1)
