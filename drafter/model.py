"""The drafter: a head of 1-4 Llama-type layers, named and computed as vLLM's llama_eagle3.py does.

Shapes: R rows, H hidden size, V vocabulary, Vd draft vocabulary, T tokens, I width of the gated unit.

    fused  = fc(auxiliary states)  or  fc(mask_hidden) for placeholders            [R, H]
    layer 0: attention reads [input_layernorm(embedding) ; hidden_norm(fused)]     [R, 2H]
    later layers read H; every layer adds to the residual, which starts as `fused`
    logits = lm_head(norm(residual))                                                [R, Vd]

Placeholders read one learned embedding row (`mask_embedding`). vLLM looks it up as the embedding of the
mask token, so the export writes the embedding table whole, with that row in it (`export_tensors`).

An EAGLE-3 drafter has no placeholders: later guesses of a chain read the residual sum of the guess before
in place of `fused` (`drafter/unrolled.py`). It has neither `mask_embedding` nor `mask_hidden`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from drafter.attention import Heads
from drafter.config import Algorithm, DrafterSettings
from drafter.errors import CheckpointError
from drafter.layers import ComputeWeights, RmsNorm, gated_unit, recomputed
from drafter.target import Target
from drafter.vocabulary import offsets_from_ids

Attend = Callable[[Tensor], Tensor]


class DrafterConfig(BaseModel):
    """Shape of a drafter; what is not its own choice is the target's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(description="Of the target; the drafter's is the same.")
    num_layers: int = Field(ge=1, le=4)
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = Field(description="Of the target.")
    draft_vocab_size: int = Field(description="Tokens that the drafter can propose.")
    rms_norm_eps: float
    rope: dict[str, Any] = Field(description="The target's RoPE parameters.")
    max_position_embeddings: int
    mask_token_id: int | None = Field(
        description="Token that placeholders carry; the data must not use it. None for EAGLE-3, which has none."
    )
    auxiliary_layers: tuple[int, int, int]
    norm_before_residual: bool = False
    train_embedding: bool = False

    @model_validator(mode="after")
    def _check_shape(self) -> DrafterConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} kv heads")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask token {self.mask_token_id} outside a vocabulary of {self.vocab_size}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} exceeds the target's")
        return self

    @classmethod
    def from_target(
        cls,
        target: Target,
        settings: DrafterSettings,
        mask_token_id: int | None,
        auxiliary_layers: tuple[int, int, int],
    ) -> DrafterConfig:
        """The shape of a drafter for `target` under `settings`."""
        return cls(
            hidden_size=target.hidden_size,
            num_layers=settings.num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            intermediate_size=target.intermediate_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=min(settings.draft_vocab_size, target.vocab_size),
            rms_norm_eps=target.rms_norm_eps,
            rope=dict(target.rope),
            max_position_embeddings=target.max_position_embeddings,
            mask_token_id=mask_token_id,
            auxiliary_layers=auxiliary_layers,
            norm_before_residual=settings.norm_before_residual,
            train_embedding=settings.train_embedding,
        )

    @property
    def algorithm(self) -> Algorithm:
        """How the drafter guesses; what has no mask token guesses without placeholders."""
        return "eagle3" if self.mask_token_id is None else "peagle"

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)


class Attention(nn.Module):
    """The four projections; which row sees which key is the caller's `attend`."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        heads = config.heads
        self.q_proj = nn.Linear(input_size, heads.query_width, bias=False)
        self.k_proj = nn.Linear(input_size, heads.kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, heads.kv_width, bias=False)
        self.o_proj = nn.Linear(heads.query_width, config.hidden_size, bias=False)

    def project(self, x: Tensor, weights: ComputeWeights) -> Tensor:
        """Joint query/key/value projection [R, D]."""
        return weights.linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)


class GatedMlp(nn.Module):
    """Llama's feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, weights: ComputeWeights) -> Tensor:
        inner = gated_unit(weights.linear(x, self.gate_proj.weight, self.up_proj.weight))
        return weights.linear(inner, self.down_proj.weight)


