"""KL over the draft vocabulary, its hand-written gradient and the hits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.loss import HeadGradient, LossSums, RowTargets, best_tokens, divergence, head_loss
from tests.reference.random_drafters import random_config, random_teacher

ROWS = 150  # more than one block of rows that a CPU keeps in its cache


def _inputs() -> tuple[Tensor, Tensor, RowTargets]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, 32, generator=generator)
    head = torch.randn(40, 32, generator=generator) * 0.4
    targets = RowTargets(
        final=torch.randn(60, 32, generator=generator),
        teacher=torch.randint(0, 60, (ROWS,), generator=generator).sort().values,
        depths=torch.randint(0, 3, (ROWS,), generator=generator),
        reachable=torch.rand(ROWS, generator=generator) < 0.7,
    )
    return hidden, head, targets


def test_the_loss_and_its_gradients_are_autograds() -> None:
    hidden, head, targets = _inputs()
    teacher = random_teacher(random_config())
    sums = LossSums.zeros(3, torch.device("cpu"))
    by_head = torch.zeros_like(head)
    by_hidden = head_loss(hidden, head, teacher, targets, sums, HeadGradient(by_head, scale=0.01))
    assert by_hidden is not None
    hidden.requires_grad_()
    head.requires_grad_()
    p = teacher.logits(targets.final)[targets.teacher].softmax(-1)
    log_q = (hidden @ head.T).log_softmax(-1)
    loss = torch.nn.functional.kl_div(log_q, p, reduction="sum")
    (loss * 0.01).backward()
    assert float(sums.loss) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert torch.allclose(by_hidden, hidden.grad, rtol=1e-4, atol=1e-7)
    assert torch.allclose(by_head, head.grad, rtol=1e-4, atol=1e-6)


def test_hits_count_per_depth_and_only_where_the_written_token_can_be_drafted() -> None:
    hidden, head, targets = _inputs()
    teacher = random_teacher(random_config())
    sums = LossSums.zeros(3, torch.device("cpu"))
    assert head_loss(hidden, head, teacher, targets, sums, None) is None
    best = teacher.logits(targets.final)[targets.teacher].argmax(-1)
    hit = ((hidden @ head.T).argmax(-1) == best) & targets.reachable
    for depth in range(3):
        assert int(sums.supervised[depth]) == int((targets.depths == depth).sum())
        assert int(sums.correct[depth]) == int((hit & (targets.depths == depth)).sum())


def test_a_drafter_that_agrees_has_no_loss_and_hits_everything() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    loss, agreement = divergence(logits.clone(), logits, torch.arange(5), with_gradient=False)
    assert float(loss.abs().max()) < 1e-5
    assert bool(agreement.all())


def test_the_teacher_is_the_targets_norm_and_head() -> None:
    teacher = random_teacher(random_config())
    final = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    normed = torch.nn.functional.rms_norm(final, (32,), teacher.norm, teacher.eps)
    assert torch.allclose(teacher.logits(final), normed @ teacher.weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [64, 640, 100])
def test_the_best_token_is_the_first_of_equals(size: int) -> None:
    logits = torch.randint(0, 9, (200, size), generator=torch.Generator().manual_seed(3)).float()
    assert torch.equal(best_tokens(logits), logits.argmax(-1))
