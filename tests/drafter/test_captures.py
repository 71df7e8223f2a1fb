"""Production traffic that SageMaker captured, as conversations to learn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafter.captures import PROBE_PREFIX, longest_only, open_capture
from drafter.config import PrepareSettings
from drafter.conversations import load_conversations, prepare
from drafter.errors import DataError
from drafter.records import DatasetRecord
from tests.drafter.captured_lines import captured, chat_request, streamed_answer, whole_answer


def contents(line: dict[str, Any]) -> list[str]:
    return [message["content"] for message in open_capture(line).messages]


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
@pytest.mark.parametrize("answer", [whole_answer("grün 🐦"), streamed_answer("gr", "ün ", "🐦")])
def test_an_answer_is_read_plain_or_streamed_as_text_or_base64(encoding: str, answer: str) -> None:
    assert contents(captured(chat_request("colour?"), answer, encoding)) == ["colour?", "grün 🐦"]


def test_a_request_of_many_turns_is_one_conversation() -> None:
    line = captured(chat_request("a", "b", "c", system="be brief"), whole_answer("d"))
    assert contents(line) == ["be brief", "a", "b", "c", "d"]


def test_of_several_choices_the_first_is_taken() -> None:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}}
        for index, text in ((1, "second"), (0, "first"))
    ]
    line = captured(chat_request("q"), json.dumps({"choices": choices}))
    assert contents(line) == ["q", "first"]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        whole_answer(None, reasoning="only thought"),
        streamed_answer("half an ans", ends=False),
        streamed_answer("half an ans", ends=False)[:-20],
    ],
    ids=["not captured", "empty", "client left", "cut in an event"],
)
def test_a_prompt_is_kept_without_an_answer_that_broke_off(answer: str | None) -> None:
    assert contents(captured(chat_request("q"), answer)) == ["q"]


def test_newer_names_of_the_system_role_are_read() -> None:
    request = {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}]}
    assert [m["role"] for m in open_capture(captured(request, None)).messages] == ["system", "user"]


TOOL_CALL = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (captured(chat_request("q"), json.dumps({"error": {"message": "too long"}})), "failed requests"),
        (captured(chat_request("q"), 'data: {"error": {"message": "engine"}}\n\n'), "failed requests"),
        (captured(chat_request("q"), "Internal Server Error"), "failed requests"),
        (captured({"prompt": "def f"}, "{}"), "requests that are no chat"),
        (captured(None, whole_answer("a")), "answers without their request"),
        (captured(chat_request("q"), whole_answer(None, tool_calls=TOOL_CALL)), "chats that call tools"),
        (captured({"messages": [{"role": "tool", "content": "4"}]}, None), "chats that call tools"),
        (captured({"messages": [{"role": "user", "content": IMAGE}]}, None), "chats with images"),
        (captured(chat_request("q", "half"), whole_answer("rest")), "requests to continue an answer"),
        (captured(chat_request("q"), whole_answer("a"), inference_id=f"{PROBE_PREFIX}-1"), "own probes"),
    ],
)
def test_what_is_no_conversation_is_left_out_with_its_kind(line: dict[str, Any], reason: str) -> None:
    capture = open_capture(line)
    assert reason in str(capture.left_out)
    assert capture.problem is None


def damaged(side: str, **changes: Any) -> dict[str, Any]:
    line = captured(chat_request("q"), whole_answer("a"))
    line["captureData"][side].update(changes)
    return line


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"captureData": "?"}, "captureData is no object"),
        (damaged("endpointInput", data=None), "endpointInput has no data"),
        (damaged("endpointInput", data="{cut"), "endpointInput is broken JSON"),
        (damaged("endpointOutput", data="{cut"), "endpointOutput is broken JSON"),
        (damaged("endpointInput", encoding="BASE64"), "endpointInput is not base64 of text"),
        (damaged("endpointOutput", data="data: {x\n\ndata: [DONE]\n\n"), "event 1 of the streamed answer"),
    ],
)
def test_a_damaged_line_is_a_problem_in_words(line: dict[str, Any], problem: str) -> None:
    assert problem in str(open_capture(line).problem)


def test_of_a_growing_conversation_the_longest_is_kept() -> None:
    first = [("user", "hi"), ("assistant", "hello ")]
    whole = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "so long")]
    other_answer = [("user", "hi"), ("assistant", "good day")]
    asked_only = [("user", "hi")]
    assert list(longest_only([first, whole, other_answer, asked_only, whole])) == [1, 2, 4]


def test_turns_are_not_mixed_up_with_parts_of_turns() -> None:
    one = [("user", "ab"), ("assistant", "c")]
    another = [("user", "a"), ("assistant", "bc"), ("user", "d")]
    assert list(longest_only([one, another])) == [0, 1]


@pytest.fixture
def prepare_captures(tiny_target: Path, tmp_path: Path) -> Any:
    """Write lines into the folders that an endpoint writes, and prepare them with the source's other fields."""

    def run(*files: list[dict[str, Any]], on_problem: str = "stop", **fields: Any) -> DatasetRecord:
        for hour, lines in enumerate(files):
            path = tmp_path / f"captures/fledge/AllTraffic/2026/05/04/{hour:02d}/00-00-000-a.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return prepare(
            PrepareSettings.model_validate(
                {
                    "sources": [{"uri": str(tmp_path / "captures"), "domain": "production", **fields}],
                    "target": tiny_target,
                    "output": tmp_path / "dataset",
                    "evaluation_share": 0.0,
                    "max_length_tokens": 512,
                    "on_problem": on_problem,
                }
            )
        )

    return run


