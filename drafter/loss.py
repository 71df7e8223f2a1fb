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


@dataclass(frozen=True)
class TeacherHead:
    """The target's last norm and the head rows of the draft vocabulary.

    Attributes:
        norm: [H] weight of the target's final norm.
        weight: [Vd, H] rows of the target's head (or tied embedding) for the draft ids.
        eps: of the norm.
    """

    norm: Tensor
    weight: Tensor
    eps: float

    def logits(self, final: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary, [R, Vd], from final states [R, H]."""
        x = final.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm.float()
        return x.to(self.weight.dtype) @ self.weight.t()


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


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: TeacherHead,
    targets: RowTargets,
    sums: LossSums,
    scale: float | None,
) -> tuple[Tensor, Tensor] | None:
    """Loss of one chunk of rows; its logits are gone when this returns.

    A prediction counts as correct when the best draft token is the target's best draft token *and* the
    token that was written is in the draft vocabulary: one that is not cannot be guessed.

    Args:
        hidden: [R, H] normed output of the drafter, outside any graph.
        head: [Vd, H] the drafter's head.
        scale: factor of the gradients (1 / predictions of the optimizer step); None: no gradients.

    Returns:
        Gradients by `hidden` [R, H] and by `head` [Vd, H] float32, or None without `scale`.
    """
    logits = hidden @ head.t()
    teacher_logits = teacher.logits(targets.final)
    step = _CACHED_ROWS if logits.device.type == "cpu" else len(logits)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        own = targets.teacher[rows]
        low, high = int(own[0]), int(own[-1]) + 1
        loss, agreement = divergence(logits[rows], teacher_logits[low:high], own - low, scale is not None)
        sums.add(loss, agreement & targets.reachable[rows], targets.depths[rows])
    if scale is None:
        return None
    return (logits @ head).mul_(scale), (logits.t() @ hidden).float().mul_(scale)


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
    # Widened first: on a CPU, argmax and softmax of bfloat16 are ten times slower than of float32.
    log_q = torch.log_softmax(logits.float(), dim=-1)
    log_p = torch.log_softmax(teacher_logits.float(), dim=-1)
    agreement = log_q.argmax(dim=-1) == log_p.argmax(dim=-1)[teacher]
    p = log_p.exp()
    negative_entropy = log_p.mul_(p).sum(dim=-1)
    if len(p) < len(logits):
        p = p[teacher]
    loss = negative_entropy[teacher] - (p * log_q).sum(dim=-1)
    if with_gradient:
        logits.copy_(log_q.exp_().sub_(p))
    return loss, agreement
