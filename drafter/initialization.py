"""A new drafter and its teacher, made from the target's weights.

Shapes: H hidden size, V vocabulary, Vd draft vocabulary, L layers of the target, n layers of the drafter.

A drafter that starts where the target ends learns in a fraction of the steps: `fc` passes the deepest
auxiliary state through, the layers are copies of the target's last ones, norm and head are the target's.
vLLM loads the result like any other, because only values differ, not shapes. What the target's layers do not
have in a Llama layer's shape (experts, other heads, 4-bit weights) starts at random.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drafter.errors import CheckpointError
from drafter.loss import TeacherHead
from drafter.model import DecoderLayer, Drafter, DrafterConfig
from drafter.target import load_target, weight_files

_SMALL = 0.02  # standard deviation that Llama-type models are initialised with
_FLOATS = ("F32", "F16", "BF16")


class TargetTensors:
    """The target's tensors by name, read when asked for, over one or several safetensors files.

    Of a quantised target those that are there as numbers: floats, and INT8 rows with a scale each.
    """

    def __init__(self, path: Path) -> None:
        """Open the files' headers.

        Raises:
            CheckpointError: there are no safetensors files, or no model.
        """
        self.target = load_target(path)
        self._files: dict[str, Path] = {}
        self._types: dict[str, str] = {}
        for file in weight_files(path):
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118, it is no dictionary
                    self._files[name] = file
                    self._types[name] = handle.get_slice(name).get_dtype()

    def __contains__(self, name: str) -> bool:
        found = self._find(name)
        return found is not None and self._is_readable(found)

    def get(self, name: str) -> Tensor:
        """One whole tensor, in the target's type; INT8 ones multiplied by their scales.

        Raises:
            CheckpointError: the target has no tensor of that name, or only packed.
        """
        found = self._find(name)
        path = self.target.path
        packed = self._packed(name)
        if found is None and not packed:
            raise CheckpointError(
                f"{path} has no tensor {name}",
                "a Llama-type target with Hugging Face's tensor names",
                "check that the weight files are complete, or choose another target",
            )
        if found is None or not self._is_readable(found):
            what = (
                f"has {packed}, but no {name}" if found is None else f"holds {found} as {self._types[found]}"
            )
            raise CheckpointError(
                f"{path} {what}",
                "embedding, last norm and head as floats, or as INT8 with a scale a row",
                "quantise the target without them (compressed-tensors: `ignore: [lm_head]`)",
            )
        tensor = self._read(found)
        if self._types[found] in _FLOATS:
            return tensor
        scale = self._read(f"{found}_scale")
        return (tensor.float() * scale.float().view(-1, 1)).to(scale.dtype)

    def norm(self, name: str) -> Tensor:
        """What a norm multiplies by, float32."""
        return self.get(name).float() + self.target.norm_offset

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows `ids` of a matrix."""
        return self.get(name)[ids]

    @property
    def head_name(self) -> str:
        """Name of the output head; with tied embeddings, of the embedding."""
        own = "lm_head.weight"
        return own if self._find(own) or self._packed(own) else "model.embed_tokens.weight"

    def _find(self, name: str) -> str | None:
        """The name as stored."""
        return next((candidate for candidate in _stored_names(name) if candidate in self._files), None)

    def _packed(self, name: str) -> str | None:
        """What is stored beside or in place of `name` when that is quantised, e.g. `..._packed`."""
        stems = tuple(candidate.removesuffix("weight") for candidate in _stored_names(name))
        return next((stored for stored in self._files if stored.startswith(stems)), None)

    def _is_readable(self, stored: str) -> bool:
        if self._types[stored] in _FLOATS:
            return True
        scale = f"{stored}_scale"
        if self._types[stored] != "I8" or self._types.get(scale) not in _FLOATS:
            return False
        one_a_row = math.prod(self._shape(scale)) == self._shape(stored)[0]
        return one_a_row and f"{stored}_zero_point" not in self._files

    def _shape(self, stored: str) -> list[int]:
        with safe_open(self._files[stored], framework="pt") as handle:
            shape: list[int] = handle.get_slice(stored).get_shape()
        return shape

    def _read(self, stored: str) -> Tensor:
        with safe_open(self._files[stored], framework="pt") as handle:
            return handle.get_tensor(stored)


