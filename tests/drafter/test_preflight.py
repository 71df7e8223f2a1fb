"""Preflight: each fault is named, in words, without a server and without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.config import PreflightSettings
from drafter.preflight import preflight
from tests.drafter.tiny import make_target

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def problems_of(drafter: Path, target: Path) -> tuple[str, ...]:
    return preflight(PreflightSettings(drafter=drafter, target=target))


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def with_value(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


def with_shape(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)})


def with_id(name: str, draft: int, target_id: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name][draft : draft + 1].fill_(target_id - draft)


TENSOR_FAULTS = {
    "mask_hidden missing": (without("mask_hidden"), "mask_hidden [1, 1, 192] is missing: vLLM refuses"),
    "mask_hidden of one layer": (with_shape("mask_hidden", 1, 1, 64), "mask_hidden has shape [1, 1, 64]"),
    "a projection missing": (
        without("layers.1.self_attn.k_proj.weight"),
        "layers.1.self_attn.k_proj.weight [32, 64] is missing",
    ),
    "layer 0 too narrow": (with_shape("layers.0.self_attn.q_proj.weight", 64, 64), "expected [64, 128]"),
    "fc of two auxiliary states": (
        with_shape("fc.weight", 64, 128),
        "fc.weight has shape [64, 128]; expected [64, 192]",
    ),
    "head of another vocabulary": (
        with_shape("lm_head.weight", 100, 64),
        "lm_head.weight has shape [100, 64]",
    ),
    "embedding of another vocabulary": (
        with_shape("embed_tokens.weight", 100, 64),
        "embed_tokens.weight has shape [100, 64]",
    ),
    "d2t missing": (without("d2t"), "d2t [200] is missing"),
    "d2t as token ids": (
        lambda t: t["d2t"].add_(torch.arange(200)),
        "d2t points outside the target's vocabulary of 264",
    ),
    "d2t negative": (with_id("d2t", 0, -1), "draft id 0 -> -1"),
    "d2t twice the same": (with_id("d2t", 0, 10), "maps 1 draft ids to a target id that another one has"),
    "d2t of another type": (lambda t: t.update(d2t=t["d2t"].int()), "d2t is I32; vLLM reads int64"),
    "d2t proposes the mask token": (with_id("d2t", 199, 263), "mask token 263 is in the draft vocabulary"),
    "a NaN": (
        with_value("layers.0.mlp.up_proj.weight", float("nan")),
        "up_proj.weight has 1 weights that are NaN or infinite",
    ),
    "an infinity": (
        with_value("fc.weight", float("-inf")),
        "fc.weight has 1 weights that are NaN or infinite",
    ),
    "an unknown tensor": (
        with_shape("layers.2.norm.weight", 64),
        "layers.2.norm.weight is not one that vLLM knows",
    ),
}


def drop_eagle(config: Config) -> None:
    del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


def set_layers(*layers: int) -> Callable[[Config], object]:
    return lambda config: config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=list(layers))


def set_mask(token: int) -> Callable[[Config], object]:
    return lambda config: config.update(mask_token_id=token, ptd_token_id=token, pard_token=token)


CONFIG_FAULTS = {
    "no auxiliary layers": (drop_eagle, "eagle_aux_hidden_state_layer_ids is missing"),
    "two auxiliary layers": (set_layers(2, 5), "2 auxiliary layers [2, 5]; three are expected"),
    "a layer that is not there": (set_layers(2, 3, 30), "do not exist in a target of 6 layers"),
    "no auxiliary states": (
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state is false",
    ),
    "RoPE base": (
        lambda c: c["rope_parameters"].update(rope_theta=5e5),
        "RoPE parameters are {'rope_theta': 500000.0",
    ),
    "RoPE scaling": (
        lambda c: c["rope_parameters"].update(rope_type="linear", factor=2.0),
        "'rope_type': 'linear'",
    ),
    "fewer positions": (
        lambda c: c.update(max_position_embeddings=256),
        "max_position_embeddings is 256; the target's is 512",
    ),
    "mask token of the text": (set_mask(65), "mask token 65 is in use"),
    "mask token ends answers": (
        set_mask(257),
        "'<|im_end|>', which text or chat template can produce; 263 is free",
    ),
    "mask token outside": (set_mask(264), "lies outside the target's vocabulary of 264"),
    "mask token missing": (lambda c: c.pop("pard_token"), "pard_token missing"),
    "mask tokens differ": (lambda c: c.update(pard_token=262), "the mask token has several values"),
    "another hidden size": (
        lambda c: c.update(target_hidden_size=128),
        "target_hidden_size is 128; the target's is 64",
    ),
    "another vocabulary": (lambda c: c.update(vocab_size=300), "vocab_size is 300; the target's is 264"),
    "another architecture": (
        lambda c: c.update(architectures=["LlamaForCausalLM"]),
        "architectures is ['LlamaForCausalLM']",
    ),
    "tied head": (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "no head count": (
        lambda c: c.pop("num_attention_heads"),
        "config.json lacks a size: 'num_attention_heads'",
    ),
}


def test_a_good_drafter_has_no_problem(tiny_drafter: Path, tiny_target: Path) -> None:
    assert problems_of(tiny_drafter, tiny_target) == ()


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_of_the_weights_is_named(
    tiny_drafter: Path, tiny_target: Path, tmp_path: Path, fault: str
) -> None:
    spoil, words = TENSOR_FAULTS[fault]
    shutil.copytree(tiny_drafter, tmp_path / "d")
    tensors = load_file(tiny_drafter / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    found = problems_of(tmp_path / "d", tiny_target)
    assert any(words in problem for problem in found), found
    assert any("model.safetensors changed after the export" in problem for problem in found)


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_of_the_configuration_is_named(
    tiny_drafter: Path, tiny_target: Path, tmp_path: Path, fault: str
) -> None:
    spoil, words = CONFIG_FAULTS[fault]
    shutil.copytree(tiny_drafter, tmp_path / "d")
    config = json.loads((tiny_drafter / "config.json").read_text())
    spoil(config)
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    found = problems_of(tmp_path / "d", tiny_target)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "provenance.json"])
def test_a_missing_file_is_named(tiny_drafter: Path, tiny_target: Path, tmp_path: Path, missing: str) -> None:
    shutil.copytree(tiny_drafter, tmp_path / "d")
    (tmp_path / "d" / missing).unlink()
    (problem,) = problems_of(tmp_path / "d", tiny_target)
    assert f"{missing} is missing" in problem


@pytest.mark.parametrize("left", [5, 100, -10])
def test_a_truncated_file_is_named(tiny_drafter: Path, tiny_target: Path, tmp_path: Path, left: int) -> None:
    shutil.copytree(tiny_drafter, tmp_path / "d")
    weights = tmp_path / "d" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    (problem,) = problems_of(tmp_path / "d", tiny_target)
    assert "a whole safetensors file" in problem


def test_the_drafter_of_another_target_is_named(tiny_drafter: Path, tmp_path: Path) -> None:
    """Of the same shape, so that only the fingerprint tells."""
    other = make_target(tmp_path / "other", seed=1)
    (problem,) = problems_of(tiny_drafter, other)
    assert "trained for target" in problem


def test_no_torch_is_needed(tiny_drafter: Path, tiny_target: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from drafter.config import PreflightSettings\n"
        "from drafter.preflight import preflight\n"
        f"settings = PreflightSettings(drafter={str(tiny_drafter)!r}, target={str(tiny_target)!r})\n"
        "assert preflight(settings) == ()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
