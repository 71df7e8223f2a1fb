"""A target's directory: shape, fingerprint, the token of the placeholders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from drafter.errors import CheckpointError
from drafter.target import load_target


@pytest.fixture
def own_target(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def fingerprint(path: Path) -> str:
    load_target.cache_clear()
    return load_target(path).fingerprint


def test_a_copy_has_the_same_fingerprint(tiny_target: Path, own_target: Path) -> None:
    assert fingerprint(own_target) == fingerprint(tiny_target)


@pytest.mark.parametrize(
    "file", ["model.safetensors", "chat_template.jinja", "tokenizer.json", "config.json"]
)
def test_whatever_changes_an_answer_changes_the_fingerprint(own_target: Path, file: str) -> None:
    before = fingerprint(own_target)
    content = bytearray((own_target / file).read_bytes())
    content[-3] ^= 1
    (own_target / file).write_bytes(content)
    if file == "config.json":  # has to stay JSON
        (own_target / file).write_bytes(content[:-3] + b" \n}")
    assert fingerprint(own_target) != before


def test_fingerprint_needs_no_writable_directory(own_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_target / ".fledge-fingerprint.json").unlink(missing_ok=True)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert fingerprint(own_target)
    assert not (own_target / ".fledge-fingerprint.json").exists()


def test_placeholders_read_a_row_without_a_token_where_there_is_one(tiny_target: Path) -> None:
    target = load_target(tiny_target)
    assert target.mask_token_id == target.vocab_size - 1
    assert target.mask_token_id not in target.tokenizer_tokens


def test_placeholders_else_read_a_special_token_without_a_role(own_target: Path) -> None:
    change_json(own_target / "config.json", vocab_size=261)
    tokenizer = json.loads((own_target / "tokenizer.json").read_text())
    for token in ("<|spare|>", "<|used by the template|>"):
        tokenizer["added_tokens"].append(
            {
                **tokenizer["added_tokens"][0],
                "id": len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"]),
                "content": token,
            }
        )
    (own_target / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = own_target / "chat_template.jinja"
    template.write_text(template.read_text() + "{# <|used by the template|> #}")
    load_target.cache_clear()
    target = load_target(own_target)
    assert target.tokenizer_tokens[target.mask_token_id] == "<|spare|>"


def test_a_vocabulary_without_a_spare_token_is_refused(own_target: Path) -> None:
    change_json(own_target / "config.json", vocab_size=259)
    load_target.cache_clear()
    with pytest.raises(CheckpointError, match="all 259 token ids are in use"):
        _ = load_target(own_target).mask_token_id


@pytest.mark.parametrize(
    ("layers", "expected"), [(30, (2, 15, 27)), (8, (2, 4, 5)), (6, (2, 3, 5)), (3, (0, 1, 2))]
)
def test_auxiliary_layers_are_three_different_ones(
    own_target: Path, layers: int, expected: tuple[int, int, int]
) -> None:
    change_json(own_target / "config.json", num_hidden_layers=layers)
    load_target.cache_clear()
    assert load_target(own_target).default_auxiliary_layers == expected


def test_rope_parameters_of_both_generations_of_config_read_alike(own_target: Path) -> None:
    new = load_target(own_target).rope
    config = json.loads((own_target / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (own_target / "config.json").write_text(json.dumps(config))
    load_target.cache_clear()
    assert load_target(own_target).rope == new


def test_pickled_weights_are_not_taken_for_a_target(own_target: Path) -> None:
    (own_target / "model.safetensors").rename(own_target / "pytorch_model.bin")
    load_target.cache_clear()
    with pytest.raises(CheckpointError, match="safetensors"):
        _ = load_target(own_target).fingerprint


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_target(tmp_path / "nowhere")


@pytest.mark.parametrize("config", ["[]", '{"hidden_size": "big"}', '{"text_config": 3}', "\\x00"])
def test_a_configuration_that_is_no_models_is_refused(own_target: Path, config: str) -> None:
    (own_target / "config.json").write_text(config)
    load_target.cache_clear()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_target(own_target)


def test_a_file_is_not_taken_for_a_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_target(tmp_path / "file")