class DecoderLayer(nn.Module):
    """One layer; the first one reads embedding and fused state side by side."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 2 * size if index == 0 else size)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RmsNorm(size, eps)
        self.post_attention_layernorm = RmsNorm(size, eps)
        if index == 0:
            self.hidden_norm = RmsNorm(size, eps)
        self.norm_before_residual = config.norm_before_residual

    def first_input(self, embedding: Tensor, fused: Tensor, weights: ComputeWeights) -> tuple[Tensor, Tensor]:
        """Joint projection [R, D] and residual [R, H] of layer 0."""
        normed = self.hidden_norm(fused)
        joint = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return self.self_attn.project(joint, weights), normed if self.norm_before_residual else fused

    def later_input(self, output: Tensor, residual: Tensor, weights: ComputeWeights) -> tuple[Tensor, Tensor]:
        """Joint projection [R, D] and residual [R, H] of a layer after the first."""
        normed, residual = self.input_layernorm.add(output, residual)
        return self.self_attn.project(normed, weights), residual

    def finish(
        self, attended: Tensor, residual: Tensor, weights: ComputeWeights, keep_feed_forward: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Output projection and feed-forward: the layer's output and residual, both [R, H].

        Without `keep_feed_forward` the 3I numbers a row inside it are computed again for the backward.
        """
        output = weights.linear(attended, self.self_attn.o_proj.weight)
        normed, residual = self.post_attention_layernorm.add(output, residual)
        if keep_feed_forward:
            return self.mlp(normed, weights), residual
        return recomputed(lambda x: self.mlp(x, weights), normed), residual