def _stored_names(name: str) -> tuple[str, ...]:
    """Where `name` may be: models that also see images keep text weights under another prefix."""
    return name, f"model.language_model.{name.removeprefix('model.')}", f"language_model.{name}"


def build_teacher(
    config: DrafterConfig,
    draft_ids: Tensor,
    tensors: TargetTensors,
    dtype: torch.dtype,
    device: torch.device | str,
) -> TeacherHead:
    """The target's final norm and the draft vocabulary's head rows."""
    return TeacherHead(
        norm=tensors.norm("model.norm.weight").to(device),
        weight=tensors.rows(tensors.head_name, draft_ids).to(device, dtype),
        eps=config.rms_norm_eps,
        logit_cap=tensors.target.logit_cap,
    )


def build_drafter(
    config: DrafterConfig, draft_ids: Tensor, tensors: TargetTensors, init_from_target: bool, seed: int
) -> Drafter:
    """A drafter to train; its embedding is always the target's.

    Args:
        draft_ids: [Vd] int64 target ids, ascending.
        init_from_target: start head, norms, `fc` and layers from the target; else all at random.
        seed: of the random values.

    Raises:
        CheckpointError: the target's embedding does not have the configured shape.
    """
    drafter = Drafter(config, draft_ids)
    _randomize(drafter, seed)
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise CheckpointError(
            f"an embedding of {tuple(embedding.shape)}",
            f"[{config.vocab_size}, {config.hidden_size}] as in the target's config.json",
            "check that config.json and the weight files belong together",
        )
    # Frozen, the table stays in the target's type: half the memory, and no rounding on export.
    dtype = torch.float32 if config.train_embedding else embedding.dtype
    drafter.embed_tokens.weight.data = embedding.to(dtype)
    with torch.no_grad():
        if config.mask_token_id is not None:
            drafter.mask_embedding.copy_(embedding[config.mask_token_id])
        if init_from_target:
            _initialize_from_target(drafter, tensors)
    return drafter


def _randomize(drafter: Drafter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1 and name != "embed_tokens.weight":
            nn.init.normal_(parameter, std=_SMALL, generator=generator)


def _initialize_from_target(drafter: Drafter, tensors: TargetTensors) -> None:
    config = drafter.config
    drafter.norm.weight.copy_(tensors.norm("model.norm.weight"))
    drafter.lm_head.weight.copy_(tensors.rows(tensors.head_name, drafter.draft_ids))
    # `fc` has three blocks, one for each auxiliary state; the last one is the deepest.
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, 2 * config.hidden_size :] += torch.eye(config.hidden_size)
    num_target_layers = _count_layers(tensors)
    for index in range(config.num_layers):
        source = num_target_layers - config.num_layers + index
        _copy_layer(drafter.layer(index), tensors, f"model.layers.{source}", is_first=index == 0)


def _count_layers(tensors: TargetTensors) -> int:
    count = 0
    while f"model.layers.{count}.input_layernorm.weight" in tensors:
        count += 1
    return count


def _copy_layer(layer: DecoderLayer, tensors: TargetTensors, prefix: str, is_first: bool) -> None:
    """Copy what has the same shape. In layer 0 the target's projections read the fused state's half.

    The embedding's half starts at random and small: what the next token tells is learned.
    """
    for name, parameter in layer.named_parameters():
        source = f"{prefix}.{_name_in_target(name, tensors, prefix)}"
        if source not in tensors or (is_first and name == "input_layernorm.weight"):
            continue
        weight = tensors.norm(source) if "norm" in name else tensors.get(source)
        if parameter.shape == weight.shape:
            parameter.copy_(weight)
        elif is_first and parameter.shape == (weight.shape[0], 2 * weight.shape[1]):
            parameter[:, weight.shape[1] :] = weight


def _name_in_target(name: str, tensors: TargetTensors, prefix: str) -> str:
    """The tensor of a target's layer that does what `name` does in a Llama layer."""
    if name == "hidden_norm.weight":
        return "input_layernorm.weight"
    before_feed_forward = "pre_feedforward_layernorm.weight"
    # Gemma norms what comes out of a block too; the name of Llama's second norm is one of those there.
    if name == "post_attention_layernorm.weight" and f"{prefix}.{before_feed_forward}" in tensors:
        return before_feed_forward
    return name
