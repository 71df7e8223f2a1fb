"""Preparing a dataset: what is read, what is refused, what is held out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafter.config import PrepareSettings
from drafter.conversation_files import list_files
from drafter.conversations import load_conversations, prepare
from drafter.errors import DataError
from drafter.records import DatasetRecord

ROLES = ("user", "assistant")


def openai(*contents: str, system: str | None = None, **fields: Any) -> dict[str, Any]:
    turns = [{"role": ROLES[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + turns, **fields}


def sharegpt(*contents: str) -> dict[str, Any]:
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": c} for i, c in enumerate(contents)]}


def write_lines(path: Path, values: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture
def prepared(tiny_target: Path, tmp_path: Path) -> Any:
    """Prepare sources (path or (path, fields)) into tmp_path/dataset."""

    def run(*sources: Path | tuple[Path, dict[str, Any]], **changes: Any) -> DatasetRecord:
        described = [s if isinstance(s, tuple) else (s, {}) for s in sources]
        return prepare(
            PrepareSettings(
                sources=tuple({"uri": str(path), **fields} for path, fields in described),
                target=tiny_target,
                output=tmp_path / "dataset",
                **{"evaluation_share": 0.0, "max_length_tokens": 256, **changes},
            )
        )

    return run


def texts(directory: Path, split: str = "train") -> set[tuple[str, ...]]:
    return {tuple(m.content for m in c.messages) for c in load_conversations(directory, split)}


def test_every_shape_of_file_gives_the_same_conversations(prepared: Any, tmp_path: Path) -> None:
    conversation = openai("q", "a")
    parts = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    shapes = [
        write_lines(tmp_path / "lines.jsonl", [conversation]),
        write_lines(tmp_path / "sharegpt.jsonl", [sharegpt("q", "a")]),
        write_lines(tmp_path / "lines.json", [conversation]),
        write_lines(tmp_path / "parts.jsonl", [{"messages": [parts, conversation["messages"][1]]}]),
    ]
    (tmp_path / "array.json").write_text(json.dumps([conversation], indent=1))
    pq.write_table(pa.Table.from_pylist([conversation]), tmp_path / "table.parquet")
    digests = set()
    for path in (*shapes, tmp_path / "array.json", tmp_path / "table.parquet"):
        digests.add(prepared(path).digest)
        assert texts(tmp_path / "dataset") == {("q", "a")}
    assert len(digests) == 1


def test_folder_is_read_whole_and_other_files_are_left_alone(prepared: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "a.jsonl", [openai("q", "a")])
    write_lines(tmp_path / "data" / "deeper" / "b.jsonl", [openai("r", "b")])
    (tmp_path / "data" / "README.md").write_text("notes")
    assert prepared(tmp_path / "data").num_train == 2


def test_uri_of_another_file_system_is_read(prepared: Any, tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://bucket/chat/a.jsonl", "w") as file:
        file.write(json.dumps(openai("q", "a")) + "\n")
    record = prepared((Path("x"), {"uri": "memory://bucket/chat"}))
    assert record.num_train == 1
    (conversation,) = load_conversations(tmp_path / "dataset", "train")
    assert "memory://" in conversation.source
    assert conversation.source.endswith("a.jsonl, line 1")


def test_s3_is_read_where_the_environment_says_it_is(
    prepared: Any, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket="conversations")
    body = (json.dumps(openai("q", "a")) + "\n").encode()
    client.put_object(Bucket="conversations", Key="chat/a.jsonl", Body=body)
    assert prepared((Path("x"), {"uri": "s3://conversations/chat"})).num_train == 1
    with pytest.raises(DataError, match=r"conversations/b\.jsonl does not exist"):
        prepared((Path("x"), {"uri": "s3://conversations/b.jsonl"}))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (openai("q", "a") | {"messages": [{"role": "bot", "content": "q"}]}, 'unknown role "bot"'),
        ({"messages": [{"role": "user", "content": "q"}] * 2}, "turns 1 and 2 are both the user's"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the assistant speaks first"),
        (openai("q", " \n"), r"turn 2 \(assistant\) is empty"),
        (openai("q", None), r"turn 2 \(assistant\) is empty"),  # type: ignore[arg-type]
        (openai("q", "caf\ufffd"), "1 characters that did not decode"),
        (openai("q", "\ud83d"), "surrogate"),
        ({"messages": []}, "no turn at all"),
        ({"messages": [{"role": "system", "content": "s"}]}, "a system turn and nothing else"),
        (
            {"messages": [*openai("q", "a")["messages"], {"role": "system", "content": "s"}]},
            "turn 3 is a system turn",
        ),
        ({"prompt": "q"}, r"fields \['prompt'\]"),
        (["q"], "list instead of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "turn 1 is not text"),
        (openai("q" * 300, "a"), "no token of an answer is left after truncation to 256"),
        (openai("q" * 300), "the prompt alone is longer than 256 tokens"),
    ],
)
def test_malformed_conversation_is_refused_with_its_line_or_dropped_and_counted(
    prepared: Any, tmp_path: Path, value: Any, problem: str
) -> None:
    import pandas

    path = write_lines(tmp_path / "chat.jsonl", [openai("fine", "yes"), value])
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2: .*{problem}"):
        prepared(path)
    assert not (tmp_path / "dataset" / "dataset.json").exists()
    record = prepared(path, on_problem="drop")
    assert (record.num_train, record.num_problems) == (1, 1)
    profile = pandas.read_parquet(tmp_path / "dataset" / "profile.parquet")
    assert profile["problem"].notna().tolist() == [False, True]
    assert profile["source"][1].endswith("chat.jsonl, line 2")


@pytest.mark.parametrize(
    ("line", "problem"),
    [(b'{"messages": [', "broken JSON"), (b'{"messages": "caf\xe9"}', "not UTF-8 at column 18")],
)
def test_broken_line_is_named_by_its_number(prepared: Any, tmp_path: Path, line: bytes, problem: str) -> None:
    path = write_lines(tmp_path / "chat.jsonl", [openai("q", "a")])
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"line 3: .*{problem}"):
        prepared(path)
    assert prepared(path, on_problem="drop").num_problems == 1


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.json", "[]")])
def test_empty_file_is_refused_even_when_problems_are_dropped(
    prepared: Any, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"is empty|is an empty array"):
        prepared(tmp_path / name, on_problem="drop")


def test_file_that_is_no_parquet_is_refused(prepared: Any, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match="not readable as Parquet"):
        prepared(tmp_path / "a.parquet")


@pytest.mark.parametrize("uri", ["nowhere.jsonl", "nowhere://bucket/a.jsonl", "notes.txt"])
def test_place_that_cannot_be_read_is_named(prepared: Any, tmp_path: Path, uri: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    full = uri if "://" in uri else str(tmp_path / uri)
    with pytest.raises(DataError, match=uri):
        prepared((Path("x"), {"uri": full}))


def test_explicit_id_with_other_content_is_refused_and_with_the_same_is_a_duplicate(
    prepared: Any, tmp_path: Path
) -> None:
    same = write_lines(tmp_path / "same.jsonl", [openai("q", "a", id="7"), openai("q", "a", id="7")])
    record = prepared(same)
    assert (record.num_train, record.num_duplicates) == (1, 1)
    other = write_lines(tmp_path / "other.jsonl", [openai("q", "a", id="7"), openai("q", "b", id="7")])
    with pytest.raises(DataError, match='line 2: id "7" was used before'):
        prepared(other)


def test_exact_duplicates_are_dropped_across_files_and_counted(prepared: Any, tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a.jsonl", [openai("q", "a"), openai("q", "b")])
    two = write_lines(tmp_path / "b.jsonl", [sharegpt("q", "a"), openai("r", "a")])
    record = prepared(one, two)
    assert (record.num_train, record.num_duplicates, record.num_problems) == (3, 1, 0)


def test_id_depends_on_content_alone(prepared: Any, tmp_path: Path) -> None:
    prepared(write_lines(tmp_path / "a.jsonl", [openai("q", "a", id="x")]))
    (first,) = load_conversations(tmp_path / "dataset", "train")
    prepared((write_lines(tmp_path / "b.jsonl", [sharegpt("q", "a")]), {"domain": "other"}))
    (second,) = load_conversations(tmp_path / "dataset", "train")
    assert first.id == second.id
    assert (first.domain, second.domain) == ("default", "other")


def test_a_conversation_may_end_with_the_users_turn(prepared: Any, tmp_path: Path) -> None:
    record = prepared(write_lines(tmp_path / "a.jsonl", [openai("q"), openai("q", "a", "r")]))
    assert record.num_train == 2


def test_no_prompt_is_on_both_sides(prepared: Any, tmp_path: Path) -> None:
    # Each prompt is answered thrice, in spellings that differ in case and white space only.
    lines = [
        openai(form, f"answer {i}")
        for i in range(200)
        for form in (f"Prompt {i}", f"prompt  {i}", f" PROMPT {i}\n")
    ]
    record = prepared(write_lines(tmp_path / "a.jsonl", lines), evaluation_share=0.2)
    sides = [
        {t[0].casefold().split()[1] for t in texts(tmp_path / "dataset", s)} for s in ("train", "evaluation")
    ]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0] | sides[1]) == 200
    assert 20 <= len(sides[1]) <= 60
    assert record.num_evaluation == 3 * len(sides[1])


def test_growing_data_moves_no_prompt_into_evaluation(prepared: Any, tmp_path: Path) -> None:
    lines = [openai(f"prompt {i}", "a") for i in range(300)]
    cap = {"evaluation_share": 0.3, "max_evaluation_conversations": 20}
    record = prepared(write_lines(tmp_path / "a.jsonl", lines[:150]), **cap)
    assert record.num_evaluation == 20
    trained_before = texts(tmp_path / "dataset", "train")
    prepared(write_lines(tmp_path / "a.jsonl", lines), **cap)
    assert trained_before.isdisjoint(texts(tmp_path / "dataset", "evaluation"))


def test_prompts_of_an_evaluation_source_are_kept_from_training(prepared: Any, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", [openai("shared", "a"), openai("own", "a")])
    held_out = write_lines(tmp_path / "test.jsonl", [openai("Shared", "b"), openai("shared", "a")])
    record = prepared((train, {"use": "train"}), (held_out, {"use": "evaluation", "domain": "bench"}))
    assert texts(tmp_path / "dataset", "train") == {("own", "a")}
    assert texts(tmp_path / "dataset", "evaluation") == {("Shared", "b"), ("shared", "a")}
    assert record.num_per_domain == {
        "bench": {"train": 0, "evaluation": 2},
        "default": {"train": 1, "evaluation": 0},
    }
    assert record.train_domains == ("default",)


def test_prompts_of_a_train_source_are_not_held_out_elsewhere(prepared: Any, tmp_path: Path) -> None:
    prompts = [openai(f"prompt {i}", "a") for i in range(50)]
    train = write_lines(tmp_path / "train.jsonl", prompts)
    split = write_lines(tmp_path / "split.jsonl", [openai(f"prompt {i}", "b") for i in range(50)])
    record = prepared((train, {"use": "train"}), split, evaluation_share=0.9)
    assert (record.num_train, record.num_evaluation) == (100, 0)


def test_nothing_left_to_train_on_is_refused(prepared: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [openai("q", "a")])
    with pytest.raises(DataError, match="none left to train on"):
        prepared((path, {"use": "evaluation"}))
    assert not (tmp_path / "dataset" / "dataset.json").exists()


def test_longer_conversations_are_counted_as_truncated(prepared: Any, tmp_path: Path) -> None:
    record = prepared(write_lines(tmp_path / "a.jsonl", [openai("q", "a" * 400), openai("q", "a")]))
    assert (record.num_train, record.num_truncated) == (2, 1)


def test_same_inputs_are_not_read_again_and_changed_ones_are(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [openai("q", "a")])
    first = prepared(path)
    with monkeypatch.context() as patch:
        patch.setattr("drafter.conversations.read_source", lambda source, uris: pytest.fail("read again"))
        assert prepared(path) == first
    write_lines(path, [openai("q", "a"), openai("r", "a")])
    assert prepared(path).num_train == 2


@pytest.mark.parametrize("name", ["train.jsonl", "evaluation.jsonl", "profile.parquet"])
def test_a_file_that_has_vanished_is_written_again(prepared: Any, tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [openai("q", "a")])
    first = prepared(path)
    (tmp_path / "dataset" / name).unlink()
    assert prepared(path) == first
    assert (tmp_path / "dataset" / name).is_file()


def test_refused_data_leaves_no_record_of_older_data(prepared: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [openai("q", "a")])
    prepared(path)
    path.write_text("{\n")
    with pytest.raises(DataError):
        prepared(path)
    with pytest.raises(DataError, match=r"dataset\.json does not exist"):
        load_conversations(tmp_path / "dataset", "train")


def test_json_nested_beyond_measure_is_a_broken_line(prepared: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(openai("q", "a")) + "\n" + "[" * 100_000)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: broken JSON"):
        prepared(path)


def test_a_store_without_credentials_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, path: str, **options: Any) -> bool:
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.isdir", refuse)
    with pytest.raises(DataError, match=r"cannot be reached: .*credentials"):
        list_files("memory://chats.jsonl")


@pytest.mark.parametrize("damage", ["missing", "truncated", "binary"])
def test_a_damaged_side_of_a_dataset_is_refused(prepared: Any, tmp_path: Path, damage: str) -> None:
    prepared(write_lines(tmp_path / "a.jsonl", [openai("q", "a")]))
    side = tmp_path / "dataset" / "train.jsonl"
    contents = {"truncated": side.read_bytes()[:-9], "binary": b"\x81\x00"}
    side.unlink()
    if damage in contents:
        side.write_bytes(contents[damage])
    with pytest.raises(DataError, match=r"train\.jsonl is (missing|damaged)"):
        load_conversations(tmp_path / "dataset", "train")


def test_a_record_that_is_not_text_is_refused(prepared: Any, tmp_path: Path) -> None:
    prepared(write_lines(tmp_path / "a.jsonl", [openai("q", "a")]))
    (tmp_path / "dataset" / "dataset.json").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="is not a DatasetRecord"):
        load_conversations(tmp_path / "dataset", "train")
