"""Targets of every architecture that docs/targets.md names: read, extracted from, trained for, exported for.

Each is a tiny random model of the real architecture, written by transformers. What vLLM makes of them is in
`tests/served/test_targets_in_vllm.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.config import DrafterSettings, ExportSettings, ExtractSettings, PreflightSettings
from drafter.errors import CheckpointError
from drafter.export import export
from drafter.extraction import extract
from drafter.initialization import TargetTensors, build_drafter, build_teacher
from drafter.metrics import FILE_NAME as METRICS_NAME
from drafter.metrics import read_metrics
from drafter.model import DrafterConfig, rope_frequencies
from drafter.preflight import preflight
from drafter.reference_extraction import ReferenceExtractor
from drafter.shards import open_states
from drafter.target import Target, load_target
from drafter.trainer import train
from tests.drafter.architectures import (
    ARCHITECTURES,
    AUXILIARY_LAYERS,
    GEMMA4_GLOBAL_ROPE,
    NUM_LAYERS,
    make_architecture,
)
from tests.drafter.test_extraction import make_dataset
from tests.drafter.tiny import VOCAB_SIZE, make_documents, training_settings, write_states

QUESTIONS = [["Hello"], ["What is it?"], ["Name three colours."], ["One, two"], ["Bye"], ["Why so?"]]

# As the drafter and vLLM have to compute it. Gemma: of the layers that see the whole context.
ROPE = {
    "llama": {"rope_type": "default", "rope_theta": 10000.0},
    "llama with llama3 RoPE": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "qwen3": {"rope_type": "default", "rope_theta": 1000000.0},
    "qwen3-moe": {"rope_type": "default", "rope_theta": 10000000.0},
    "gpt-oss": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
    "gemma3": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "gemma4": GEMMA4_GLOBAL_ROPE,
    "gemma4 with images": GEMMA4_GLOBAL_ROPE,
}
ALL = {"attention.0", "mlp.0", "attention.1", "mlp.1"}
# What the drafter's layers take over from the target's last two: all but experts, and Gemma 4's last layer has
# other heads.
TAKEN_OVER = {
    "llama": ALL,
    "llama with llama3 RoPE": ALL,
    "qwen3": ALL,
    "qwen3-moe": {"attention.0", "attention.1"},
    "gpt-oss": {"attention.0", "attention.1"},
    "gemma3": ALL,
    "gemma4": ALL - {"attention.1"},
    "gemma4 with images": ALL - {"attention.1"},
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(make_architecture(tmp_path_factory.mktemp("target") / "target", architecture))


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def states(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("extraction")
    settings = ExtractSettings(
        dataset=make_dataset(target.path, directory, QUESTIONS),
        target=target.path,
        output=directory / "states",
        extractor="transformers",
        max_answer_tokens=24,
        server={"dtype": "float32"},
    )
    extract(settings)
    return settings.output


def drafter_config(target: Target) -> DrafterConfig:
    settings = DrafterSettings(draft_vocab_size=200)
    return DrafterConfig.from_target(target, settings, target.mask_token_id, target.default_auxiliary_layers)


def test_its_shape_is_read(target: Target, model: Any) -> None:
    config = model.config.get_text_config()
    assert target.hidden_size == config.hidden_size
    assert target.num_layers == config.num_hidden_layers == NUM_LAYERS
    assert (target.num_heads, target.num_kv_heads, target.head_dim) == (4, 2, 32)
    assert target.vocab_size == model.get_output_embeddings().weight.shape[0] == VOCAB_SIZE
    assert target.max_position_embeddings == config.max_position_embeddings
    assert target.rms_norm_eps == config.rms_norm_eps
    assert target.tie_word_embeddings == config.tie_word_embeddings
    assert target.default_auxiliary_layers == AUXILIARY_LAYERS
    assert target.mask_token_id == VOCAB_SIZE - 1
    assert target.eos_token_ids == {257}


def test_the_drafter_rotates_as_the_target_does(target: Target, model: Any, architecture: str) -> None:
    assert target.rope == ROPE[architecture]
    frequencies, factor = rope_frequencies(drafter_config(target))
    rotation = model.get_decoder().rotary_emb
    if architecture.startswith(
        "gemma4"
    ):  # its global heads are wider, so only the share that turns is the same
        assert torch.count_nonzero(frequencies) == len(frequencies) / 4
    elif architecture == "gemma3":
        torch.testing.assert_close(frequencies, rotation.full_attention_inv_freq)
    else:
        torch.testing.assert_close(frequencies, rotation.inv_freq)
        assert factor == pytest.approx(rotation.attention_scaling)


def test_states_are_those_that_enter_the_layers(target: Target, model: Any, states: Path) -> None:
    entering: dict[int, torch.Tensor] = {}
    decoder = model.get_decoder()
    modules = {**dict(enumerate(decoder.layers)), NUM_LAYERS: decoder.norm}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, inputs, kwargs, index=index: entering.update(
                {index: inputs[0] if inputs else kwargs["hidden_states"]}
            ),
            with_kwargs=True,
        )
        for index, module in modules.items()
    ]
    extracted = open_states(states, target.fingerprint)
    for number in range(len(extracted)):
        document = extracted.document(number)
        with torch.no_grad():
            model(document.input_ids[None, :-1])
        expected = torch.cat([entering[layer][0] for layer in AUXILIARY_LAYERS], dim=-1)
        torch.testing.assert_close(document.auxiliary[:-1], expected.bfloat16())
        torch.testing.assert_close(document.final[:-1], entering[NUM_LAYERS][0].bfloat16())
    for hook in hooks:
        hook.remove()


def test_the_teacher_gives_the_models_own_logits(target: Target, model: Any, tmp_path: Path) -> None:
    draft_ids = torch.arange(10, 210)
    teacher = build_teacher(
        drafter_config(target), draft_ids, TargetTensors(target.path), torch.float32, "cpu"
    )
    ids = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(0))
    extractor = ReferenceExtractor(model, (NUM_LAYERS,), tmp_path, 0.0, frozenset())
    final = extractor.hidden_states(ids)[:, 0]
    with torch.no_grad():
        expected = model(ids[None]).logits[0][:, draft_ids]
    assert expected.std() > 1, "logits so small that a missing cap would not show"
    torch.testing.assert_close(teacher.logits(final), expected, rtol=1e-4, atol=1e-4)


def test_a_drafter_takes_over_what_has_a_llama_layers_shape(target: Target, architecture: str) -> None:
    tensors, config, ids = TargetTensors(target.path), drafter_config(target), torch.arange(200)
    at_random = dict(build_drafter(config, ids, tensors, False, seed=0).named_parameters())
    drafter = build_drafter(config, ids, tensors, True, seed=0)
    changed = {
        f"{part}.{index}"
        for index in range(2)
        for part, name in (("attention", "self_attn.q_proj"), ("mlp", "mlp.up_proj"))
        if not torch.equal(
            drafter.get_parameter(f"layers.{index}.{name}.weight"),
            at_random[f"layers.{index}.{name}.weight"],
        )
    }
    assert changed == TAKEN_OVER[architecture]


def test_norms_are_taken_over_as_they_work(target: Target, model: Any) -> None:
    """Gemma's second norm comes before the feed-forward under another name, and Gemma 3's count from one."""
    drafter = build_drafter(drafter_config(target), torch.arange(200), TargetTensors(target.path), True, 0)
    last = model.get_decoder().layers[-1]
    x = torch.randn(5, target.hidden_size)
    before_feed_forward = getattr(last, "pre_feedforward_layernorm", last.post_attention_layernorm)
    for own, theirs in (
        (drafter.norm, model.get_decoder().norm),
        (drafter.layer(1).input_layernorm, last.input_layernorm),
        (drafter.layer(1).post_attention_layernorm, before_feed_forward),
    ):
        torch.testing.assert_close(own(x), theirs(x))


def test_training_lowers_the_loss_and_the_export_fits(
    target: Target, states: Path, architecture: str, tmp_path: Path
) -> None:
    train(training_settings(states, target.path, tmp_path / "training", num_epochs=12, max_length_tokens=64))
    losses = [metrics.loss for metrics in read_metrics(tmp_path / "training" / METRICS_NAME)]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3]), losses
    output = tmp_path / "drafter"
    export(ExportSettings(training=tmp_path / "training", target=target.path, output=output))
    assert preflight(PreflightSettings(drafter=output, target=target.path)) == ()
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["rope_parameters"] == ROPE[architecture]
    assert config["rope_theta"] == ROPE[architecture]["rope_theta"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUXILIARY_LAYERS)
    same = ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "head_dim")
    assert {name: config[name] for name in same} == {name: target.config[name] for name in same}


def test_the_text_model_of_one_with_images_can_be_saved_alone(tmp_path: Path) -> None:
    """As docs/targets.md shows, for servers without image libraries."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Gemma4ForCausalLM,
        Gemma4ForConditionalGeneration,
    )

    whole, text = make_architecture(tmp_path / "whole", "gemma4 with images"), tmp_path / "text"
    model = Gemma4ForConditionalGeneration.from_pretrained(whole, dtype=torch.bfloat16)
    text_model = Gemma4ForCausalLM(model.config.text_config).to(torch.bfloat16)
    text_model.model.load_state_dict(model.model.language_model.state_dict())
    text_model.save_pretrained(text)
    AutoTokenizer.from_pretrained(whole).save_pretrained(text)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        one, other = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (whole, text))
    assert torch.equal(one, other)
    assert load_target(text).rope == load_target(whole).rope


def test_a_target_whose_norm_is_read_wrongly_is_not_trained_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a family would be that nobody has tried, with norms that count from one like Gemma 3's."""
    target = make_architecture(tmp_path / "target", "gemma3")
    monkeypatch.setattr("drafter.target._NORMS_FROM_ONE", ())
    states = write_states(tmp_path / "states", target, make_documents(target, 6))
    with pytest.raises(CheckpointError, match=r"\(gemma3_text\) lead to \d+ of \d+ tokens that it wrote"):
        train(training_settings(states, target, tmp_path / "training"))
