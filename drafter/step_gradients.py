"""The gradients of one optimizer step, over all its packed sequences and all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafter.config import TrainSettings
from drafter.distributed import Ranks
from drafter.loss import TeacherHead
from drafter.model import Drafter
from drafter.step_work import StepWork
from drafter.two_stream import StepOptions, StepResult, two_stream_step
from drafter.unrolled import unrolled_step

_STEPS = {"peagle": two_stream_step, "eagle3": unrolled_step}


@dataclass(frozen=True)
class StepGradients:
    """Computes them; every rank of `ranks` must do so, in the same order.

    Attributes:
        drafter: placed by `ranks`.
        teacher: in the compute type, on the rank's device.
    """

    drafter: Drafter
    teacher: TeacherHead
    settings: TrainSettings
    options: StepOptions
    ranks: Ranks

    def of(self, work: StepWork, generator: torch.Generator) -> StepResult:
        """Leave the gradient of the mean over the step's supervised predictions in `.grad`.

        Args:
            generator: what chains are drawn with; in the same state on every rank.

        Returns:
            Sums over the whole step, on the CPU.
        """
        chains, supervised = work.sample(self.settings, generator)
        normalizer = float(supervised.sum())
        take_step = _STEPS[self.settings.algorithm]
        sums = torch.zeros(1 + 2 * len(supervised), dtype=torch.float64)
        with self.ranks.summed_gradients(self.drafter):
            for batch, own in work.own_chains(chains):
                batch = batch.to(self.ranks.device)
                result = take_step(self.drafter, self.teacher, batch, own, self.options, normalizer)
                found = torch.cat([result.loss_sum[None], result.correct, result.supervised])
                sums += found.to("cpu", torch.float64)
        loss_sum, correct, counted = self.ranks.summed(sums).split([1, len(supervised), len(supervised)])
        assert torch.equal(counted.long(), supervised), (
            "every document is some rank's, and no more than one's"
        )
        return StepResult(loss_sum[0], supervised, correct.long())
