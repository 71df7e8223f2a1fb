"""EAGLE-3, the obvious ways: training under dense masks, and decoding as a server does it.

Plain torch operations on the drafter's weights by name, none of the product's layers. `unrolled_logits` lets
every chain of a packed sequence go down one depth at a time, each element looking at all elements so far
under a dense mask. `Server` knows no chains: it has a cache, reads slots, and drafts token after token.

Shapes: N slots, M elements (slots, then the chains' depths), H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.chains import Chains
from drafter.loss import TeacherHead
from drafter.model import DrafterConfig
from drafter.packing import PackedBatch
from tests.reference.flat_forward import _norm, _rope

Weights = dict[str, Tensor]


def layer_input(weights: Weights, config: DrafterConfig, ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What attention reads [R, 2H], and the residual [R, H]."""
    eps = config.rms_norm_eps
    embedding = weights["embed_tokens.weight"][ids].to(state.dtype)
    normed = _norm(state, weights["layers.0.hidden_norm.weight"], eps)
    joint = torch.cat([_norm(embedding, weights["layers.0.input_layernorm.weight"], eps), normed], dim=-1)
    return joint, normed if config.norm_before_residual else state


def projected(
    weights: Weights, config: DrafterConfig, joint: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, all [R, heads, E]."""
    theta, size = float(config.rope["rope_theta"]), config.head_dim
    query, key, value = (
        (joint @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(len(joint), heads, size)
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
    )
    return _rope(query, positions, theta), _rope(key, positions, theta), value


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[Q, heads * E]; `mask` [Q, K] is true where a query may look."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhe,khe->hqk", query, key) / query.shape[-1] ** 0.5
    probability = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khe->qhe", probability, value).reshape(len(query), -1)


def finished(
    weights: Weights, config: DrafterConfig, attended: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [R, Vd], and the sum before the last norm [R, H]: the next depth's state."""
    layer = {name.removeprefix("layers.0."): w for name, w in weights.items() if name.startswith("layers.0.")}
    residual = residual + attended @ layer["self_attn.o_proj.weight"].T
    normed = _norm(residual, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up = normed @ layer["mlp.gate_proj.weight"].T, normed @ layer["mlp.up_proj.weight"].T
    state = residual + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return _norm(state, weights["norm.weight"], config.rms_norm_eps) @ weights["lm_head.weight"].T, state


def unrolled_logits(
    weights: Weights, config: DrafterConfig, batch: PackedBatch, chains: Chains
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [M, Vd] of every element, and the anchor and depth of each: all slots first, then depth by depth."""
    documents = torch.bucketize(torch.arange(batch.num_slots), torch.tensor(batch.offsets[1:]), right=True)
    anchors, depths = torch.arange(batch.num_slots), torch.zeros(batch.num_slots, dtype=torch.int64)
    state = batch.auxiliary.to(weights["fc.weight"].dtype) @ weights["fc.weight"].T
    key = value = state.new_zeros(0, config.num_kv_heads, config.head_dim)
    all_logits, all_anchors, all_depths = [], [], []
    longest = int(chains.lengths.max()) if chains.num_chains else 0
    for depth in range(longest + 1):
        if depth > 0:
            reaching = chains.anchors[chains.lengths >= depth]
            previous = {int(anchor): row for row, anchor in enumerate(anchors)}
            state = state[[previous[int(anchor)] for anchor in reaching]]
            anchors, depths = reaching, torch.full_like(reaching, depth)
        slots = anchors + depths
        joint, residual = layer_input(weights, config, batch.input_ids[slots], state)
        query, own_key, own_value = projected(weights, config, joint, batch.positions[slots])
        key, value = torch.cat([key, own_key]), torch.cat([value, own_value])
        all_anchors.append(anchors)
        all_depths.append(depths)
        seen_anchors, seen_depths = torch.cat(all_anchors), torch.cat(all_depths)
        mask = torch.zeros(len(anchors), len(seen_anchors), dtype=torch.bool)
        for row, anchor in enumerate(anchors.tolist()):
            is_real = (seen_depths == 0) & (seen_anchors <= anchor)
            is_own = (seen_depths > 0) & (seen_anchors == anchor)
            mask[row] = (documents[seen_anchors] == documents[anchor]) & (is_real | is_own)
        logits, state = finished(weights, config, attention(query, key, value, mask), residual)
        all_logits.append(logits)
    return torch.cat(all_logits), torch.cat(all_anchors), torch.cat(all_depths)


def unrolled_loss(
    weights: Weights, config: DrafterConfig, teacher: TeacherHead, batch: PackedBatch, chains: Chains
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean KL over supervised predictions, and [K] counts of supervised and of correct ones."""
    logits, anchors, depths = unrolled_logits(weights, config, batch, chains)
    kept = batch.supervised[anchors + depths]
    logits, predicting, depths = logits[kept], (anchors + depths)[kept], depths[kept]
    teacher_logits = _norm(batch.final[predicting], teacher.norm, teacher.eps) @ teacher.weight.T
    log_p, log_q = teacher_logits.log_softmax(-1), logits.log_softmax(-1)
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    in_vocabulary = torch.isin(batch.predicted_ids, weights["d2t"] + torch.arange(len(weights["d2t"])))
    hit = (logits.argmax(-1) == teacher_logits.argmax(-1)) & in_vocabulary[predicting]
    count = chains.num_depths
    return loss, torch.bincount(depths, minlength=count), torch.bincount(depths[hit], minlength=count)


class Server:
    """One request as vLLM's EAGLE-3 proposer computes it (`llm_base_proposer.py`, not parallel).

    After a prefill or a verification the slots of all known tokens are in the cache. `draft` appends to it
    what the drafter's own steps put there, and takes it away again, as the next verification overwrites it.
    """

    def __init__(self, weights: Weights, config: DrafterConfig) -> None:
        self.weights, self.config = weights, config
        self.key = self.value = torch.zeros(0, config.num_kv_heads, config.head_dim)

    def read(self, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Append slots to the cache: [R] tokens beside [R, H] states; logits and sums of these slots."""
        num_known = len(self.key)
        positions = torch.arange(num_known, num_known + len(ids))
        joint, residual = layer_input(self.weights, self.config, ids, states)
        query, key, value = projected(self.weights, self.config, joint, positions)
        self.key, self.value = torch.cat([self.key, key]), torch.cat([self.value, value])
        mask = torch.arange(len(self.key)) <= positions[:, None]
        return finished(self.weights, self.config, attention(query, self.key, self.value, mask), residual)

    def verified(self, ids: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of verified tokens: token t[i+1] beside the target's auxiliary states of t[i]."""
        return self.read(ids, auxiliary.float() @ self.weights["fc.weight"].T)

    def draft(
        self, logits: Tensor, state: Tensor, forced: Tensor | None, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Draft after the newest slot.

        Args:
            logits, state: [Vd], [H] of the newest slot.
            forced: tokens to read in place of the guesses (those a verification would accept); None: none.

        Returns:
            Logits [num_tokens, Vd] and guessed target ids [num_tokens].
        """
        num_known = len(self.key)
        targets = self.weights["d2t"] + torch.arange(len(self.weights["d2t"]))
        all_logits = [logits]
        for step in range(num_tokens - 1):
            guess = targets[all_logits[-1].argmax()] if forced is None else forced[step]
            step_logits, states = self.read(guess[None], state[None])
            all_logits.append(step_logits[0])
            state = states[0]
        self.key, self.value = self.key[:num_known], self.value[:num_known]
        return torch.stack(all_logits), targets[torch.stack(all_logits).argmax(-1)]
