"""The drafter's tensors as vLLM reads them, and what is made from a target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from drafter.config import DrafterSettings
from drafter.errors import CheckpointError
from drafter.initialization import TargetTensors, build_drafter, build_teacher
from drafter.model import Drafter, DrafterConfig, rope_frequencies
from drafter.target import load_target
from tests.reference.random_drafters import random_config, random_drafter

LAYER_TENSORS = {
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


def test_the_export_has_exactly_vllms_names_and_shapes() -> None:
    tensors = random_drafter(random_config(num_layers=2)).export_tensors()
    expected = {"fc.weight", "mask_hidden", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t"}
    expected |= {f"layers.{index}.{name}" for index in range(2) for name in LAYER_TENSORS}
    expected.add("layers.0.hidden_norm.weight")
    assert set(tensors) == expected
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (48, 64)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (48, 32)
    assert tensors["lm_head.weight"].shape == (40, 32)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_d2t_holds_offsets() -> None:
    drafter = random_drafter(random_config())
    exported = drafter.export_tensors()["d2t"]
    assert torch.equal(exported + torch.arange(40), drafter.draft_ids)


def test_a_full_draft_vocabulary_is_exported_without_d2t() -> None:
    assert "d2t" not in random_drafter(random_config(draft_vocab_size=64)).export_tensors()


@pytest.mark.parametrize("train_embedding", [False, True])
def test_the_exported_embedding_carries_the_learned_mask_row(train_embedding: bool) -> None:
    drafter = random_drafter(random_config(train_embedding=train_embedding))
    exported = drafter.export_tensors(torch.float32)["embed_tokens.weight"]
    assert torch.equal(exported[63], drafter.mask_embedding.detach())
    assert torch.equal(exported[:63], drafter.embed_tokens.weight.detach()[:63])


@pytest.mark.parametrize("changes", [{}, {"train_embedding": False}, {"draft_vocab_size": 64}])
def test_an_export_is_read_back(changes: dict[str, object]) -> None:
    config = random_config(**changes)
    drafter, other = random_drafter(config, seed=0), random_drafter(config, seed=1)
    other.d2t.copy_(drafter.d2t)
    other.load_exported(drafter.export_tensors(torch.float32))
    for name, parameter in drafter.named_parameters():
        if name != "embed_tokens.weight":
            assert torch.equal(parameter, other.get_parameter(name)), name


def test_a_checkpoint_leaves_out_the_frozen_embedding() -> None:
    frozen = random_drafter(random_config(train_embedding=False))
    assert "embed_tokens.weight" not in frozen.trained_state()
    assert "embed_tokens.weight" in random_drafter(random_config()).trained_state()
    other = random_drafter(random_config(train_embedding=False), seed=0)
    with torch.no_grad():
        other.fc.weight.zero_()
    other.load_trained_state(frozen.trained_state())
    assert torch.equal(other.fc.weight, frozen.fc.weight)


def test_weights_of_another_shape_or_vocabulary_are_refused() -> None:
    drafter = random_drafter(random_config())
    with pytest.raises(CheckpointError, match=r"another draft vocabulary"):
        drafter.load_trained_state(random_drafter(random_config(), seed=3).trained_state())
    with pytest.raises(CheckpointError, match=r"gate_proj"):
        drafter.load_trained_state(random_drafter(random_config(intermediate_size=64)).trained_state())
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        drafter.load_trained_state(random_drafter(random_config(num_layers=3)).trained_state())
    exported = drafter.export_tensors()
    del exported["mask_hidden"]
    with pytest.raises(CheckpointError, match=r"mask_hidden"):
        drafter.load_exported(exported)


def test_shapes_that_cannot_work_are_refused() -> None:
    for changes in ({"mask_token_id": 64}, {"num_kv_heads": 4}, {"draft_vocab_size": 65}, {"num_layers": 5}):
        with pytest.raises(ValidationError):
            random_config(**changes)
    with pytest.raises(ValueError, match="ascending"):
        Drafter(random_config(), torch.arange(40).flip(0))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10000.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        {
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_rotation_is_the_targets(rope: dict[str, object]) -> None:
    """transformers' own rotary embedding gives the same cosines and sines."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=512, rope_parameters=dict(rope)
    )
    positions = torch.tensor([[0, 1, 17, 300]])
    cosine, sine = LlamaRotaryEmbedding(shape)(torch.zeros(1, 4, 32), positions)
    frequencies, scale = rope_frequencies(random_config(rope=rope))
    angles = positions[0, :, None] * frequencies
    assert torch.allclose(angles.cos() * scale, cosine[0, :, :4], atol=1e-5)
    assert torch.allclose(angles.sin() * scale, sine[0, :, :4], atol=1e-5)


def test_a_rope_that_changes_with_length_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"dynamic"):
        rope_frequencies(random_config(rope={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}))


def _config(target_path: Path, **settings: object) -> DrafterConfig:
    target = load_target(target_path)
    return DrafterConfig.from_target(
        target,
        DrafterSettings.model_validate({"draft_vocab_size": 100, **settings}),
        target.mask_token_id,
        target.default_auxiliary_layers,
    )


def test_a_drafter_from_a_target_starts_with_its_head_norm_and_last_layers(tiny_target: Path) -> None:
    config = _config(tiny_target)
    ids = torch.arange(50, 150)
    tensors = TargetTensors(tiny_target)
    drafter = build_drafter(config, ids, tensors, init_from_target=True, seed=0)
    head = tensors.get(tensors.head_name).float()
    assert torch.equal(drafter.lm_head.weight, head[ids])
    assert torch.equal(drafter.norm.weight, tensors.get("model.norm.weight").float())
    for index, source in ((0, 4), (1, 5)):
        name = f"layers.{index}.mlp.up_proj.weight"
        assert torch.equal(
            drafter.get_parameter(name), tensors.get(f"model.layers.{source}.mlp.up_proj.weight").float()
        )
    query = drafter.layer(0).self_attn.q_proj.weight
    assert torch.equal(
        query[:, config.hidden_size :], tensors.get("model.layers.4.self_attn.q_proj.weight").float()
    )
    assert torch.equal(drafter.embed_tokens.weight, tensors.get("model.embed_tokens.weight"))
    assert not drafter.embed_tokens.weight.requires_grad


def test_one_seed_gives_one_drafter(tiny_target: Path) -> None:
    config, tensors = _config(tiny_target, init_from_target=False), TargetTensors(tiny_target)
    one, two, other = (
        build_drafter(config, torch.arange(100), tensors, init_from_target=False, seed=seed)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.fc.weight, two.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_the_teacher_has_the_draft_vocabularys_rows(tiny_target: Path) -> None:
    tensors = TargetTensors(tiny_target)
    ids = torch.arange(20, 120)
    teacher = build_teacher(_config(tiny_target), ids, tensors, torch.float32, "cpu")
    assert torch.equal(teacher.weight, tensors.get(tensors.head_name)[ids].float())


def test_a_missing_tensor_is_named(tiny_target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.nothing\.weight"):
        TargetTensors(tiny_target).get("model.nothing.weight")
