"""KL(target || drafter) over the draft vocabulary, computed chunk by chunk with its gradient.

Shapes: R supervised rows, H hidden size, Vd draft vocabulary, K depths.

For one prediction with teacher p = softmax(t) and drafter q = softmax(s), both over the draft vocabulary:
loss = sum_v p_v (log p_v - log q_v), and d loss / d s = q - p. Writing that gradient down by hand lets a
chunk's logits live only while the chunk is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows whose float32 probabilities are in the processor's cache at once on a CPU.
_CACHED_ROWS = 64
_STRETCH = 64  # logits that an argmax reads, out of the whole draft vocabulary


@dataclass(frozen=True)
class TeacherHead:
    """The target's last norm and the head rows of the draft vocabulary.

    Attributes:
        norm: [H] what the target's final norm multiplies by.
        weight: [Vd, H] rows of the target's head (or tied embedding) for the draft ids.
        eps: of the norm.
        logit_cap: logits x become cap * tanh(x / cap), as Gemma's do; None: they stay.
    """

    norm: Tensor
    weight: Tensor
    eps: float
    logit_cap: float | None = None

    def logits(self, final: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary, [R, Vd], from final states [R, H]."""
        x = final.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm.float()
        logits = x.to(self.weight.dtype) @ self.weight.t()
        if self.logit_cap is None:
            return logits
        return logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)


@dataclass
class LossSums:
    """Running sums of one step over all its chunks.

    Attributes:
        loss: sum of KL in nats, float64.
        supervised: [K] int64, predictions per depth.
        correct: [K] int64, predictions whose best token is the target's.
    """

    loss: Tensor
    supervised: Tensor
    correct: Tensor

    @classmethod
    def zeros(cls, num_depths: int, device: torch.device) -> LossSums:
        count = torch.zeros(num_depths, dtype=torch.int64, device=device)
        return cls(torch.zeros((), dtype=torch.float64, device=device), count, count.clone())

    def add(self, loss: Tensor, correct: Tensor, depths: Tensor) -> None:
        """Add per-row losses [R] and hits [R] of rows at `depths` [R]."""
        self.loss += loss.sum(dtype=torch.float64)
        self.supervised += torch.bincount(depths, minlength=len(self.supervised))
        self.correct += torch.bincount(depths[correct], minlength=len(self.correct))


@dataclass(frozen=True)
class RowTargets:
    """What rows of hidden states are held against. U distinct slots are predicted by R >= U rows.

    Attributes:
        final: [U, H] the target's states that teachers are computed from.
        teacher: [R] int64 row of `final` that each row is held against, ascending.
        depths: [R] int64.
        reachable: [R] bool, whether the draft vocabulary holds the token that was written.
    """

    final: Tensor
    teacher: Tensor
    depths: Tensor
    reachable: Tensor


@dataclass(frozen=True)
class HeadGradient:
    """Where the gradient of the head goes.

    Attributes:
        total: [Vd, H] float32, added to.
        scale: factor of all gradients, 1 / predictions of the optimizer step.
    """

    total: Tensor
    scale: float


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: TeacherHead,
    targets: RowTargets,
    sums: LossSums,
    head_gradient: HeadGradient | None,
) -> Tensor | None:
    """Loss of one chunk of rows; its logits are gone when this returns.

    A prediction counts as correct when the best draft token is the target's best draft token *and* the
    token that was written is in the draft vocabulary: one that is not cannot be guessed.

    Args:
        hidden: [R, H] normed output of the drafter, outside any graph.
        head: [Vd, H] the drafter's head.
        head_gradient: where the head's gradient is added; None: no gradients.

    Returns:
        Gradient by `hidden` [R, H], or None.
    """
    with_gradient = head_gradient is not None
    logits = hidden @ head.t()
    teacher_logits = teacher.logits(targets.final)
    step = _CACHED_ROWS if logits.device.type == "cpu" else len(logits)
    found = []
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        own = targets.teacher[rows]
        low, high = int(own[0]), int(own[-1]) + 1
        found.append(divergence(logits[rows], teacher_logits[low:high], own - low, with_gradient))
    loss, agreement = (torch.cat(parts) for parts in zip(*found, strict=True))
    sums.add(loss, agreement & targets.reachable, targets.depths)
    if head_gradient is None:
        return None
    head_gradient.total.add_(logits.t() @ hidden, alpha=head_gradient.scale)
    return (logits @ head).mul_(head_gradient.scale)


def divergence(
    logits: Tensor, teacher_logits: Tensor, teacher: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """KL of each row, and whether the best tokens agree.

    Args:
        logits: [R, Vd] of the drafter; with `with_gradient` overwritten by the gradient q - p.
        teacher_logits: [U, Vd] of the target.
        teacher: [R] row of `teacher_logits` that each row is held against.

    Returns:
        loss [R] float32, agreement [R] bool.
    """
    # Widened first: on a CPU, passes over bfloat16 are up to ten times slower than over float32.
    s, t = logits.float(), teacher_logits.float()
    q, p = torch.softmax(s, dim=-1), torch.softmax(t, dim=-1)
    best, teacher_best = best_tokens(s), best_tokens(t)
    negative_entropy = torch.linalg.vecdot(p, t) - _log_sum_exp(t, p, teacher_best)
    if len(p) < len(s):
        p = p.index_select(0, teacher)
    loss = negative_entropy[teacher] - torch.linalg.vecdot(p, s) + _log_sum_exp(s, q, best)
    if with_gradient:
        logits.copy_(q.sub_(p))
    return loss, best == teacher_best[teacher]


def _log_sum_exp(logits: Tensor, probabilities: Tensor, best: Tensor) -> Tensor:
    """[R], read off the best token's probability: exp(logit - log-sum-exp), with no pass of its own."""
    best = best[:, None]
    return (logits.gather(1, best) - probabilities.gather(1, best).log_()).squeeze(1)


def best_tokens(logits: Tensor) -> Tensor:
    """The first of the largest entries of each row, [R] int64 from [R, Vd].

    On a CPU argmax takes ten times as long as a maximum, so it only looks into the stretch that holds it.
    """
    num_rows, size = logits.shape
    if logits.device.type != "cpu" or size % _STRETCH:
        return logits.argmax(dim=-1)
    stretches = logits.view(num_rows, -1, _STRETCH)
    stretch = stretches.amax(dim=-1).argmax(dim=-1)
    within = stretches[torch.arange(num_rows), stretch].argmax(dim=-1)
    return stretch * _STRETCH + within
