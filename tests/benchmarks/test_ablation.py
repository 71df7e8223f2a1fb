"""The ablation: what a variant changes, and once for real on a tiny target."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ablation import BASE, VARIANTS, Ablation, AblationSettings, Row, ablation, markdown, run, vary
from drafter.config import TrainSettings
from drafter.errors import DataError
from drafter.trainer import train
from tests.drafter.tiny import make_documents, make_target, training_settings, write_states


def test_a_variant_changes_one_thing(tmp_path: Path) -> None:
    base = training_settings(tmp_path, tmp_path, tmp_path / "training")
    changed = vary(base, {"drafter": {"num_layers": 1}})
    assert changed.drafter.num_layers == 1
    assert changed == base.model_copy(update={"drafter": base.drafter.model_copy(update={"num_layers": 1})})


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_another_training_that_can_be_set(tmp_path: Path, variant) -> None:
    base: TrainSettings = training_settings(tmp_path, tmp_path, tmp_path / "training", weight_decay=0.1)
    assert (vary(base, variant.changes(base)) == base) == (variant.name == BASE)


def test_unknown_variants_are_named() -> None:
    with pytest.raises(DataError, match="sorcery"):
        AblationSettings(variants=("one layer", "sorcery")).chosen()


def test_the_table_says_what_each_variant_brought() -> None:
    rows = (
        Row(name=BASE, acceptance_length=1.7, per_domain={"a": 1.7}, num_steps=100),
        Row(name="one layer", acceptance_length=1.62, per_domain={"a": 1.62}, num_steps=150),
    )
    result = Ablation(
        rows=rows,
        seconds=60,
        repeats=1,
        num_speculative_tokens=3,
        num_answers=24,
        states_digest="",
        machine="here",
    )
    lines = markdown(result).splitlines()
    assert lines[2] == f"| {BASE} | 1.70 | 1.70 |  | 100 |"
    assert lines[3] == "| one layer | 1.62 | 1.62 | -0.08 | 150 |"


def test_without_a_finished_run_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_HOME", str(tmp_path))
    with pytest.raises(DataError, match="make demo"):
        ablation(AblationSettings())


@pytest.mark.slow
def test_variants_are_trained_for_the_same_time_and_judged(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    states = write_states(tmp_path / "states", target, make_documents(target, 40))
    training = tmp_path / "training"
    train(training_settings(states, target, training))
    settings = AblationSettings(
        training=training,
        held_out=states,
        seconds=1.5,
        variants=("one layer", "every chain complete"),
        output=tmp_path / "ablation",
    )
    result = run(settings)
    assert [row.name for row in result.rows] == [BASE, "one layer", "every chain complete"]
    assert all(row.acceptance_length >= 1 and row.num_steps > 0 for row in result.rows)
    assert run(settings) == result, "what is finished is not trained again"
    assert (tmp_path / "ablation/table.md").read_text() == markdown(result)


def test_a_directory_that_no_training_wrote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        ablation(AblationSettings(training=tmp_path, held_out=tmp_path))


def test_a_training_without_a_time_limit_wants_seconds(tmp_path: Path) -> None:
    settings = training_settings(tmp_path, tmp_path, tmp_path / "training")
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    with pytest.raises(DataError, match="--seconds"):
        ablation(AblationSettings(training=tmp_path, held_out=tmp_path))
