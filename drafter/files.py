"""Files that are whole or absent: atomic writes, digests, and records read back with a clear error."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from drafter.errors import DataError

RecordType = TypeVar("RecordType", bound=BaseModel)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on any error it is removed.

    The data is flushed to disk before the rename, so a power cut leaves the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 text so that a reader never sees half of it."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_record(kind: type[RecordType], path: Path) -> RecordType:
    """Read a JSON record.

    Raises:
        DataError: the file is missing, not JSON, or lacks fields of `kind`.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path} does not exist",
            f"the {kind.__name__} that the stage before writes last",
            "run that stage to its end; an unfinished directory does not count as done",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DataError(
            f"{path} is not a {kind.__name__}: {where}: {first['msg']}",
            f"a file written by this version's {kind.__name__}",
            "delete the directory and run the stage that writes it again",
        ) from None


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in pieces."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """First 16 hex digits of the sha256 over canonical JSON: equal values, equal digest."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
