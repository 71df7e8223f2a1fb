"""The obvious P-EAGLE forward: every slot and placeholder in one flat sequence under a dense mask.

Slow, quadratic in memory, and written without any of the product's layers: plain torch operations on the
drafter's weights by name. The two-stream step has to give its loss and every one of its gradients.

Shapes: N slots, P placeholders, M = N + P elements, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.chains import Chains
from drafter.loss import TeacherHead
from drafter.model import DrafterConfig
from drafter.packing import PackedBatch


def flat_elements(num_slots: int, chains: Chains) -> tuple[Tensor, Tensor]:
    """Anchor and depth of each element: all slots at depth 0, then the chains' placeholders."""
    anchors, depths = list(range(num_slots)), [0] * num_slots
    for anchor, length in zip(chains.anchors.tolist(), chains.lengths.tolist(), strict=True):
        for depth in range(1, length + 1):
            anchors.append(anchor)
            depths.append(depth)
    return torch.tensor(anchors), torch.tensor(depths)


def flat_mask(anchors: Tensor, depths: Tensor, documents: Tensor) -> Tensor:
    """[M, M] bool, true where element (row) may look at element (column)."""
    size = len(anchors)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for row in range(size):
        same_document = documents[anchors] == documents[anchors[row]]
        real = (depths == 0) & (anchors <= anchors[row])
        own = (depths > 0) & (anchors == anchors[row]) & (depths <= depths[row])
        mask[row] = same_document & (real | own)
    return mask


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate [M, heads, E] as complex numbers (first half real, second half imaginary)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.polar(torch.ones(len(positions), half), positions[:, None] * frequencies)
    rotated = torch.complex(x[..., :half], x[..., half:]) * angle[:, None]
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def flat_logits(
    weights: dict[str, Tensor], config: DrafterConfig, batch: PackedBatch, chains: Chains
) -> Tensor:
    """Drafter logits [M, Vd] of every element."""
    anchors, depths = flat_elements(batch.num_slots, chains)
    documents = torch.bucketize(torch.arange(batch.num_slots), torch.tensor(batch.offsets[1:]), right=True)
    mask = flat_mask(anchors, depths, documents)
    positions = batch.positions[anchors] + depths
    is_real = (depths == 0)[:, None]
    real_embedding = weights["embed_tokens.weight"][batch.input_ids[anchors]].float()
    embedding = torch.where(is_real, real_embedding, weights["mask_embedding"])
    auxiliary = torch.where(is_real, batch.auxiliary[anchors].float(), weights["mask_hidden"].view(1, -1))
    output = auxiliary @ weights["fc.weight"].T
    residual = torch.zeros_like(output)
    eps, heads = config.rms_norm_eps, config.num_heads
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        residual = residual + output
        if index == 0:
            normed = _norm(residual, layer["hidden_norm.weight"], eps)
            residual = normed if config.norm_before_residual else residual
            joint = torch.cat([_norm(embedding, layer["input_layernorm.weight"], eps), normed], dim=-1)
        else:
            joint = _norm(residual, layer["input_layernorm.weight"], eps)
        query = (joint @ layer["self_attn.q_proj.weight"].T).view(len(anchors), heads, -1)
        key = (joint @ layer["self_attn.k_proj.weight"].T).view(len(anchors), config.num_kv_heads, -1)
        value = (joint @ layer["self_attn.v_proj.weight"].T).view(len(anchors), config.num_kv_heads, -1)
        theta = float(config.rope["rope_theta"])
        query, key = _rope(query, positions, theta), _rope(key, positions, theta)
        key = key.repeat_interleave(heads // config.num_kv_heads, dim=1)
        value = value.repeat_interleave(heads // config.num_kv_heads, dim=1)
        scores = torch.einsum("qhe,khe->hqk", query, key) / config.head_dim**0.5
        probability = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khe->qhe", probability, value).reshape(len(anchors), -1)
        residual = residual + attended @ layer["self_attn.o_proj.weight"].T
        normed = _norm(residual, layer["post_attention_layernorm.weight"], eps)
        gate, up = normed @ layer["mlp.gate_proj.weight"].T, normed @ layer["mlp.up_proj.weight"].T
        output = (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return _norm(residual + output, weights["norm.weight"], eps) @ weights["lm_head.weight"].T


def flat_loss(
    weights: dict[str, Tensor],
    config: DrafterConfig,
    teacher: TeacherHead,
    batch: PackedBatch,
    chains: Chains,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean KL over supervised predictions, and [K] counts of supervised and of correct ones."""
    anchors, depths = flat_elements(batch.num_slots, chains)
    predicting = anchors + depths
    supervised = batch.supervised[predicting]
    logits = flat_logits(weights, config, batch, chains)[supervised]
    final = _norm(batch.final.float(), teacher.norm, teacher.eps)[predicting[supervised]]
    teacher_logits = final @ teacher.weight.float().T
    log_p, log_q = teacher_logits.log_softmax(-1), logits.log_softmax(-1)
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    in_vocabulary = torch.isin(batch.predicted_ids, weights["d2t"] + torch.arange(len(weights["d2t"])))
    hit = (logits.argmax(-1) == teacher_logits.argmax(-1)) & in_vocabulary[predicting[supervised]]
    depths = depths[supervised]
    count = chains.num_depths
    return loss, torch.bincount(depths, minlength=count), torch.bincount(depths[hit], minlength=count)
