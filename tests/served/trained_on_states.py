"""From a target to a served drafter for it with vLLM at both ends, as small as it can be."""

from __future__ import annotations

from pathlib import Path

from drafter.answers import PER_REQUEST_ACCEPTANCE
from drafter.config import ExportSettings, ExtractSettings
from drafter.export import export
from drafter.extraction import extract
from drafter.serving import VllmServer, speculative_arguments
from drafter.shards import Document, open_states
from drafter.trainer import train
from tests.conftest import NUM_SPECULATIVE_TOKENS, serve
from tests.drafter.test_extraction import make_dataset
from tests.drafter.tiny import training_settings
from tests.served.completions import complete_all, token_ids

ANSWER_TOKENS = 64
_QUESTIONS = [[f"Question {number}: what is it?"] for number in range(32)]


def extract_with_vllm(target: Path, directory: Path) -> Path:
    """States of 32 conversations with the target's own greedy answers, all by vLLM in float32."""
    settings = ExtractSettings(
        dataset=make_dataset(target, directory, _QUESTIONS),
        target=target,
        output=directory / "states",
        max_answer_tokens=ANSWER_TOKENS,
        max_length_tokens=256,
        concurrency=32,
        server={"dtype": "float32"},
    )
    extract(settings)
    return settings.output


def documents_of(states: Path) -> list[Document]:
    """All conversations of a states directory."""
    extracted = open_states(states)
    return [extracted.document(index) for index in range(len(extracted))]


def train_for_seconds(states: Path, target: Path, directory: Path, **changes: object) -> Path:
    """An exported drafter after ten seconds of training."""
    values: dict[str, object] = {
        "num_depths": NUM_SPECULATIVE_TOKENS + 1,
        "max_length_tokens": 512,
        "num_epochs": 40,
        "time_budget_s": 10,
        **changes,
    }
    train(training_settings(states, target, directory / "training", **values))
    output = directory / "drafter"
    export(ExportSettings(training=directory / "training", target=target, output=output))
    return output


def drafting_server(target: Path, drafter: Path, log_path: Path) -> VllmServer:
    """A server of `target` that guesses three tokens at once and counts what is accepted."""
    drafting = speculative_arguments(drafter, NUM_SPECULATIVE_TOKENS)
    return serve(target, log_path, *drafting, *PER_REQUEST_ACCEPTANCE)


def assert_same_answers(server: VllmServer, documents: list[Document]) -> None:
    """The server's greedy answers are those that the documents hold, and some guesses were accepted."""
    starts = [int(document.loss_mask.nonzero()[0]) for document in documents]
    prompts = [d.input_ids[:start].tolist() for d, start in zip(documents, starts, strict=True)]
    answers = complete_all(server, prompts, ANSWER_TOKENS, temperature=0)
    expected = [d.input_ids[start:].tolist() for d, start in zip(documents, starts, strict=True)]
    same = [token_ids(answer)[0] == own for answer, own in zip(answers, expected, strict=True)]
    assert all(same), f"{same.count(False)} of {len(same)} answers differ"
    accepted = [answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for answer in answers]
    assert sum(accepted) > 0, "nothing was accepted, so nothing was shown"