def test_captures_become_a_dataset_of_whole_conversations_without_personal_data(
    prepare_captures: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mail = "I am bird@nest.example, card 4111 1111 1111 1111"
    first_hour = [
        captured(chat_request("hi"), streamed_answer("hel", "lo"), "BASE64", inference_id="i-1"),
        captured(chat_request(mail), whole_answer("call +49 30 901820"), inference_id="i-2"),
        captured(chat_request("q"), json.dumps({"error": {}}), inference_id="i-3"),
        captured(chat_request("probe"), whole_answer("pong"), inference_id=f"{PROBE_PREFIX}-9"),
    ]
    second_hour = [captured(chat_request("hi", "hello", "and now?"), whole_answer("fly"), inference_id="i-4")]

    record = prepare_captures(first_hour, second_hour)

    read = load_conversations(tmp_path / "dataset", "train")
    assert {tuple(m.content for m in c.messages) for c in read} == {
        ("hi", "hello", "and now?", "fly"),
        ("I am [email address], card [card number]", "call [phone number]"),
    }
    assert record.num_train == 2
    assert record.num_per_domain == {"production": {"train": 2, "evaluation": 0}}
    assert any("line 1 (inference i-4 at 2026-05-04T03:02:01Z)" in c.source for c in read)
    said = capsys.readouterr().err
    assert "2 conversations of 5 captured requests" in said
    assert "1 failed requests" in said
    assert "1 Fledge's own probes" in said
    assert "1 earlier requests of the same conversations" in said
    written = "".join(
        path.read_bytes().decode("latin1") for path in (tmp_path / "dataset").iterdir() if path.is_file()
    )
    assert "nest.example" not in written


def test_a_damaged_capture_stops_or_is_dropped_and_counted(prepare_captures: Any, tmp_path: Path) -> None:
    lines = [captured(chat_request("q"), whole_answer("a")), damaged("endpointInput", data="{cut")]
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 .*endpointInput is broken JSON"):
        prepare_captures(lines)
    record = prepare_captures(lines, on_problem="drop")
    assert (record.num_train, record.num_problems) == (1, 1)


def test_redaction_can_be_turned_off_for_captures(prepare_captures: Any, tmp_path: Path) -> None:
    prepare_captures([captured(chat_request("a@b.com"), whole_answer("x"))], redaction={"kinds": []})
    (conversation,) = load_conversations(tmp_path / "dataset", "train")
    assert conversation.messages[0].content == "a@b.com"
