"""The two-stream step against the public `speculators` 0.9.0 model, which nobody here wrote."""

from __future__ import annotations

import pytest
import torch

from drafter.chains import sample_chains
from drafter.two_stream import StepOptions, count_supervised, two_stream_step
from tests.reference.random_drafters import random_batch, random_config, random_drafter, random_teacher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "num_depths", "norm_before_residual", "lengths"),
    [(1, 4, False, (40, 25)), (2, 6, False, (30, 3, 17, 41)), (4, 8, True, (70,))],
)
def test_loss_and_every_gradient_equal_the_public_model(
    num_layers: int, num_depths: int, norm_before_residual: bool, lengths: tuple[int, ...]
) -> None:
    from tests.reference.speculators_model import run_speculators

    config = random_config(num_layers=num_layers, norm_before_residual=norm_before_residual, num_heads=8)
    drafter, teacher = random_drafter(config), random_teacher(config)
    batch = random_batch(lengths)
    chains = sample_chains(batch, num_depths, 0.8, 0.2, torch.Generator().manual_seed(2))
    theirs = run_speculators(drafter, teacher, batch, chains)
    count = float(count_supervised(batch, chains).sum())
    options = StepOptions(
        torch.float32, chains_per_segment=10, rows_per_chunk=16, attention_rows=16, attention_columns=8
    )
    ours = two_stream_step(drafter, teacher, batch, chains, options, count)
    # They divide by the number of supervised predictions + 1e-5.
    scale = count / (count + 1e-5)
    assert float(ours.loss_sum) / count * scale == pytest.approx(theirs.loss, rel=1e-5)
    for name, parameter in drafter.named_parameters():
        expected = theirs.gradients[name]
        assert parameter.grad is not None
        gradient = parameter.grad * scale
        error = float((gradient - expected.view_as(gradient)).norm() / expected.norm())
        assert error < 1e-5, f"{name}: relative error {error:.1e}"
