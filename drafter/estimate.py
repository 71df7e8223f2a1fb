"""The trainer's own estimate of the acceptance length, without a server.

Teacher-forced accuracy over all positions promises too much: decoding starts again right after a miss,
where guessing is hard. So each answer is walked as decoding does: draft K tokens, count the accepted
run, jump past the bonus token, draft again.

What vLLM has when it drafts: after a verification the drafter's cache holds a depth-0 slot for every
token before the newest one, made from the target's true states (the slots of rejected tokens are
overwritten), and the newest token sits in the last slot, followed by K-1 placeholders. Hence one pass
over the real slots of a document serves all its anchors.

    tokens   p0 p1 | a0 a1 a2 a3 a4      the prompt ends at p1; a0 comes from the prefill
    anchor 1 reads a0, drafts a1 a2 ..   two accepted -> the target adds a3
    anchor 4 reads a3, drafts a4 ..

Legend: T tokens of a document, K drafted tokens, S starts (anchor slots) of a document.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from drafter.config import EstimateSettings
from drafter.drafting import draft_answers
from drafter.errors import DataError
from drafter.export import load_exported_drafter
from drafter.initialization import TargetTensors, build_teacher
from drafter.loss import TeacherHead
from drafter.machine import native_number_format
from drafter.model import Drafter
from drafter.preflight import require_fit
from drafter.progress import track
from drafter.provenance import read_provenance
from drafter.records import AcceptanceEstimate
from drafter.shards import Document, open_states
from drafter.target import load_target
from drafter.two_stream import StepOptions

_TEACHER_ROWS = 256  # rows of full-vocabulary logits in memory at once


@dataclass(frozen=True)
class Walk:
    """Verification steps of one answer: how many drafted tokens each accepted, [steps]."""

    domain: str
    accepted: np.ndarray


def estimate(settings: EstimateSettings) -> AcceptanceEstimate:
    """Predict what vLLM would measure with this drafter on these answers.

    Raises:
        DataError: states of another target, or without an answer to walk.
        CheckpointError: a drafter that does not fit the target.
    """
    target = load_target(settings.target)
    require_fit(settings.drafter, target)
    _warn_if_deeper_than_trained(settings.drafter, settings.num_speculative_tokens)
    shape = read_provenance(settings.drafter).settings.get("drafter", {})
    drafter = load_exported_drafter(settings.drafter, target, shape.get("train_embedding", False))
    states = open_states(settings.states, target.fingerprint)
    full_head = None
    if not states.record.greedy_answers:
        everything = torch.arange(target.vocab_size)
        full_head = build_teacher(
            drafter.config, everything, TargetTensors(target.path), number_format(), torch.device("cpu")
        )
    walks: list[Walk] = []
    with track(len(states), "estimating", "conversations") as progress:
        for index in range(len(states)):
            walks += walk_document(
                drafter, states.document(index), settings.num_speculative_tokens, full_head
            )
            progress.advance(1)
    if not walks:
        raise DataError(
            f"{settings.states}: no answer of three tokens or more",
            "answers that a drafter could speed up",
            "extract the states with a larger --max-answer-tokens",
        )
    result = summarize(walks, settings.num_speculative_tokens)
    if settings.output is not None:
        result.save(settings.output)
    return result


def number_format() -> torch.dtype:
    """What this machine computes fast in."""
    return torch.bfloat16 if native_number_format() == "bfloat16" else torch.float32


def walk_document(
    drafter: Drafter, document: Document, num_speculative_tokens: int, full_head: TeacherHead | None
) -> list[Walk]:
    """Walk every answer of a document.

    Args:
        full_head: the target's head over its whole vocabulary; a drafted token then has to equal the
            head's best one. None: the answers are the target's greedy tokens themselves.
    """
    answers = list(answer_spans(document.loss_mask.numpy()))
    anchors = [np.arange(max(first - 1, 0), end - 2) for first, end in answers]
    starts = np.unique(np.concatenate(anchors)) if anchors else np.empty(0)
    if not len(starts):
        return []
    drafts = draft_answers(
        drafter,
        document.input_ids,
        document.auxiliary,
        torch.from_numpy(starts),
        num_speculative_tokens,
        StepOptions(dtype=number_format()),
    ).numpy()
    truth = document.input_ids.numpy() if full_head is None else greedy_tokens(full_head, document)
    rows = {int(start): row for row, start in enumerate(starts)}
    walks = []
    for first, end in answers:
        accepted = walk_answer(drafts, rows, truth, max(first - 1, 0), end)
        if len(accepted):
            walks.append(Walk(document.domain, accepted))
    return walks


def answer_spans(loss_mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """First token and end (exclusive) of each answer, from the loss mask [T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    for first, end in edges.reshape(-1, 2):
        yield int(first), int(end)


def walk_answer(
    drafts: np.ndarray, rows: dict[int, int], truth: np.ndarray, anchor: int, end: int
) -> np.ndarray:
    """Accepted tokens of each verification step of one answer.

    A run that reaches the end of the answer counts as far as it goes.

    Args:
        drafts: [S, K] tokens guessed after each start.
        rows: anchor slot -> its row in `drafts`.
        truth: [T] the target's greedy tokens.
        anchor: first anchor slot; slot s drafts tokens s+2, s+3, ...
        end: end of the answer (exclusive).
    """
    accepted = []
    while anchor + 2 < end:
        guessed = drafts[rows[anchor]]
        window = truth[anchor + 2 : min(anchor + 2 + len(guessed), end)]
        wrong = np.flatnonzero(guessed[: len(window)] != window)
        run = int(wrong[0]) if len(wrong) else len(window)
        accepted.append(run)
        anchor += run + 1
    return np.array(accepted, dtype=np.int64)


def greedy_tokens(full_head: TeacherHead, document: Document) -> np.ndarray:
    """The target's best token for each position given the text before it, [T]; position 0 keeps its own."""
    greedy = document.input_ids.clone()
    for start in range(0, len(greedy) - 1, _TEACHER_ROWS):
        states = document.final[start : min(start + _TEACHER_ROWS, len(greedy) - 1)]
        greedy[start + 1 : start + 1 + len(states)] = full_head.logits(states).argmax(dim=-1)
    return greedy.numpy()


def summarize(walks: list[Walk], num_speculative_tokens: int) -> AcceptanceEstimate:
    """Acceptance over all steps, as vLLM's counters average it."""
    accepted = np.concatenate([walk.accepted for walk in walks])
    domains = sorted({walk.domain for walk in walks})
    per_domain = {
        domain: 1.0 + float(np.concatenate([w.accepted for w in walks if w.domain == domain]).mean())
        for domain in domains
    }
    return AcceptanceEstimate(
        num_speculative_tokens=num_speculative_tokens,
        acceptance_length=1.0 + float(accepted.mean()),
        acceptance_rate_per_position=tuple(
            float((accepted >= position).mean()) for position in range(1, num_speculative_tokens + 1)
        ),
        num_steps=len(accepted),
        num_answers=len(walks),
        per_domain=per_domain,
    )


def _warn_if_deeper_than_trained(drafter: Path, num_speculative_tokens: int) -> None:
    trained = read_provenance(drafter).settings.get("num_depths")
    if trained is not None and num_speculative_tokens > trained:
        print(
            f"warning: {num_speculative_tokens} speculative tokens, but {drafter} was trained for {trained}; "
            "it never learned to guess the deeper ones",
            file=sys.stderr,
        )
