"""EAGLE-3 as vLLM serves it, without parallel drafting: acceptance as estimated, output as without a drafter."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter.answers import PER_REQUEST_ACCEPTANCE
from drafter.config import EstimateSettings
from drafter.estimate import estimate
from drafter.serving import speculative_arguments
from drafter.shards import Document
from tests.conftest import ANSWER_TOKENS, NUM_SPECULATIVE_TOKENS, serve, train_servable_drafter
from tests.drafter.tiny import PROMPT_TOKENS, write_states
from tests.served.completions import complete_all, token_ids

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def eagle3_drafter(servable_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported EAGLE-3 drafter of the served target."""
    folder = tmp_path_factory.mktemp("served_eagle3")
    return train_servable_drafter(servable_target, folder, algorithm="eagle3")


def test_served_acceptance_length_is_the_estimated_one(
    servable_target: Path, eagle3_drafter: Path, evaluation_documents: list[Document], tmp_path: Path
) -> None:
    states = write_states(tmp_path / "evaluation", servable_target, evaluation_documents, split="evaluation")
    promised = estimate(
        EstimateSettings(
            drafter=eagle3_drafter,
            states=states,
            target=servable_target,
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        )
    )
    prompts = [document.input_ids[:PROMPT_TOKENS].tolist() for document in evaluation_documents]
    drafting = speculative_arguments(eagle3_drafter, NUM_SPECULATIVE_TOKENS, "eagle3")
    log_path = tmp_path / "server.log"
    with serve(servable_target, log_path, *drafting, *PER_REQUEST_ACCEPTANCE) as server:
        answers = complete_all(server, prompts, ANSWER_TOKENS, temperature=0)
    counted = [answer["metrics"]["speculative_decoding"] for answer in answers]
    num_drafts = sum(one["num_spec_steps"] for one in counted)
    served = 1 + sum(one["num_accepted_draft_tokens"] for one in counted) / num_drafts
    print(f"served {served:.3f}, estimated {promised.acceptance_length:.3f}")
    assert served > 1.3, "a drafter that hardly guesses would agree with anything"
    assert served == pytest.approx(promised.acceptance_length, abs=0.1)
    written = [document.input_ids[PROMPT_TOKENS:].tolist() for document in evaluation_documents]
    alike = [token_ids(answer)[0] == one for answer, one in zip(answers, written, strict=True)]
    assert sum(alike) / len(alike) > 0.9, "the target's own greedy answers, whoever drafted"
