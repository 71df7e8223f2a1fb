"""The optimizer step: learning-rate schedule, gradient clipping, AdamW (arXiv 1711.05101)."""

from __future__ import annotations

import math

import torch
from torch import nn

from drafter.config import TrainSettings
from drafter.distributed import placed_like, whole_tensor


class Optimizer:
    """AdamW over the trainable parameters of a model; the parameters are the float32 master weights.

    Weight decay holds for matrices only: norms and the learned mask vectors have no scale to decay to.
    """

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._max_gradient_norm = settings.max_gradient_norm
        matrices = [p for name, p in self._named.items() if p.ndim == 2]
        others = [p for name, p in self._named.items() if p.ndim != 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.peak_learning_rate,
            betas=settings.betas,
            fused=True,  # one pass over memory: nine times as fast as foreach on a CPU
        )

    def step(self, learning_rate: float) -> float:
        """Clip the accumulated gradients, apply and clear them.

        Returns:
            The gradients' norm before clipping. When it is not finite, the weights stay untouched.
        """
        parameters = list(self._named.values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        total_norm = whole_tensor(nn.utils.get_total_norm(gradients))
        nn.utils.clip_grads_with_norm_(parameters, self._max_gradient_norm, total_norm)
        norm = float(total_norm)
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            # NOTE: a footgun. The fused kernel writes in place without saying so, and the model's copies in
            # the compute type are renewed when a weight's version changes.
            torch.autograd.graph.increment_version(parameters)
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Name of a parameter -> its moments and step count."""
        return {name: dict(self._adamw.state[p]) for name, p in self._named.items() if p in self._adamw.state}

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Continue with what `state` returned."""
        for name, entries in state.items():
            parameter = self._named[name]
            # The step count of a fused AdamW lives beside the parameter, too.
            self._adamw.state[parameter] = {key: placed_like(t, parameter) for key, t in entries.items()}


def learning_rate_share(share: float, warmup_share: float, decay: str) -> float:
    """Share of the peak learning rate when `share` of the training is done.

    Linear warm-up over `warmup_share`, then linear or cosine decay to 0.

    Example:
        warm-up 0.1, linear: 0.05 -> 0.5; 0.1 -> 1.0; 0.55 -> 0.5; 1.0 -> 0.0.
    """
    if share < warmup_share:
        return share / warmup_share
    rest = min((share - warmup_share) / (1 - warmup_share), 1.0)
    return 0.5 * (1 + math.cos(math.pi * rest)) if decay == "cosine" else 1 - rest
