"""The directory that vLLM loads as it is: `config.json`, `model.safetensors`, and `provenance.json` last.

The format is what `llama_eagle3.py` and `llm_base_proposer.py` of vLLM 0.32.0 read: a Llama
configuration with the names of EAGLE-3 (arXiv 2503.01840) and of parallel drafting (P-EAGLE,
arXiv 2602.01469). The same weights give the same bytes.

Legend: H hidden size, V vocabulary of the target, V_draft of the drafter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafter.config import ExportSettings, PreflightSettings, ServerSettings
from drafter.errors import CheckpointError
from drafter.files import atomic_path, read_record, write_text_atomically
from drafter.initialization import TargetTensors, build_drafter
from drafter.model import Drafter, DrafterConfig
from drafter.preflight import ARCHITECTURE, MASK_TOKEN_NAMES, preflight
from drafter.provenance import (
    CONFIG_NAME,
    FILE_NAME,
    WEIGHTS_NAME,
    Provenance,
    code_version,
    digest_of_drafter,
    digests_of,
    read_provenance,
    versions,
)
from drafter.records import DrafterRecord, TrainingRecord
from drafter.target import Target, _rope_parameters, load_target
from drafter.training_directory import RECORD_NAME, read_result, read_settings
from drafter.vocabulary import ids_from_offsets


def export(settings: ExportSettings) -> DrafterRecord:
    """Write a finished training as a drafter; returns at once if that is already done.

    Raises:
        DataError: the training did not end.
        CheckpointError: another target, weights that are not finite, an output directory in use.
    """
    target = load_target(settings.target)
    training = read_record(TrainingRecord, settings.training / RECORD_NAME)
    _check_target(training, target, settings)
    finished = _finished_export(settings.output, training)
    if finished is not None:
        return finished
    config, weights = read_result(settings.training)
    drafter = build_drafter(config, ids_from_offsets(weights["d2t"]), TargetTensors(target.path), False, 0)
    drafter.load_trained_state(weights)
    _write_files(settings.output, drafter, target)
    files = digests_of(settings.output)
    record = DrafterRecord(
        path=str(settings.output),
        digest=digest_of_drafter(files),
        num_parameters=sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        target_fingerprint=target.fingerprint,
    )
    provenance = Provenance(
        drafter=record,
        files=files,
        training=training,
        settings=read_settings(settings.training),
        states_digest=training.states_digest,
        dataset_digest=training.dataset_digest,
        target_fingerprint=target.fingerprint,
        auxiliary_layers=config.auxiliary_layers,
        algorithm=config.algorithm,
        mask_token_id=config.mask_token_id,
        code_version=code_version(),
        versions=versions(ServerSettings().python),
    )
    provenance.save(settings.output / FILE_NAME)
    problems = preflight(PreflightSettings(drafter=settings.output, target=settings.target))
    if problems:
        (settings.output / FILE_NAME).unlink()
        raise CheckpointError(
            f"{settings.training}: the export has problems: " + "; ".join(problems),
            "a drafter that passes preflight",
            "train again with a lower --peak-learning-rate if weights are not finite; else report this",
        )
    return record


def vllm_config(config: DrafterConfig, target: Target) -> dict[str, Any]:
    """`config.json` of a drafter, as vLLM reads it."""
    roles: dict[str, Any] = {
        name: target.config[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if name in target.config
    }
    mask_token: dict[str, Any] = {}
    if config.mask_token_id is not None:  # versions of vLLM differ in the name that they look for
        mask_token = dict.fromkeys(MASK_TOKEN_NAMES, config.mask_token_id)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        # Behind a longer target, a drafter with fewer positions loses acceptance or stops the server.
        "max_position_embeddings": config.max_position_embeddings,
        # transformers 5 reads rope_parameters, older readers the two others.
        "rope_parameters": config.rope,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None
        if config.rope.get("rope_type", "default") == "default"
        else _scaling(config.rope),
        **mask_token,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.auxiliary_layers),
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": config.norm_before_residual,
        "dtype": "bfloat16",
        **roles,
    }


def drafter_config_of(config: dict[str, Any], train_embedding: bool = False) -> DrafterConfig:
    """The inverse of `vllm_config`."""
    return DrafterConfig(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=_rope_parameters(config),
        max_position_embeddings=config["max_position_embeddings"],
        mask_token_id=config.get("mask_token_id"),
        auxiliary_layers=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        norm_before_residual=config["norm_before_residual"],
        train_embedding=train_embedding,
    )


def load_exported_drafter(path: Path, target: Target, train_embedding: bool = False) -> Drafter:
    """An exported drafter as a model again, to continue its training or to estimate with it.

    The caller has run preflight. Master weights come back rounded to bfloat16.

    Raises:
        CheckpointError: shapes or vocabulary differ from its configuration.
    """
    config = drafter_config_of(json.loads((path / CONFIG_NAME).read_text(encoding="utf-8")), train_embedding)
    tensors = load_file(path / WEIGHTS_NAME)
    draft_ids = ids_from_offsets(tensors["d2t"]) if "d2t" in tensors else torch.arange(config.vocab_size)
    drafter = build_drafter(config, draft_ids, TargetTensors(target.path), False, 0)
    drafter.load_exported(tensors)
    return drafter


def _write_files(output: Path, drafter: Drafter, target: Target) -> None:
    tensors = drafter.export_tensors(torch.bfloat16)
    if drafter.config.draft_vocab_size == drafter.config.vocab_size:
        tensors.pop("d2t", None)  # vLLM keeps no mapping then, and refuses a tensor that it has no place for
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(output / WEIGHTS_NAME) as temporary:
        save_file(contiguous, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # safetensors makes files private; a server may run as another user
    write_text_atomically(
        output / CONFIG_NAME, json.dumps(vllm_config(drafter.config, target), indent=2) + "\n"
    )


def _check_target(training: TrainingRecord, target: Target, settings: ExportSettings) -> None:
    if training.target_fingerprint != target.fingerprint:
        raise CheckpointError(
            f"{settings.training} was trained for target {training.target_fingerprint}",
            f"target {target.fingerprint} ({settings.target})",
            "give the target that it was trained for",
        )


def _finished_export(output: Path, training: TrainingRecord) -> DrafterRecord | None:
    """The record of an export that ended here, or None if there is none.

    Raises:
        CheckpointError: the directory holds another drafter.
    """
    if not (output / FILE_NAME).exists():
        return None
    provenance = read_provenance(output)
    if provenance.training.fingerprint != training.fingerprint:
        raise CheckpointError(
            f"{output} holds the drafter of another training ({provenance.training.fingerprint})",
            f"an empty directory, or the drafter of training {training.fingerprint}",
            "choose another `output`; a drafter is never overwritten",
        )
    whole = all((output / name).exists() for name in (CONFIG_NAME, WEIGHTS_NAME))
    if whole and digest_of_drafter(digests_of(output)) == provenance.drafter.digest:
        return provenance.drafter
    return None  # files are damaged: write them again


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if name != "rope_theta"}
