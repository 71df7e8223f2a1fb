"""The public `speculators` 0.9.0 P-EAGLE model on our weights, our batch and our chains.

It takes inputs that are already aligned per slot, as `PackedBatch` holds them. Two things are exchanged for
the comparison:

- its chain sampler (`generate_cod_sample_indices`), which has faults of its own and random choices of its
  own, returns our chains instead: anchors and depths, all depth-0 slots first;
- on a CPU attention runs as "sdpa" with a dense mask, because flex attention has no backward there.

Nothing else of the package is touched: layers, mask, positions, heads, KL loss and its reduction are its own.
The tests hold gradients against it (tests/reference/speculators_model.py), the benchmark its speed.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from drafter.chains import Chains
from drafter.loss import TeacherHead
from drafter.model import Drafter
from drafter.packing import PackedBatch


def forward(model: torch.nn.Module, batch: PackedBatch, chains: Chains) -> tuple[Tensor, dict[str, Tensor]]:
    """Their loss and metrics of our batch and chains; hidden states go in as the batch holds them."""
    from speculators.losses.eager import kl_div_loss
    from speculators.models.peagle import core

    device = batch.auxiliary.device
    chain, depth = chains.elements()
    anchors = torch.cat([torch.arange(batch.num_slots), chains.anchors[chain]]).to(device)
    depths = torch.cat([torch.zeros(batch.num_slots, dtype=torch.int64), depth]).to(device)
    lengths = torch.tensor(batch.offsets).diff()
    with mock.patch.object(core, "generate_cod_sample_indices", return_value=(anchors, depths)):
        _, loss, metrics = model(
            hidden_states=batch.auxiliary[None],
            input_ids=batch.input_ids[None],
            document_ids=torch.arange(len(lengths)).repeat_interleave(lengths)[None].to(device),
            loss_mask=batch.supervised[None].float(),
            verifier_last_hidden_states=batch.final[None],
            loss_config={"kl_div": (kl_div_loss, 1.0)},
            num_depths=chains.num_depths,
        )
    return loss, metrics


def build_model(
    drafter: Drafter, teacher: TeacherHead, attention: str = "sdpa", train_embedding: bool = True
) -> torch.nn.Module:
    """Their model with our weights in float32, every trained tensor wanting a gradient.

    Args:
        attention: "sdpa", or on a GPU their own default, "simple_flex_attention".
    """
    from speculators.models.peagle import PEagleSpeculatorConfig
    from speculators.models.peagle.core import PEagleDraftModel
    from transformers import LlamaConfig

    config = drafter.config
    layers = LlamaConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
        tie_word_embeddings=False,
    )
    layers._attn_implementation = attention
    model = PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=config.draft_vocab_size,
            norm_before_residual=config.norm_before_residual,
            eagle_aux_hidden_state_layer_ids=list(config.auxiliary_layers),
            mask_token_id=config.mask_token_id,
            embed_requires_grad=train_embedding,
        )
    ).float()
    state = {name: tensor for name, tensor in drafter.export_tensors(torch.float32).items() if name != "d2t"}
    state["verifier_norm.weight"] = teacher.norm.float()
    state["verifier_lm_head.weight"] = teacher.weight.float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"d2t", "t2d"}, missing
    for name in state:
        if not name.startswith("verifier_") and (train_embedding or name != "embed_tokens.weight"):
            model.get_parameter(name).requires_grad_(True)
    return model
