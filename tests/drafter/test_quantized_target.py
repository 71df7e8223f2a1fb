"""Quantised checkpoints: what a drafter can start from, and what is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.config import DrafterSettings, ExportSettings, ExtractSettings, PreflightSettings
from drafter.errors import CheckpointError
from drafter.export import export
from drafter.extraction import extract
from drafter.initialization import TargetTensors, build_drafter, build_teacher
from drafter.model import DrafterConfig
from drafter.preflight import preflight
from drafter.shards import Document
from drafter.target import load_target
from drafter.trainer import train
from tests.drafter.quantized import quantize_to_int8
from tests.drafter.test_extraction import make_dataset
from tests.drafter.tiny import training_settings, write_states


@pytest.fixture(scope="module")
def int8_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_to_int8(tiny_target, tmp_path_factory.mktemp("int8") / "target")


def config_of(path: Path) -> DrafterConfig:
    target = load_target(path)
    settings = DrafterSettings(draft_vocab_size=200)
    return DrafterConfig.from_target(target, settings, target.mask_token_id, target.default_auxiliary_layers)


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(path / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def test_int8_weights_come_multiplied_by_their_scales(tiny_target: Path, int8_target: Path) -> None:
    name = "model.layers.5.self_attn.q_proj.weight"
    weight, original = TargetTensors(int8_target).get(name), TargetTensors(tiny_target).get(name).float()
    step = original.abs().amax(dim=1, keepdim=True) / 63
    assert bool(((weight - original).abs() <= 0.51 * step).all())


def test_a_drafter_starts_from_int8_layers(int8_target: Path) -> None:
    tensors = TargetTensors(int8_target)
    drafter = build_drafter(config_of(int8_target), torch.arange(200), tensors, True, 0)
    for part in ("self_attn.o_proj", "mlp.gate_proj"):
        expected = tensors.get(f"model.layers.5.{part}.weight")
        assert torch.equal(drafter.get_parameter(f"layers.1.{part}.weight"), expected)


@pytest.mark.parametrize("kind", ["float8", "packed 4-bit", "INT8 with zero points", "INT8 by groups"])
def test_weights_that_are_no_plain_numbers_are_left_out(int8_target: Path, tmp_path: Path, kind: str) -> None:
    path = Path(shutil.copytree(int8_target, tmp_path / "target"))
    name = "model.layers.5.mlp.up_proj.weight"
    changes: dict[str, dict[str, torch.Tensor | None]] = {
        "float8": {name: torch.ones(96, 64).to(torch.float8_e4m3fn)},
        "packed 4-bit": {name: None, name.replace("weight", "weight_packed"): torch.ones(96, 8).int()},
        "INT8 with zero points": {name.replace("weight", "weight_zero_point"): torch.ones(96, 1).char()},
        "INT8 by groups": {f"{name}_scale": torch.ones(96, 4)},
    }
    change_tensors(path, **changes[kind])
    drafter = build_drafter(config_of(path), torch.arange(200), TargetTensors(path), True, 0)
    at_random = build_drafter(config_of(path), torch.arange(200), TargetTensors(path), False, 0)
    own, random = (d.get_parameter("layers.1.mlp.up_proj.weight") for d in (drafter, at_random))
    assert torch.equal(own, random)


def test_a_packed_head_is_refused_by_name(int8_target: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(int8_target, tmp_path / "target"))
    change_tensors(path, **{"lm_head.weight": torch.ones(264, 64).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"holds lm_head\.weight as F8_E4M3"):
        build_teacher(config_of(path), torch.arange(200), TargetTensors(path), torch.float32, "cpu")


def test_a_head_under_another_name_is_refused_by_name(int8_target: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(int8_target, tmp_path / "target"))
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    change_tensors(path, **{"lm_head.weight": None, "lm_head.weight_packed": head.int()})
    with pytest.raises(CheckpointError, match=r"has lm_head\.weight_packed, but no lm_head\.weight"):
        build_teacher(config_of(path), torch.arange(200), TargetTensors(path), torch.float32, "cpu")


def test_training_and_export_work_from_a_quantised_checkpoint(
    int8_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    states = write_states(tmp_path / "states", int8_target, tiny_documents[:12])
    train(training_settings(states, int8_target, tmp_path / "training", num_epochs=1))
    settings = ExportSettings(training=tmp_path / "training", target=int8_target, output=tmp_path / "drafter")
    export(settings)
    assert preflight(PreflightSettings(drafter=settings.output, target=int8_target)) == ()
    assert "quantization_config" not in (settings.output / "config.json").read_text(), "the drafter is not"


@pytest.mark.parametrize("given", ["directory", "file"])
def test_a_gguf_file_is_refused_by_name(tmp_path: Path, given: str) -> None:
    file = tmp_path / "model-Q4_1.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model-Q4_1\.gguf is a GGUF file"):
        load_target(tmp_path if given == "directory" else file)


def test_the_reference_extractor_refuses_what_it_cannot_read(int8_target: Path, tmp_path: Path) -> None:
    settings = ExtractSettings(
        dataset=make_dataset(int8_target, tmp_path, [["Hello"]]),
        target=int8_target,
        output=tmp_path / "states",
        extractor="transformers",
    )
    with pytest.raises(CheckpointError, match=r"(?s)transformers cannot load .*--extractor vllm") as refusal:
        extract(settings)
    assert "compressed" in str(refusal.value)
