"""Random drafters, teachers and batches of a size that a dense reference can follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.loss import TeacherHead
from drafter.model import Drafter, DrafterConfig
from drafter.packing import PackedBatch, pack_documents

HIDDEN_SIZE = 32
VOCAB_SIZE = 64
DRAFT_VOCAB_SIZE = 40


@dataclass(frozen=True)
class RandomDocument:
    """Tensors of one document, [T] and [T, ...]."""

    input_ids: Tensor
    loss_mask: Tensor
    auxiliary: Tensor
    final: Tensor


def random_document(num_tokens: int, seed: int, supervised_share: float = 0.8) -> RandomDocument:
    """A document whose loss mask has gaps, so that chains end inside it too."""
    generator = torch.Generator().manual_seed(seed)
    return RandomDocument(
        input_ids=torch.randint(0, VOCAB_SIZE - 1, (num_tokens,), generator=generator),
        loss_mask=torch.rand(num_tokens, generator=generator) < supervised_share,
        auxiliary=torch.randn(num_tokens, 3 * HIDDEN_SIZE, generator=generator),
        final=torch.randn(num_tokens, HIDDEN_SIZE, generator=generator),
    )


def random_batch(lengths: tuple[int, ...], supervised_share: float = 0.8) -> PackedBatch:
    """Packed random documents of the given token counts."""
    return pack_documents([random_document(n, seed, supervised_share) for seed, n in enumerate(lengths)])


def random_config(**changes: object) -> DrafterConfig:
    """A small shape with grouped heads; `changes` go on top."""
    values: dict[str, object] = {
        "hidden_size": HIDDEN_SIZE,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
        "mask_token_id": VOCAB_SIZE - 1,
        "auxiliary_layers": (1, 2, 3),
        "train_embedding": True,
        **changes,
    }
    return DrafterConfig.model_validate(values)


def random_drafter(config: DrafterConfig, seed: int = 0, spread: float = 0.3) -> Drafter:
    """A drafter in which every weight matters: norms away from 1, placeholders away from 0.

    Args:
        spread: standard deviation of matrices. Larger ones make rounding grow from depth to depth of EAGLE-3.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, ids)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name != "mask_embedding"
            parameter.copy_(1 + 0.3 * noise if is_norm else spread * noise)
    return drafter


def random_teacher(config: DrafterConfig, seed: int = 7) -> TeacherHead:
    """A target's norm and head rows, peaked enough to have a clear best token."""
    generator = torch.Generator().manual_seed(seed)
    norm = torch.rand(config.hidden_size, generator=generator) + 0.5
    weight = torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator) * 0.5
    return TeacherHead(norm, weight, 1e-5)


def leaves(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a state's weights, each of which collects a gradient."""
    return {
        name: tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
