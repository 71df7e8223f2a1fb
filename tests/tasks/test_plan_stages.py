"""Directories named by what they will hold: the same work is found again, other work never mixed up with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from drafter.config import SourceSettings
from drafter.errors import DataError
from drafter.records import DatasetRecord, DrafterRecord
from tasks.find_sources import fingerprint_source
from tasks.plan_stages import RetrainPlan
from tasks.retrain_settings import RetrainSettings
from tasks.settings import Places

DATASET = DatasetRecord(
    digest="dataset0",
    path="/somewhere/dataset",
    num_train=1,
    num_evaluation=1,
    num_duplicates=0,
    num_problems=0,
    num_withheld=0,
    num_truncated=0,
    num_per_domain={},
    train_domains=("code",),
)
DRAFTER = DrafterRecord(path="/somewhere/drafter", digest="d0", num_parameters=1, target_fingerprint="t")


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A run's values: one source, and a target of a few numbers."""
    target = tmp_path / "target"
    target.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    (target / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": numpy.zeros(8)}, target / "model.safetensors")
    source = tmp_path / "chats.jsonl"
    source.write_text('{"messages": []}\n')
    return {"sources": [SourceSettings(uri=str(source), domain="code")], "target": target}


def plan(values: dict[str, Any], tmp_path: Path, attempt: str = "first", **changes: Any) -> RetrainPlan:
    return RetrainPlan(RetrainSettings(**{**values, **changes}), Places(home=tmp_path / "home"), attempt)


def test_the_same_values_plan_the_same_directories(values: dict[str, Any], tmp_path: Path) -> None:
    one, two = plan(values, tmp_path), plan(values, tmp_path)

    assert one.prepare() == two.prepare()
    assert one.extract(DATASET, "train") == two.extract(DATASET, "train")
    assert one.fingerprint(DATASET) == two.fingerprint(DATASET)


def test_changed_content_under_the_same_name_is_another_dataset(
    values: dict[str, Any], tmp_path: Path
) -> None:
    before = plan(values, tmp_path).prepare().output
    Path(values["sources"][0].uri).write_text('{"messages": [{}]}\n')

    assert plan(values, tmp_path).prepare().output != before


def test_the_two_sides_have_states_of_their_own(values: dict[str, Any], tmp_path: Path) -> None:
    one = plan(values, tmp_path)

    assert one.extract(DATASET, "train").output != one.extract(DATASET, "evaluation").output


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"num_epochs": 1}},
        {"drafter": {"num_layers": 1}},
        {"states": {"temperature": 0.7}},
        {"seed": 1},
        {"warm_start": False},
    ],
    ids=str,
)
def test_what_changes_the_weights_changes_the_fingerprint(
    change: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    assert plan(values, tmp_path, **change).fingerprint(DATASET) != plan(values, tmp_path).fingerprint(
        DATASET
    )


@pytest.mark.parametrize(
    "change",
    [
        {"evaluation": {"num_speculative_tokens": [2]}},
        {"gate": {"min_acceptance_length": 3}},
        {"validation": {"on_length": "stop"}},
        {"states": {"concurrency": 1}},
        {"training": {"checkpoint_interval_s": 1}},
        {"server": {"kv_cache_gb": 2}},
    ],
    ids=str,
)
def test_what_does_not_change_the_weights_does_not(
    change: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    assert plan(values, tmp_path, **change).fingerprint(DATASET) == plan(values, tmp_path).fingerprint(
        DATASET
    )


def test_other_drafters_or_other_measurements_are_other_evaluations(
    values: dict[str, Any], tmp_path: Path
) -> None:
    champion = DRAFTER.model_copy(update={"digest": "d1"})
    one = plan(values, tmp_path)
    outputs = {
        one.evaluate(DATASET, DRAFTER, None).output,
        one.evaluate(DATASET, DRAFTER, champion).output,
        one.evaluate(DATASET, champion, None).output,
        plan(values, tmp_path, evaluation={"concurrency": [1, 2]}).evaluate(DATASET, DRAFTER, None).output,
    }

    assert len(outputs) == 4
    moved = DRAFTER.model_copy(update={"path": "/elsewhere"})
    assert one.evaluate(DATASET, moved, None).output in outputs


def test_the_window_is_the_smaller_of_setting_and_target(values: dict[str, Any], tmp_path: Path) -> None:
    assert plan(values, tmp_path).window_tokens() == 512
    assert plan(values, tmp_path, max_length_tokens=64).window_tokens() == 64


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing there"):
        fingerprint_source(str(tmp_path / "none.jsonl"))
