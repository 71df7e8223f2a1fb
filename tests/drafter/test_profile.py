"""The profile that Great Expectations judges: one row per conversation that was read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafter.config import PrepareSettings
from drafter.conversation_files import RawConversation
from drafter.conversations import prepare
from drafter.profile import find_problem, prompt_digest


def test_rows_hold_what_was_read_and_what_became_of_it(tiny_target: Path, tmp_path: Path) -> None:
    import pandas

    lines = [
        [("system", "s"), ("user", "q"), ("assistant", "abc")],
        [("user", "q")],
        [("user", "q")],
        [("user", "q"), ("bot man", "\ufffd"), ("user", " ")],
        [("user", "q"), ("assistant", "a" * 500)],
    ]
    values = [{"messages": [{"role": r, "content": c} for r, c in line]} for line in lines]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n{\n")
    prepare(
        PrepareSettings(
            sources=({"uri": str(path), "domain": "code"},),
            target=tiny_target,
            output=tmp_path / "dataset",
            evaluation_share=0.0,
            max_length_tokens=100,
            on_problem="drop",
        )
    )
    profile = pandas.read_parquet(tmp_path / "dataset" / "profile.parquet")
    assert len(profile) == 6
    assert profile["domain"].eq("code").all()
    assert profile["split"].fillna("").tolist() == ["train", "train", "", "", "train", ""]
    assert profile["is_duplicate"].tolist() == [False, False, True, False, False, False]
    assert profile["roles"].tolist()[:4] == ["system user assistant", "user", "user", "user bot_man user"]
    assert profile["problem"].fillna("").tolist()[3].startswith('unknown role "bot man"')
    assert "broken JSON" in profile["problem"][5]
    assert profile["num_empty_turns"].tolist() == [0, 0, 0, 1, 0, 0]
    assert profile["num_undecodable"].tolist() == [0, 0, 0, 1, 0, 0]
    # abc and the end of the turn, in a byte-level tokenizer
    assert profile["num_supervised_tokens"][0] == 4
    assert profile["supervised_share"][0] == pytest.approx(4 / profile["num_tokens"][0])
    assert profile["fits_window"].tolist()[:3] == [True, True, True]
    assert profile["fits_window"][4] is False
    assert profile["num_tokens"][4] > 500, "length is that before truncation"
    assert profile["num_tokens"].isna().tolist() == [False, False, False, True, False, True]


@pytest.mark.parametrize("roles", ["user", "user assistant", "system user", "system user assistant user"])
def test_orders_that_make_sense_have_no_problem(roles: str) -> None:
    assert find_problem(RawConversation("x", tuple((role, "text") for role in roles.split()))) is None


def test_prompt_digest_levels_case_space_and_unicode_but_not_words() -> None:
    assert prompt_digest([("user", "Caf\u00e9  au\nlait")]) == prompt_digest(
        [("user", "cafe\u0301 au lait ")]
    )
    assert prompt_digest([("user", "a b")]) != prompt_digest([("user", "ab")])
    assert prompt_digest([("system", "s"), ("user", "q")]) != prompt_digest([("user", "q")])
    assert prompt_digest([("user", "q"), ("assistant", "x")]) == prompt_digest(
        [("user", "q"), ("assistant", "y")]
    )
