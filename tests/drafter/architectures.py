"""Tiny random targets of real architectures, written by transformers' own classes, with tokenizer and template.

Shapes are ones that vLLM's CPU kernels take. Norm weights are random too, so that a norm that is read wrongly
shows. The next token follows mostly from the last one (see `make_servable_target`), so that a drafter learns
something within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.drafter.tiny import VOCAB_SIZE, save_tokenizer

NUM_LAYERS = 8
AUXILIARY_LAYERS = (2, 4, 5)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# As in gpt-oss's own config.json, with the original length shortened along with the positions.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
GEMMA4_GLOBAL_ROPE = {
    "rope_type": "proportional",
    "rope_theta": 1000000.0,
    "partial_rotary_factor": 0.25,
}
_GEMMA4_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA3: dict[str, Any] = {
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "rope_parameters": {
        "sliding_attention": _GEMMA4_LOCAL_ROPE,
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    },
}
# Two full layers, and heads that are wider in them, as in Gemma 4.
_GEMMA4: dict[str, Any] = {
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "sliding_window": 64,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 10.0,  # Gemma 4: 30; lower, so that such small logits feel it
    "rope_parameters": {"sliding_attention": _GEMMA4_LOCAL_ROPE, "full_attention": GEMMA4_GLOBAL_ROPE},
}


def _llama(shape: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**shape))


def _llama3(shape: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True))


def _qwen3(shape: dict[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return Qwen3ForCausalLM(Qwen3Config(**shape, rope_parameters=rope, tie_word_embeddings=True))


def _qwen3_moe(shape: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000000.0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, rope_parameters=rope))


def _gpt_oss(shape: dict[str, Any]) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
    return GptOssForCausalLM(GptOssConfig(**shape, **experts, rope_parameters=_GPT_OSS_ROPE))


def _gemma3(shape: dict[str, Any]) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**shape, **_GEMMA3))


def _gemma4(shape: dict[str, Any]) -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return Gemma4ForCausalLM(Gemma4TextConfig(**shape, **_GEMMA4))


def _gemma4_with_images(shape: dict[str, Any]) -> Any:
    from transformers import (
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        Gemma4TextConfig,
        Gemma4VisionConfig,
    )

    vision = Gemma4VisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        position_embedding_size=16,
    )
    text = Gemma4TextConfig(**shape, **_GEMMA4)
    special = {"image_token_id": 259, "boi_token_id": 260, "eoi_token_id": 261, "video_token_id": 262}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision, **special))


ARCHITECTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "llama": _llama,
    "llama with llama3 RoPE": _llama3,
    "qwen3": _qwen3,
    "qwen3-moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4 with images": _gemma4_with_images,
}


def make_architecture(path: Path, name: str, **changes: object) -> Path:
    """Write the tiny target `name` of `ARCHITECTURES` as a Hugging Face directory; `changes` go into its shape."""
    tokenizer = save_tokenizer(path)
    roles = {role: getattr(tokenizer, role) for role in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    model = ARCHITECTURES[name]({**_SHAPE, **roles, **changes})
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _adapt(parameter_name, parameter, tied=model.config.get_text_config().tie_word_embeddings)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def _adapt(name: str, parameter: torch.Tensor, tied: bool) -> None:
    """Random norms; large embeddings and small layers, so that answers can be learned.

    Not with a tied embedding: every token would be followed by itself.
    """
    if "norm" in name:
        parameter += 0.3 * torch.randn_like(parameter)
        if (
            "post_feedforward" in name
        ):  # Gemma multiplies the embedding by sqrt(H): layers have to weigh as much
            parameter *= 8
    elif "lm_head" in name or ("embed_tokens" in name and tied):
        parameter[256:] = 0.0  # special tokens never win, so no answer ends early
    elif tied:
        return
    elif "embed_tokens" in name:
        parameter *= 10
    elif "o_proj" in name or "down_proj" in name:
        parameter *= 0.03
