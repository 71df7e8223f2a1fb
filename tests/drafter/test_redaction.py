"""Personal data that is found, and text that must stay as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafter.config import PrepareSettings, RedactionSettings
from drafter.conversations import load_conversations, prepare
from drafter.errors import FledgeError
from drafter.redaction import ALLOWED_VARIABLE, build_redactor

ALL = RedactionSettings(kinds=("email", "phone", "card", "ip_address"))


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("write to jo.doe+x@mail.example.org.", "write to [email address]."),
        ("<jo@example.com>,ann@example.de", "<[email address]>,[email address]"),
        ("postmaster@bücher.example", "[email address]"),
        ("4111-1111-1111-1111 or 378282246310005", "[card number] or [card number]"),
        ("(650) 253-0000, +44 20 7031 3000", "[phone number], [phone number]"),
        ("from 8.8.8.8 and 2606:4700:4700::1111", "from [IP address] and [IP address]"),
        ("card 4111111111111111, tel +1 650-253-0000", "card [card number], tel [phone number]"),
    ],
)
def test_personal_data_is_replaced_by_a_word_and_the_rest_stays(text: str, redacted: str) -> None:
    assert build_redactor(ALL)(text) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "@app.route('/x')\ndef f(): return a @ b.T",
        "x = A@B.T",
        "order 4111111111111112 has a wrong check digit",
        "2026-11-29 12:30:45, 3.14159265358979, 0x1234567890ab",
        "bind to 127.0.0.1:8080, not 192.168.0.1 or 999.1.1.1 or ::1",
        "range(1000000) and 1234567890",
        "C++ std::vector<int>, a::b::c",
    ],
)
def test_code_and_figures_are_left_alone(text: str) -> None:
    assert build_redactor(ALL)(text) == text


def test_numbers_without_country_code_are_those_of_the_named_countries() -> None:
    text = "030 901820"
    assert build_redactor(RedactionSettings(kinds=("phone",)))(text) == text
    german = RedactionSettings(kinds=("phone",), phone_regions=("US", "DE"))
    assert build_redactor(german)(text) == "[phone number]"


def test_only_what_is_named_is_redacted() -> None:
    text = "a@example.com 4111111111111111"
    assert build_redactor(RedactionSettings(kinds=("card",)))(text) == "a@example.com [card number]"
    assert build_redactor(RedactionSettings(kinds=()))(text) == text


def test_long_texts_without_a_match_take_no_time() -> None:
    import time

    text = "a" * 200_000 + " " + "1 " * 50_000 + "a:" * 50_000
    started_at = time.monotonic()
    build_redactor(RedactionSettings(kinds=("email", "card", "ip_address")))(text)
    assert time.monotonic() - started_at < 5


def test_an_own_redactor_must_be_allowed_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house_rules.py").write_text(
        "def hide(text):\n    return text.replace('Falcon', '[project]')\ndef bad(text):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = RedactionSettings(kinds=(), custom=("house_rules:hide",))
    with pytest.raises(FledgeError, match="not allowed"):
        build_redactor(settings)
    monkeypatch.setenv(ALLOWED_VARIABLE, "house_rules:hide, house_rules:bad, house_rules:gone")
    assert build_redactor(settings)("Falcon flies") == "[project] flies"
    with pytest.raises(FledgeError, match="returned NoneType"):
        build_redactor(RedactionSettings(custom=("house_rules:bad",)))("x")
    with pytest.raises(FledgeError, match="no attribute 'gone'"):
        build_redactor(RedactionSettings(custom=("house_rules:gone",)))


def test_ordinary_files_are_redacted_only_when_asked(tiny_target: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a@example.com"}, {"role": "assistant", "content": "ok"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")

    def first_turn(**fields: object) -> str:
        source = {"uri": str(tmp_path / "chat.jsonl"), **fields}
        values = {"sources": [source], "target": tiny_target, "output": tmp_path / "dataset"}
        prepare(PrepareSettings.model_validate({**values, "evaluation_share": 0.0}))
        return load_conversations(tmp_path / "dataset", "train")[0].messages[0].content

    assert first_turn() == "a@example.com"
    assert first_turn(redaction={}) == "[email address]"
