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


def divergence(
    logits: Tensor, teacher_logits: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """KL per row, whether the best tokens agree, and the gradient by `logits`.

    Args:
        logits: [R, Vd] of the drafter.
        teacher_logits: [R, Vd] of the target.
        scale: factor of the gradient (1 / predictions of the optimizer step); None: no gradient.

    Returns:
        loss [R] float32, agreement [R] bool, gradient [R, Vd] in the type of `logits` or None.
    """
    # Widened first: on a CPU, argmax and softmax of bfloat16 are ten times slower than of float32.
    log_q = torch.log_softmax(logits.float(), dim=-1)
    log_p = torch.log_softmax(teacher_logits.float(), dim=-1)
    agreement = log_q.argmax(dim=-1) == log_p.argmax(dim=-1)
    p = log_p.exp()
    loss = log_p.sub_(log_q).mul_(p).sum(dim=-1)
    if scale is None:
        return loss, agreement, None
    return loss, agreement, log_q.exp_().sub_(p).mul_(scale).to(logits.dtype)


@dataclass(frozen=True)
class RowTargets:
    """What rows of hidden states are held against.

    Attributes:
        final: [R, H] the target's states that the teacher is computed from.
        depths: [R] int64.
        reachable: [R] bool, whether the draft vocabulary holds the token that was written.
    """

    final: Tensor
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
        scale: as in `divergence`.

    Returns:
        Gradients by `hidden` [R, H] and by `head` [Vd, H] float32, or None without `scale`.
    """
    logits = hidden @ head.t()
    teacher_logits = teacher.logits(targets.final)
    step = _CACHED_ROWS if logits.device.type == "cpu" else len(logits)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        loss, agreement, gradient = divergence(logits[rows], teacher_logits[rows], scale)
        sums.add(loss, agreement & targets.reachable[rows], targets.depths[rows])
        if gradient is not None:
            logits[rows] = gradient  # the logits are not needed again: reuse their memory
    if scale is None:
        return None
    return logits @ head, (logits.t() @ hidden).float()
