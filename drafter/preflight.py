"""What is wrong with a drafter, said before a server is started with it. No torch, no server.

vLLM notices some of these faults with an assertion deep inside, and others not at all: it then serves
a drafter whose guesses are never accepted. Each fault here is one sentence: what was found, what would
be right.

Legend: H hidden size, V vocabulary of the target, V_draft of the drafter, L layers of the drafter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from drafter.config import Algorithm, PreflightSettings
from drafter.errors import CheckpointError
from drafter.provenance import (
    CONFIG_NAME,
    FILE_NAME,
    WEIGHTS_NAME,
    digest_of_drafter,
    digests_of,
    read_provenance,
)
from drafter.target import Target, _rope_parameters, load_target
from drafter.tensor_file import TensorFile

ARCHITECTURE = "LlamaForCausalLMEagle3"
MASK_TOKEN_NAMES = ("mask_token_id", "ptd_token_id", "pard_token")


def preflight(settings: PreflightSettings) -> tuple[str, ...]:
    """Check an exported drafter against the target it is to serve.

    Returns:
        Every problem found, in words; empty when the drafter fits.

    Raises:
        CheckpointError: the *target* cannot be read.
    """
    return check_drafter(settings.drafter, load_target(settings.target))


def check_drafter(path: Path, target: Target) -> tuple[str, ...]:
    """The problems of the drafter in `path` behind `target`; see `preflight`."""
    try:
        config = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors = TensorFile(path / WEIGHTS_NAME)
    except (FileNotFoundError, NotADirectoryError) as error:
        return (f"{error.filename} is missing: {path} is not an exported drafter",)
    except (ValueError, CheckpointError) as error:
        return (f"{path}: not readable: {error}",)
    if not isinstance(config, dict):
        return (f"{path / CONFIG_NAME} is a JSON {type(config).__name__}, not an object",)
    algorithm = _algorithm_of(path)
    problems = [
        *_config_problems(config, target),
        *_position_problems(config, target),
        *_mask_token_problems(config, target, algorithm),
        *_auxiliary_problems(config, target),
        *_shape_problems(config, tensors, algorithm),
        *_vocabulary_problems(config, tensors, target),
        *_non_finite_problems(tensors),
        *_provenance_problems(path, target),
    ]
    return tuple(problems)


def require_fit(path: Path, target: Target) -> None:
    """Refuse a drafter that has any problem behind `target`.

    Raises:
        CheckpointError: naming every problem.
    """
    problems = check_drafter(path, target)
    if problems:
        raise CheckpointError(
            f"{path} does not fit {target.path}: " + "; ".join(problems),
            "a drafter exported for this target",
            "choose the drafter of this target, or train one",
        )


def _algorithm_of(path: Path) -> Algorithm:
    """What the provenance says; what is wrong with the provenance itself is said elsewhere."""
    try:
        return read_provenance(path).algorithm
    except CheckpointError:
        return "peagle"


def _config_problems(config: Mapping[str, Any], target: Target) -> Iterator[str]:
    if config.get("architectures") != [ARCHITECTURE]:
        yield f"architectures is {config.get('architectures')}; vLLM looks for ['{ARCHITECTURE}']"
    if config.get("tie_word_embeddings"):
        yield "tie_word_embeddings is true; the drafter's head is its own, so it must be false"
    for name, right in (
        ("hidden_size", target.hidden_size),
        ("target_hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
    ):
        if config.get(name) != right:
            yield f"{name} is {config.get(name)}; the target's is {right}"


def _position_problems(config: Mapping[str, Any], target: Target) -> Iterator[str]:
    positions = config.get("max_position_embeddings")
    if positions != target.max_position_embeddings:
        yield (
            f"max_position_embeddings is {positions}; the target's is {target.max_position_embeddings}: "
            "behind longer contexts the drafter would fail or guess blindly"
        )
    rope = _rope_parameters(dict(config))
    if rope != target.rope:
        yield f"RoPE parameters are {rope}; the target's are {target.rope}"


def _mask_token_problems(config: Mapping[str, Any], target: Target, algorithm: Algorithm) -> Iterator[str]:
    ids = {name: config.get(name) for name in MASK_TOKEN_NAMES}
    if algorithm == "eagle3":
        if any(token is not None for token in ids.values()):
            yield f"a mask token {ids}, but {FILE_NAME} says eagle3, which has no placeholders"
        return
    missing = [name for name, token in ids.items() if not isinstance(token, int)]
    if missing:
        yield f"{', '.join(missing)} missing: versions of vLLM read the mask token under different names"
    found = {token for token in ids.values() if isinstance(token, int)}
    if len(found) > 1:
        yield f"the mask token has several values: {ids}"
    for token in sorted(found):
        if not 0 <= token < target.vocab_size:
            yield f"mask token {token} lies outside the target's vocabulary of {target.vocab_size}"
        elif mask_token_in_use(token, target):
            text = target.tokenizer_tokens.get(token)
            yield (
                f"mask token {token} is in use: it is {text!r}, which text or chat template can produce; "
                f"{target.mask_token_id} is free"
            )


def mask_token_in_use(token: int, target: Target) -> bool:
    """Whether tokenizer or chat template can produce a token, so that placeholders would collide with it."""
    if token == target.mask_token_id or token not in target.tokenizer_tokens:
        return False
    text = target.tokenizer_tokens[token].lower()
    return token in target.eos_token_ids or not ("reserved" in text or "unused" in text)


def _auxiliary_problems(config: Mapping[str, Any], target: Target) -> Iterator[str]:
    eagle = config.get("eagle_config") or {}
    layers = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        yield (
            "eagle_config.eagle_aux_hidden_state_layer_ids is missing: vLLM would guess which states to read"
        )
    elif len(layers) != 3:
        yield f"{len(layers)} auxiliary layers {layers}; three are expected"
    elif any(not 0 <= layer <= target.num_layers for layer in layers):
        yield f"auxiliary layers {layers} do not exist in a target of {target.num_layers} layers"
    if eagle.get("use_aux_hidden_state") is False:
        yield "eagle_config.use_aux_hidden_state is false: the drafter would get the wrong states"


def _shape_problems(config: Mapping[str, Any], tensors: TensorFile, algorithm: Algorithm) -> Iterator[str]:
    try:
        expected = expected_shapes(config, algorithm)
    except (KeyError, TypeError) as error:
        yield f"{CONFIG_NAME} lacks a size: {error}"
        return
    for name, shape in expected.items():
        if name not in tensors:
            why = ": vLLM refuses parallel drafting without it" if name == "mask_hidden" else ""
            yield f"tensor {name} {list(shape)} is missing{why}"
        elif name == "mask_hidden":  # vLLM flattens it: only its size counts
            if int(np.prod(tensors.shape(name))) != shape[-1]:
                yield f"tensor {name} has shape {list(tensors.shape(name))}; expected {list(shape)}"
        elif tensors.shape(name) != shape:
            yield f"tensor {name} has shape {list(tensors.shape(name))}; expected {list(shape)}"
    for name in sorted(set(tensors) - set(expected) - {"embed_tokens.weight", "t2d"}):
        yield f"tensor {name} is not one that vLLM knows"


def expected_shapes(config: Mapping[str, Any], algorithm: Algorithm = "peagle") -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that vLLM needs for this configuration."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    query, key = heads * head_dim, config["num_key_value_heads"] * head_dim
    num_auxiliary = len(
        (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    )
    fused = num_auxiliary * config.get("target_hidden_size", hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, fused),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if algorithm == "peagle":
        shapes["mask_hidden"] = (1, 1, fused)
    if config["draft_vocab_size"] != config["vocab_size"]:
        shapes["d2t"] = (config["draft_vocab_size"],)
    for layer in range(config["num_hidden_layers"]):
        width = 2 * hidden if layer == 0 else hidden
        shapes |= {
            f"layers.{layer}.self_attn.q_proj.weight": (query, width),
            f"layers.{layer}.self_attn.k_proj.weight": (key, width),
            f"layers.{layer}.self_attn.v_proj.weight": (key, width),
            f"layers.{layer}.self_attn.o_proj.weight": (hidden, query),
            f"layers.{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.down_proj.weight": (hidden, inner),
            f"layers.{layer}.input_layernorm.weight": (hidden,),
            f"layers.{layer}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def _vocabulary_problems(config: Mapping[str, Any], tensors: TensorFile, target: Target) -> Iterator[str]:
    if "embed_tokens.weight" in tensors:
        right = (target.vocab_size, target.hidden_size)
        shape = tensors.shape("embed_tokens.weight")
        if shape != right:
            yield f"tensor embed_tokens.weight has shape {list(shape)}; expected {list(right)}"
    if "d2t" not in tensors or len(tensors.shape("d2t")) != 1:
        return
    if tensors.dtype("d2t") != "I64":
        yield f"d2t is {tensors.dtype('d2t')}; vLLM reads int64 offsets"
        return
    offsets = tensors.array("d2t")
    ids = np.arange(len(offsets)) + offsets
    outside = np.flatnonzero((ids < 0) | (ids >= target.vocab_size))
    if len(outside):
        draft = int(outside[0])
        yield (
            f"d2t points outside the target's vocabulary of {target.vocab_size} at {len(outside)} places, "
            f"first draft id {draft} -> {int(ids[draft])} (d2t holds offsets, target id - draft id)"
        )
    num_doubled = len(ids) - len(np.unique(ids))
    if num_doubled:
        yield f"d2t maps {num_doubled} draft ids to a target id that another one has"
    mask_token = config.get("mask_token_id")
    if mask_token is not None and mask_token in ids:
        yield f"mask token {mask_token} is in the draft vocabulary: answers in training contained it"


def _non_finite_problems(tensors: TensorFile) -> Iterator[str]:
    for name in sorted(tensors):
        bad = tensors.count_non_finite(name)
        if bad:
            yield f"tensor {name} has {bad} weights that are NaN or infinite"


def _provenance_problems(path: Path, target: Target) -> Iterator[str]:
    if not (path / FILE_NAME).exists():
        yield f"{FILE_NAME} is missing: the export did not end, or this is not a drafter of Fledge"
        return
    try:
        provenance = read_provenance(path)
    except CheckpointError as error:
        yield f"{error.given}"
        return
    if provenance.target_fingerprint != target.fingerprint:
        yield (
            f"trained for target {provenance.target_fingerprint}; {target.path} is {target.fingerprint} "
            "(other weights, tokenizer or chat template)"
        )
    found = digests_of(path)
    if digest_of_drafter(found) != provenance.drafter.digest:
        changed = [name for name, digest in found.items() if provenance.files.get(name) != digest]
        yield f"{', '.join(changed)} changed after the export: the digest is not the one in {FILE_NAME}"
