"""One training step under torchrun, its gradients written down: run by test_distributed.py.

torchrun --nproc-per-node 2 tests/drafter/distributed_step.py settings.json gradients.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafter.config import TrainSettings
from drafter.distributed import Ranks, joined, whole_tensor
from drafter.target import load_target
from drafter.trainer import _Training


def gradients_of_first_step(settings: TrainSettings, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Summed gradients as the optimizer gets them, the loss, and how many documents this rank had."""
    training = _Training(settings, load_target(settings.target), "0" * 12, ranks)
    found: dict[str, torch.Tensor] = {}

    def keep(learning_rate: float) -> float:
        for name, parameter in training.optimizer._named.items():
            found[name] = whole_tensor(parameter.grad).detach().clone()
        return 1.0

    training.optimizer.step = keep  # type: ignore[method-assign]
    work = next(training.loaded_steps())
    found["loss"] = torch.tensor(training.step(work).loss, dtype=torch.float64)
    shares = torch.zeros(ranks.size, dtype=torch.float64)
    shares[ranks.rank] = sum(len(documents) for documents in work.own)
    found["documents"] = ranks.summed(shares)
    return found


def main() -> None:
    settings = TrainSettings.model_validate_json(Path(sys.argv[1]).read_text())
    with joined(settings) as ranks:
        found = gradients_of_first_step(settings, ranks)
        if ranks.is_first:
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, sys.argv[2])
        _Training(settings, load_target(settings.target), "0" * 12, ranks).run()


if __name__ == "__main__":
    main()
