"""Great Expectations on profiles: each check both ways, and broken told from failed."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from drafter.errors import DataError
from tasks.retrain_settings import ValidationChoices
from tasks.validate_data import ValidationRecord, validate_profile

WINDOW = 100


def good_profile() -> pandas.DataFrame:
    """Four conversations as `prepare` profiles them: three to train on, one held out."""
    rows = [
        {
            "id": f"id{index}",
            "domain": "support",
            "split": "evaluation" if index == 3 else "train",
            "source": f"chats.jsonl:{index + 1}",
            "problem": None,
            "num_turns": 2,
            "first_role": "user",
            "last_role": "assistant",
            "roles": "user,assistant",
            "num_empty_turns": 0,
            "num_undecodable": 0,
            "num_tokens": 40 + index,
            "num_supervised_tokens": 20,
            "supervised_share": 0.5,
            "is_duplicate": False,
            "prompt_digest": f"prompt{index}",
            "fits_window": True,
        }
        for index in range(4)
    ]
    return pandas.DataFrame(rows)


def validated(
    frame: pandas.DataFrame, tmp_path: Path, choices: ValidationChoices | None = None
) -> ValidationRecord:
    return validate_profile(frame, choices or ValidationChoices(), WINDOW, tmp_path / "validation")


def changed(row: int, **values: object) -> pandas.DataFrame:
    frame = good_profile()
    for name, value in values.items():
        frame[name] = frame[name].astype(object)
        frame.loc[row, name] = value
    return frame


BAD = {
    "conversations are well formed": changed(0, problem="two user turns in a row"),
    "roles take turns": changed(0, roles="user,user,assistant"),
    "user or system begins": changed(0, first_role="assistant"),
    "no turn is empty": changed(0, num_empty_turns=1),
    "characters decode": changed(0, num_undecodable=2),
    "conversations fit the window": changed(0, num_tokens=WINDOW + 1),
    "the median conversation fits the window": good_profile().assign(num_tokens=3 * WINDOW),
    "answers make up enough of the tokens": good_profile().assign(supervised_share=0.01),
    "few conversations are duplicates": good_profile().assign(is_duplicate=[True, True, False, False]),
    "ids are unique": changed(1, id="id0"),
    "no prompt is on both sides": changed(3, prompt_digest="prompt0"),
    "enough conversations for train": good_profile().assign(split="evaluation"),
    "enough conversations for evaluation": good_profile().assign(split="train"),
}


def test_good_conversations_pass_every_check(tmp_path: Path) -> None:
    record = validated(good_profile(), tmp_path)

    assert record.outcome == "passed"
    assert {finding.check for finding in record.findings} == {*BAD, "profile is complete"}
    record.raise_if_stopped()


@pytest.mark.parametrize("check", BAD)
def test_each_check_fails_on_what_it_is_for(check: str, tmp_path: Path) -> None:
    record = validated(BAD[check], tmp_path)

    found = {finding.check: finding for finding in record.problems}
    assert found[check].outcome == "failed"


def test_a_missing_column_is_a_check_that_could_not_be_made(tmp_path: Path) -> None:
    record = validated(good_profile().drop(columns="num_undecodable"), tmp_path)

    outcomes = {finding.check: finding.outcome for finding in record.problems}
    assert outcomes == {"profile is complete": "failed", "characters decode": "errored"}
    assert "num_undecodable" in next(f.detail for f in record.problems if f.outcome == "errored")


def test_an_errored_check_of_severity_stop_stops(tmp_path: Path) -> None:
    record = validated(good_profile().drop(columns="num_empty_turns"), tmp_path)

    with pytest.raises(DataError, match="no turn is empty: could not be checked"):
        record.raise_if_stopped()


def test_severity_decides_between_stop_and_warn(tmp_path: Path) -> None:
    frame = changed(0, num_undecodable=2)

    warned = validated(frame, tmp_path)
    stopped = validated(frame, tmp_path, ValidationChoices(on_undecodable="stop"))

    assert warned.outcome == "warned"
    warned.raise_if_stopped()
    with pytest.raises(DataError, match=r"characters decode: 1 of 4 not as expected, e.g. chats.jsonl:1 \(2"):
        stopped.raise_if_stopped()


def test_a_tolerated_share_of_malformed_conversations_passes(tmp_path: Path) -> None:
    frame = changed(0, problem="unknown role", roles=None, num_tokens=None, supervised_share=None)

    assert validated(frame, tmp_path).outcome == "stopped"
    assert validated(frame, tmp_path, ValidationChoices(max_malformed_share=0.3)).outcome == "passed"


def test_prompts_without_answers_have_no_share_to_check(tmp_path: Path) -> None:
    frame = good_profile().assign(roles="user", last_role="user", supervised_share=0.0)

    assert validated(frame, tmp_path).outcome == "passed"


def test_a_dropped_duplicate_does_not_leak(tmp_path: Path) -> None:
    frame = changed(3, prompt_digest="prompt0")
    frame.loc[0, "is_duplicate"] = True

    assert "no prompt is on both sides" not in {f.check for f in validated(frame, tmp_path).problems}


def test_the_page_is_of_this_validation_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    validated(good_profile(), tmp_path)
    record = validated(changed(0, num_empty_turns=1), tmp_path)

    page = Path(record.page).read_text(encoding="utf-8")
    assert "num_empty_turns" in page
    assert "Failed" in page
    for attribute in ('src="http', "src='http"):
        assert attribute not in page
    assert "stylesheet" not in page