class Drafter(nn.Module):
    """All weights of a drafter under vLLM's names, float32 (the frozen embedding in the target's type)."""

    mask_embedding: nn.Parameter
    mask_hidden: nn.Parameter
    d2t: Tensor
    inverse_frequency: Tensor
    in_draft_vocabulary: Tensor

    def __init__(self, config: DrafterConfig, draft_ids: Tensor) -> None:
        """An untrained drafter.

        Args:
            draft_ids: [Vd] int64 target ids of the draft vocabulary, ascending.

        Raises:
            ValueError: `draft_ids` does not have the configured size, or is not ascending.
        """
        super().__init__()
        if draft_ids.shape != (config.draft_vocab_size,) or bool((draft_ids.diff() <= 0).any()):
            expected = f"{config.draft_vocab_size} ascending ids"
            raise ValueError(f"draft_ids must be {expected}, not {tuple(draft_ids.shape)}")
        size = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(config.train_embedding)
        if config.algorithm == "peagle":
            self.mask_embedding = nn.Parameter(torch.zeros(size))
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, 3 * size))
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RmsNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", offsets_from_ids(draft_ids))
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[draft_ids] = True
        self.register_buffer("in_draft_vocabulary", member, persistent=False)
        frequencies, self.rotation_scale = rope_frequencies(config)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)
        self._compute_weights: dict[torch.dtype, ComputeWeights] = {}

    @property
    def draft_ids(self) -> Tensor:
        """Target id of each draft id, [Vd] int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def layer(self, index: int) -> DecoderLayer:
        """Layer `index`, typed."""
        return cast(DecoderLayer, self.layers[index])

    @property
    def device(self) -> torch.device:
        return self.d2t.device

    def trained_parameters(self) -> list[nn.Parameter]:
        """What an optimizer gets."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def compute_weights(self, dtype: torch.dtype) -> ComputeWeights:
        """The copies of the weights in the compute type."""
        return self._compute_weights.setdefault(dtype, ComputeWeights(dtype))

    def trained_state(self) -> dict[str, Tensor]:
        """What training changes, and the vocabulary mapping: a checkpoint without the frozen embedding."""
        state = self.state_dict()
        if not self.config.train_embedding:
            del state["embed_tokens.weight"]
        return state

    def load_trained_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Read back what `trained_state` gave.

        Raises:
            CheckpointError: other names, shapes or another draft vocabulary.
        """
        self._load(tensors, set(self.trained_state()))

    def export_tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """The tensors of `model.safetensors`, exactly vLLM's names and shapes, on the CPU.

        With placeholders the embedding goes whole, with the learned mask row in its place: a checkpoint
        without it would share the target's table, whose row for the mask token nobody trained. Without, a
        frozen embedding is left out and vLLM shares the target's. A full draft vocabulary has no `d2t`, for
        vLLM makes no room for one then.
        """
        mask_token_id = self.config.mask_token_id
        state = self.trained_state() if mask_token_id is None else self.state_dict()
        state = {name: tensor.detach() for name, tensor in state.items()}
        d2t, mask_row = state.pop("d2t"), state.pop("mask_embedding", None)
        exported = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in state.items()}
        if mask_row is not None:
            embedding = exported["embed_tokens.weight"].clone()
            embedding[mask_token_id] = mask_row.to("cpu", dtype)
            exported["embed_tokens.weight"] = embedding
        if self.config.draft_vocab_size != self.config.vocab_size:
            exported["d2t"] = d2t.cpu()
        return exported

    def load_exported(self, tensors: Mapping[str, Tensor]) -> None:
        """Read back what `export_tensors` gave; a frozen embedding keeps the target's other rows.

        Raises:
            CheckpointError: other names, shapes or another draft vocabulary.
        """
        state = dict(tensors)
        if self.config.mask_token_id is not None:
            if "embed_tokens.weight" not in state:
                raise _mismatch("no embed_tokens.weight", "the whole embedding with the mask token's row")
            embedding = state["embed_tokens.weight"]
            own_shape = tuple(self.embed_tokens.weight.shape)
            if embedding.shape != own_shape:
                raise _mismatch(f"embedding of {tuple(embedding.shape)}", str(own_shape))
            state["mask_embedding"] = embedding[self.config.mask_token_id]
        if not self.config.train_embedding:
            state.pop("embed_tokens.weight", None)
        if self.config.draft_vocab_size == self.config.vocab_size:
            state.setdefault("d2t", torch.zeros_like(self.d2t))
        self._load(state, set(self.trained_state()))

    def _load(self, tensors: Mapping[str, Tensor], expected: set[str]) -> None:
        if set(tensors) != expected:
            difference = sorted(set(tensors) ^ expected)
            raise _mismatch(f"tensors {difference} on one side only", f"exactly {len(expected)} tensors")
        own = self.state_dict()
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise _mismatch(f"{name} of {tuple(tensor.shape)}", str(tuple(own[name].shape)))
        if not torch.equal(tensors["d2t"].cpu().long(), self.d2t.cpu()):
            raise _mismatch("another draft vocabulary (d2t)", "the mapping this drafter was made with")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)


def _mismatch(given: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"drafter weights with {given}",
        expected,
        "use the weights with the settings and the target they were trained with",
    )


def rope_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim/2] float32 and the factor on cosine and sine, for the target's RoPE.

    Raises:
        CheckpointError: a RoPE type whose frequencies depend on the sequence's length, or is partial.
    """
    kind = config.rope.get("rope_type", "default")
    if kind != "proportional" and float(config.rope.get("partial_rotary_factor", 1.0)) != 1.0:
        kind = "partial"
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    if kind == "default":
        return 1.0 / float(config.rope["rope_theta"]) ** exponents, 1.0
    if kind not in ("linear", "llama3", "yarn", "proportional"):
        raise CheckpointError(
            f"a target with RoPE of type {kind}",
            "default, linear, llama3, yarn or proportional, whose frequencies are fixed",
            "choose another target",
        )
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](shape, device=torch.device("cpu"))
    return frequencies.float(), float(factor)
