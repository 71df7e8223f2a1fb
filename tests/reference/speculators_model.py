"""Loss and gradients of the public `speculators` 0.9.0 P-EAGLE model: a reference that nobody here wrote.

How it is built and what is exchanged for the comparison: benchmarks/speculators_peer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.speculators_peer import build_model, forward
from drafter.chains import Chains
from drafter.loss import TeacherHead
from drafter.model import Drafter, DrafterConfig
from drafter.packing import PackedBatch


@dataclass(frozen=True)
class SpeculatorsResult:
    """Loss as the package reduces it, correct predictions per depth, and gradients under our names."""

    loss: float
    correct: list[int]
    gradients: dict[str, Tensor]


def run_speculators(
    drafter: Drafter, teacher: TeacherHead, batch: PackedBatch, chains: Chains
) -> SpeculatorsResult:
    """Forward and backward of `PEagleDraftModel` in float32."""
    model = build_model(drafter, teacher)
    exact = replace(batch, auxiliary=batch.auxiliary.float(), final=batch.final.float())
    loss, metrics = forward(model, exact, chains)
    loss.backward()
    correct = [int(metrics[f"position_{index}_acc_sum"]) for index in range(chains.num_depths)]
    return SpeculatorsResult(float(loss.detach()), correct, _gradients(model, drafter.config))


def _gradients(model: torch.nn.Module, config: DrafterConfig) -> dict[str, Tensor]:
    """Gradients under our names: the mask token's row of their embedding is our `mask_embedding`."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    embedding = gradients["embed_tokens.weight"].clone()
    gradients["mask_embedding"] = embedding[config.mask_token_id].clone()
    embedding[config.mask_token_id] = 0
    gradients["embed_tokens.weight"] = embedding
    return gradients
