"""EAGLE-3 from the command line's settings to an exported drafter: what differs from P-EAGLE, and what must not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from drafter.config import (
    CandidateSettings,
    DrafterSettings,
    EstimateSettings,
    EvaluateSettings,
    ExportSettings,
    PreflightSettings,
    TrainSettings,
)
from drafter.drafting import draft_answers
from drafter.errors import CheckpointError, DataError
from drafter.estimate import estimate, walk_document
from drafter.evaluation import evaluate
from drafter.export import drafter_config_of, export, load_exported_drafter
from drafter.metrics import read_metrics
from drafter.preflight import preflight
from drafter.provenance import read_provenance
from drafter.records import DatasetRecord
from drafter.shards import Document
from drafter.target import load_target
from drafter.trainer import train
from drafter.training_directory import read_result, read_settings
from drafter.two_stream import StepOptions
from tests.drafter.tiny import training_settings, write_states


@pytest.fixture(scope="module")
def training(tiny_target: Path, tiny_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("eagle3") / "training"
    train(training_settings(tiny_states, tiny_target, output, algorithm="eagle3", num_epochs=15))
    return output


@pytest.fixture(scope="module")
def drafter_path(training: Path, tiny_target: Path) -> Path:
    output = training.parent / "drafter"
    export(ExportSettings(training=training, target=tiny_target, output=output))
    return output


def problems_of(drafter: Path, target: Path) -> tuple[str, ...]:
    return preflight(PreflightSettings(drafter=drafter, target=target))


def test_it_has_one_layer_and_refuses_more(tmp_path: Path) -> None:
    values = {"states": tmp_path, "target": tmp_path, "output": tmp_path, "algorithm": "eagle3"}
    for shape in ({}, {"draft_vocab_size": 64}, DrafterSettings(draft_vocab_size=64)):
        settings = TrainSettings.model_validate({**values, "drafter": shape})
        assert settings.drafter.num_layers == 1
        assert TrainSettings.model_validate(settings.model_dump()) == settings
    assert TrainSettings.model_validate(values).drafter.num_layers == 1
    with pytest.raises(ValidationError, match="EAGLE-3 has one layer, not 2"):
        TrainSettings.model_validate({**values, "drafter": {"num_layers": 2}})


def test_the_loss_falls_at_every_depth(training: Path) -> None:
    steps = list(read_metrics(training / "metrics.jsonl"))
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert len(steps[0].accuracy) == 4
    accuracy = torch.tensor([step.accuracy for step in steps])
    assert bool((accuracy[-30:].mean(0) > accuracy[:30].mean(0)).all())
    assert read_settings(training)["algorithm"] == "eagle3"


def test_the_export_has_no_placeholders_and_shares_the_targets_embedding(
    drafter_path: Path, tiny_target: Path
) -> None:
    config = json.loads((drafter_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert not {"mask_token_id", "ptd_token_id", "pard_token"} & set(config)
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "use_aux_hidden_state": True,
    }
    tensors = set(load_file(drafter_path / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "layers.0.hidden_norm.weight"} < tensors
    assert not {"mask_hidden", "mask_embedding", "embed_tokens.weight"} & tensors
    assert not any(name.startswith("layers.1.") for name in tensors)
    assert read_provenance(drafter_path).algorithm == "eagle3"
    assert problems_of(drafter_path, tiny_target) == ()


def test_a_trained_embedding_is_exported_and_passes(
    tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    shape = {"draft_vocab_size": 999, "train_embedding": True}
    train(
        training_settings(
            tiny_states, tiny_target, tmp_path / "t", algorithm="eagle3", drafter=shape, num_epochs=0.1
        )
    )
    export(ExportSettings(training=tmp_path / "t", target=tiny_target, output=tmp_path / "d"))
    exported = load_file(tmp_path / "d" / "model.safetensors")
    trained = read_result(tmp_path / "t")[1]["embed_tokens.weight"]
    assert torch.equal(exported["embed_tokens.weight"], trained.to(torch.bfloat16))
    assert problems_of(tmp_path / "d", tiny_target) == ()


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
def test_the_estimate_reads_the_embedding_that_a_server_would(
    tiny_states: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    shape = {"draft_vocab_size": 200, "train_embedding": True}
    settings = training_settings(
        tiny_states, tiny_target, tmp_path / "t", algorithm=algorithm, drafter=shape, num_epochs=0.2
    )
    train(settings)
    export(ExportSettings(training=tmp_path / "t", target=tiny_target, output=tmp_path / "d"))
    seen = []
    monkeypatch.setattr("drafter.estimate.walk_document", lambda drafter, *rest: seen.append(drafter) or [])
    with pytest.raises(DataError):
        estimate(EstimateSettings(drafter=tmp_path / "d", states=tiny_states, target=tiny_target))
    exported = load_file(tmp_path / "d" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(seen[0].embed_tokens.weight[:263].to(torch.bfloat16), exported[:263])


def test_an_export_reads_back_as_the_drafter_it_was(
    training: Path, drafter_path: Path, tiny_target: Path
) -> None:
    config, weights = read_result(training)
    assert drafter_config_of(json.loads((drafter_path / "config.json").read_text())) == config
    loaded = load_exported_drafter(drafter_path, load_target(tiny_target)).trained_state()
    assert set(loaded) == set(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor.to(torch.bfloat16).to(tensor.dtype), msg=name)


def test_preflight_holds_each_algorithm_to_its_own_tensors(
    drafter_path: Path, tiny_drafter: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """A P-EAGLE head whose shared state is lost does not pass for EAGLE-3, nor the other way round."""
    shutil.copytree(tiny_drafter, tmp_path / "lost")
    tensors = load_file(tiny_drafter / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, tmp_path / "lost" / "model.safetensors")
    assert any(
        "mask_hidden [1, 1, 192] is missing" in one for one in problems_of(tmp_path / "lost", tiny_target)
    )
    shutil.copytree(drafter_path, tmp_path / "masked")
    config = json.loads((drafter_path / "config.json").read_text())
    (tmp_path / "masked" / "config.json").write_text(json.dumps({**config, "mask_token_id": 263}))
    assert any("which has no placeholders" in one for one in problems_of(tmp_path / "masked", tiny_target))


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 6])
def test_walking_equals_decoding_step_by_step(
    drafter_path: Path, tiny_target: Path, tiny_documents: list[Document], num_speculative_tokens: int
) -> None:
    """At each step only what a server knows then: the tokens so far and the states of all but the newest."""
    drafter = load_exported_drafter(drafter_path, load_target(tiny_target))
    for document in tiny_documents[:4]:
        ids = document.input_ids
        known = 10  # nine tokens of prompt, and the answer's first from the prefill
        expected = []
        while known < len(ids):
            guessed = draft_answers(
                drafter,
                ids[:known],
                document.auxiliary[:known],
                torch.tensor([known - 2]),
                num_speculative_tokens,
                StepOptions(dtype=torch.bfloat16),
            )[0].tolist()
            run = 0
            while run < len(guessed) and known + run < len(ids) and guessed[run] == ids[known + run]:
                run += 1
            expected.append(run)
            known += run + 1
        (walk,) = walk_document(drafter, document, num_speculative_tokens, None)
        assert walk.accepted.tolist() == expected


def test_the_estimate_takes_it_as_any_drafter(
    drafter_path: Path, tiny_states: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = EstimateSettings(
        drafter=drafter_path, states=tiny_states, target=tiny_target, num_speculative_tokens=6
    )
    assert 1.0 < estimate(settings).acceptance_length <= 7.0
    assert "was trained for 4" in capsys.readouterr().err


def test_a_warm_start_continues_and_refuses_the_other_algorithm(
    drafter_path: Path, training: Path, tiny_states: Path, tiny_target: Path, tmp_path: Path
) -> None:
    def warm(**changes: object) -> TrainSettings:
        return training_settings(
            tiny_states, tiny_target, tmp_path / "out", warm_start=drafter_path, num_epochs=1, **changes
        )

    with pytest.raises(CheckpointError, match="algorithm is eagle3"):
        train(warm(drafter={"draft_vocab_size": 200, "num_layers": 1}))
    train(warm(algorithm="eagle3"))
    first = next(read_metrics(tmp_path / "out" / "metrics.jsonl")).loss
    assert first < 0.8 * next(read_metrics(training / "metrics.jsonl")).loss


@pytest.mark.parametrize(("trained", "asked"), [("eagle3", "peagle"), ("peagle", "eagle3")])
def test_an_evaluation_refuses_to_serve_a_drafter_the_other_way(
    drafter_path: Path, tiny_drafter: Path, tiny_target: Path, tmp_path: Path, trained: str, asked: str
) -> None:
    DatasetRecord(
        digest="dataset",
        path=str(tmp_path),
        num_train=1,
        num_evaluation=1,
        num_duplicates=0,
        num_problems=0,
        num_truncated=0,
        num_per_domain={"code": {"train": 1, "evaluation": 1}},
        train_domains=("code",),
    ).save(tmp_path / "dataset.json")
    path = drafter_path if trained == "eagle3" else tiny_drafter
    settings = EvaluateSettings(
        dataset=tmp_path,
        target=tiny_target,
        output=tmp_path / "out",
        candidates=(CandidateSettings(name="one", path=path, speculation=asked),),
    )
    with pytest.raises(CheckpointError, match=f"set the candidate's speculation to {trained}"):
        evaluate(settings)


def test_states_with_any_token_train_it(
    tiny_target: Path, tiny_documents: list[Document], tmp_path: Path
) -> None:
    """No token is set aside for placeholders, so none is refused."""
    ids = tiny_documents[3].input_ids.clone()
    ids[4] = load_target(tiny_target).mask_token_id
    documents = [dataclasses.replace(tiny_documents[3], input_ids=ids), *tiny_documents[4:]]
    states = write_states(tmp_path / "states", tiny_target, documents)
    record = train(
        training_settings(states, tiny_target, tmp_path / "out", algorithm="eagle3", num_epochs=0.1)
    )
    assert record.num_steps > 0
