"""Whether a source of conversations has changed, without reading remote files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec

from drafter.errors import DataError
from drafter.files import digest_of, sha256_of_file

# What remote stores say about a file's content, best first.
_STATEMENTS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "mtime", "created")


def fingerprint_source(uri: str) -> str:
    """Digest over the content of a source: local files by their bytes, remote ones by what the store says.

    Raises:
        DataError: nothing is there.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        files = sorted(filesystem.find(path))
    except Exception as error:  # each filesystem has its own errors: credentials, network, missing package
        raise DataError(
            f"source {uri}: {error}", "a readable file or folder", "check the path and the credentials"
        ) from None
    if not files:
        raise DataError(
            f"source {uri}: nothing there",
            "a .jsonl, .json or .parquet file, or a folder of them",
            "check the path; relative ones start at the directory the flow runs in",
        )
    return digest_of([_statement(filesystem, path, file) for file in files])


def _statement(filesystem: Any, root: str, file: str) -> list[str]:
    name = file.removeprefix(root)
    if isinstance(filesystem, fsspec.implementations.local.LocalFileSystem):
        return [name, sha256_of_file(Path(file))]
    info = filesystem.info(file)
    known = [str(info[key]) for key in _STATEMENTS if key in info]
    return [name, str(info.get("size")), *known[:1]]
