"""The estimate walks answers as decoding does: held against decoding step by step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter.config import EstimateSettings
from drafter.drafting import draft_answers
from drafter.errors import DataError
from drafter.estimate import (
    answer_spans,
    estimate,
    greedy_tokens,
    number_format,
    summarize,
    walk_answer,
    walk_document,
)
from drafter.export import load_exported_drafter
from drafter.initialization import TargetTensors, build_teacher
from drafter.model import Drafter
from drafter.records import AcceptanceEstimate
from drafter.shards import Document
from drafter.target import load_target
from drafter.two_stream import StepOptions
from tests.drafter.tiny import write_states


@pytest.fixture(scope="module")
def drafter(tiny_drafter: Path, tiny_target: Path) -> Drafter:
    return load_exported_drafter(tiny_drafter, load_target(tiny_target))


def test_a_walk_by_hand() -> None:
    """Tokens 0..9, the answer is 2..9. Anchor 1 has read token 2 and drafts 3, 4, 5."""
    truth = np.arange(10)
    drafts = np.array([
        [3, 4, 99],   # anchor 1: two accepted, the target adds 5; anchor 4 comes next
        [0, 0, 0],
        [0, 0, 0],
        [99, 7, 8],   # anchor 4 has read 5: a miss, whatever follows; the target adds 6
        [7, 8, 9],    # anchor 5: all accepted; the answer is over
    ])  # fmt: skip
    rows = {anchor: anchor - 1 for anchor in range(1, 6)}
    assert walk_answer(drafts, rows, truth, anchor=1, end=10).tolist() == [2, 0, 3]


def test_a_run_is_cut_where_the_answer_ends() -> None:
    truth = np.arange(5)
    assert walk_answer(np.array([[3, 4, 5, 6]]), {1: 0}, truth, anchor=1, end=5).tolist() == [2]


def test_each_answer_of_a_conversation_is_found() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
    assert list(answer_spans(mask)) == [(2, 4), (5, 8)]
    assert list(answer_spans(np.zeros(3, dtype=bool))) == []
    assert list(answer_spans(np.ones(3, dtype=bool))) == [(0, 3)]


def test_the_summary_is_what_a_server_counts() -> None:
    from drafter.estimate import Walk

    result = summarize([Walk("a", np.array([2, 0])), Walk("b", np.array([3, 3]))], 3)
    assert result.acceptance_length == 1 + 8 / 4
    assert result.acceptance_rate_per_position == (0.75, 0.75, 0.5)
    assert sum(result.acceptance_rate_per_position) == result.acceptance_length - 1
    assert result.per_domain == {"a": 2.0, "b": 4.0}


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 6])
def test_walking_equals_decoding_step_by_step(
    drafter: Drafter, tiny_documents: list[Document], num_speculative_tokens: int
) -> None:
    """At each step only what a server knows then: the tokens so far and the states of all but the newest."""
    options = StepOptions(dtype=number_format())
    for document in tiny_documents[:6]:
        ids = document.input_ids
        known = 10  # nine tokens of prompt, and the answer's first from the prefill
        expected = []
        while known < len(ids):
            anchor = torch.tensor([known - 2])
            guessed = draft_answers(
                drafter, ids[:known], document.auxiliary[:known], anchor, num_speculative_tokens, options
            )[0].tolist()
            run = 0
            while run < len(guessed) and known + run < len(ids) and guessed[run] == ids[known + run]:
                run += 1
            expected.append(run)
            known += run + 1
        (walk,) = walk_document(drafter, document, num_speculative_tokens, None)
        assert walk.accepted.tolist() == expected


def test_two_turns_are_walked_as_two_answers(drafter: Drafter, tiny_documents: list[Document]) -> None:
    mask = tiny_documents[0].loss_mask.clone()
    mask[15:20] = False
    walks = walk_document(drafter, dataclasses.replace(tiny_documents[0], loss_mask=mask), 3, None)
    assert len(walks) == 2
    assert sum(len(walk.accepted) + walk.accepted.sum() for walk in walks) <= 24 - 5


def test_greedy_answers_are_the_targets_best_tokens(
    tiny_target: Path, drafter: Drafter, tiny_documents: list[Document]
) -> None:
    head = build_teacher(drafter.config, torch.arange(264), TargetTensors(tiny_target), torch.float32, "cpu")
    agreements = []
    for document in tiny_documents:
        greedy = torch.from_numpy(greedy_tokens(head, document))
        agreements.append((greedy == document.input_ids)[document.loss_mask].float().mean())
    assert float(torch.stack(agreements).mean()) > 0.9  # the rest: answers here avoid special tokens


def estimate_of(
    drafter: Path, states: Path, target: Path, k: int = 4, output: Path | None = None
) -> AcceptanceEstimate:
    settings = EstimateSettings(
        drafter=drafter, states=states, target=target, num_speculative_tokens=k, output=output
    )
    return estimate(settings)


def test_from_files_to_a_record(
    tiny_drafter: Path, tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    result = estimate_of(tiny_drafter, tiny_states, tiny_target, output=tmp_path / "estimate.json")
    assert AcceptanceEstimate.load(tmp_path / "estimate.json") == result
    assert set(result.per_domain) == {"code", "chat"}
    assert result.num_answers == 40
    assert 1.0 <= result.acceptance_length <= 5.0


def test_answers_that_are_not_greedy_are_judged_by_the_targets_head(
    tiny_drafter: Path, tiny_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    """Greedy states declared as given: nearly the same figure, by way of the head."""
    states = write_states(tmp_path / "given", tiny_target, tiny_documents, greedy_answers=False)
    greedy = write_states(tmp_path / "greedy", tiny_target, tiny_documents)
    lengths = [estimate_of(tiny_drafter, path, tiny_target).acceptance_length for path in (states, greedy)]
    assert lengths[0] == pytest.approx(lengths[1], abs=0.05)


def test_more_tokens_than_trained_depths_are_warned_of(
    tiny_drafter: Path, tiny_states: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate_of(tiny_drafter, tiny_states, tiny_target, k=4)
    assert "warning" not in capsys.readouterr().err
    estimate_of(tiny_drafter, tiny_states, tiny_target, k=6)
    assert "was trained for 4" in capsys.readouterr().err


def test_states_without_an_answer_to_walk_are_refused(
    tiny_drafter: Path, tiny_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    blank = [dataclasses.replace(d, loss_mask=torch.zeros_like(d.loss_mask)) for d in tiny_documents]
    states = write_states(tmp_path / "states", tiny_target, blank)
    with pytest.raises(DataError, match="no answer"):
        estimate_of(tiny_drafter, states, tiny_target)
