"""Conversation files of several shapes, read into one: OpenAI `messages`, ShareGPT, SageMaker's data capture.

They may be JSON, JSON lines or Parquet.

Reading judges only what concerns the file. Whether a conversation makes sense is `drafter.profile`'s matter,
so a record that cannot be read is handed on with its problem in words and the place where it stands.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec

from drafter.captures import is_capture, open_capture
from drafter.errors import DataError
from drafter.files import digest_of

SUFFIXES = (".jsonl", ".json", ".parquet")

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_SHAPE = 'an object with "messages" (role, content), ShareGPT "conversations" (from, value) or SageMaker\'s "captureData"'


@dataclass(frozen=True)
class RawConversation:
    """A conversation as found.

    Attributes:
        source: file and line (or row), for messages to the user.
        turns: (role, content) pairs; roles of ShareGPT are translated, unknown ones left as they are.
        explicit_id: the file's own id, if it has one.
        problem: why the record could not be read, or None.
        is_captured: an endpoint's data capture wrote it.
        left_out: why a captured request is no conversation to learn from, or None.
    """

    source: str
    turns: tuple[tuple[str, str], ...] = ()
    explicit_id: str | None = None
    problem: str | None = None
    is_captured: bool = False
    left_out: str | None = None


def list_files(uri: str) -> list[str]:
    """Files behind a URI, sorted: itself, or those of a folder with a known suffix.

    Raises:
        DataError: nothing there, or nothing of a known kind.
    """
    filesystem, path = _open_filesystem(uri)
    with _reaching(uri):
        is_folder = filesystem.isdir(path)
        files = sorted(f for f in filesystem.find(path) if f.endswith(SUFFIXES)) if is_folder else []
        exists = is_folder or filesystem.exists(path)
    if is_folder:
        if files:
            return [filesystem.unstrip_protocol(file) if "://" in uri else file for file in files]
        raise DataError(f"{uri} holds no {', '.join(SUFFIXES)} file", "at least one", "check the folder")
    if not exists:
        raise DataError(f"{uri} does not exist", "a conversation file or a folder of them", "check the path")
    if not path.endswith(SUFFIXES):
        raise DataError(
            f"{uri}: unknown kind of file", f"one of {', '.join(SUFFIXES)}", "rename or convert it"
        )
    return [uri]


def files_digest(uris: list[str]) -> str:
    """Digest over names, sizes and modification marks: equal digest, nothing changed."""
    marks = []
    for uri in uris:
        filesystem, path = _open_filesystem(uri)
        with _reaching(uri):
            info = filesystem.info(path)
        marks.append([uri, info["size"], str(info.get("ETag") or info.get("mtime"))])
    return digest_of(marks)


def read_file(uri: str) -> Iterator[RawConversation]:
    """Conversations of one file.

    Raises:
        DataError: an empty file, or one that is not of the kind its name says.
    """
    if uri.endswith(".parquet"):
        records = _read_parquet(uri)
    else:
        with _reaching(uri), fsspec.open(uri, "rb") as handle:
            content = handle.read()
        if not content.strip():
            raise DataError(
                f"{uri} is empty", f"one conversation per line: {_SHAPE}", "leave the file out, or fill it"
            )
        is_array = uri.endswith(".json") and content.lstrip()[:1] == b"["
        records = _read_json_array(uri, content) if is_array else _read_json_lines(uri, content)
    for source, value in records:
        yield value if isinstance(value, RawConversation) else _interpret(source, value)


def _open_filesystem(uri: str) -> tuple[Any, str]:
    with _reaching(uri), warnings.catch_warnings():
        # Newer s3fs pins a botocore older than boto3 needs; the old one reads files just as well.
        warnings.filterwarnings("ignore", message="Your installed version of s3fs")
        filesystem, path = fsspec.core.url_to_fs(uri)
    return filesystem, path


@contextmanager
def _reaching(uri: str) -> Iterator[None]:
    """Turn whatever the store says into a DataError."""
    try:
        yield
    except Exception as error:  # each filesystem has its own errors: credentials, network, missing package
        raise DataError(
            f"{uri} cannot be reached: {type(error).__name__}: {error}",
            "a local path or a URI that fsspec opens (s3://bucket/key)",
            "check the URI, its credentials (AWS_PROFILE, AWS_ENDPOINT_URL_S3) and that its package is installed",
        ) from None


def _read_json_lines(uri: str, content: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        source = f"{uri}, line {number}"
        try:
            yield source, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield (
                source,
                RawConversation(source, problem=f"bytes that are not UTF-8 at column {error.start + 1}"),
            )
        except (ValueError, RecursionError) as error:
            yield source, RawConversation(source, problem=f"broken JSON: {error}")


def _read_json_array(uri: str, content: bytes) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{uri}: broken JSON: {error}", "a JSON array", "repair the file at that place"
        ) from None
    if not values:
        raise DataError(
            f"{uri} is an empty array", "at least one conversation", "leave the file out, or fill it"
        )
    for number, value in enumerate(values, start=1):
        yield f"{uri}, element {number}", value


def _read_parquet(uri: str) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with fsspec.open(uri, "rb") as handle:
            file = pq.ParquetFile(handle)
            if file.metadata.num_rows == 0:
                raise DataError(
                    f"{uri} has no row", "at least one conversation", "leave the file out, or fill it"
                )
            number = 0
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    number += 1
                    yield f"{uri}, row {number}", value
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{uri}: not readable as Parquet: {error}", "a whole Parquet file", "write it again"
        ) from None


def _interpret(source: str, value: Any) -> RawConversation:
    """Turn a decoded record into turns, whichever of the shapes it has."""
    if not isinstance(value, dict):
        return RawConversation(source, problem=f"{type(value).__name__} instead of {_SHAPE}")
    if is_capture(value):
        return _interpret_capture(source, value)
    explicit_id = None if value.get("id") is None else str(value["id"])
    if isinstance(value.get("messages"), list):
        turns, problem = _read_turns(value["messages"], "role", "content")
    elif isinstance(value.get("conversations"), list):
        turns, problem = _read_turns(value["conversations"], "from", "value")
    else:
        turns, problem = (), f"fields {sorted(value)} instead of {_SHAPE}"
    return RawConversation(source, turns, explicit_id, problem)


def _interpret_capture(source: str, value: dict[str, Any]) -> RawConversation:
    """An inference id is no id of a conversation: many requests make one, so it only tells where it came from."""
    capture = open_capture(value)
    turns, problem = _read_turns(list(capture.messages), "role", "content")
    return RawConversation(
        f"{source} ({capture.where})" if capture.where else source,
        turns,
        problem=capture.problem or problem,
        is_captured=True,
        left_out=capture.left_out,
    )


def _read_turns(turns: list[Any], speaker: str, text: str) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """(role, content) pairs up to the first turn that is none, and what is wrong with that one."""
    read: list[tuple[str, str]] = []
    for number, turn in enumerate(turns, start=1):
        role = turn.get(speaker) if isinstance(turn, dict) else None
        content = _text_of(turn.get(text)) if isinstance(turn, dict) else None
        if not isinstance(role, str) or content is None:
            return tuple(read), f'turn {number} is not text with "{speaker}" and "{text}"'
        read.append((_SHAREGPT_ROLES.get(role, role) if speaker == "from" else role, content))
    return tuple(read), None


def _text_of(content: Any) -> str | None:
    """Content as text: a string, null (an empty turn), or OpenAI's list of text parts; None for all else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    return None
