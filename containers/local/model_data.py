"""Model data from S3 to a folder: resumed where it broke off, checked, within a time limit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

if TYPE_CHECKING:
    from containers.local.machine import Machine

_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5


class DownloadFailed(Exception):
    """Model data that is not there, does not come, or is not what S3 says it is."""


@dataclass(frozen=True)
class _Object:
    """One object to fetch, and where it goes below the folder."""

    bucket: str
    key: str
    size: int
    etag: str
    place: PurePosixPath


class _TimeIsUp(Exception):
    pass


async def download_model_data(machine: Machine, uri: str, folder: Path, deadline: float) -> None:
    """Make `folder` hold what an S3 URI names. Done before, it returns at once and asks nobody.

    Args:
        uri: `s3://bucket/prefix/` for every object below, or one `.tar.gz` object, which is unpacked.
        deadline: on time.monotonic().

    Raises:
        DownloadFailed: with the words of an endpoint's FailureReason.
    """
    given_up = threading.Event()
    started = time.monotonic()

    def require_time() -> None:
        if given_up.is_set() or time.monotonic() > deadline:
            raise _TimeIsUp

    try:
        await asyncio.to_thread(_download, machine, uri, folder, require_time)
    except _TimeIsUp:
        raise DownloadFailed(
            f'Downloading model data for container "primary" from URL "{uri}" took longer than the '
            f"{deadline - started:.0f} s of ModelDataDownloadTimeoutInSeconds."
        ) from None
    except (BotoCoreError, ClientError, OSError, tarfile.TarError) as error:
        raise DownloadFailed(f"{_not_downloaded(uri)} ({error})") from error
    finally:
        given_up.set()  # a cancelled task leaves its thread behind


def _download(machine: Machine, uri: str, folder: Path, require_time: Any) -> None:
    done = folder.with_name(f".{folder.name}.done")
    if done.exists() and done.read_text(encoding="utf-8") == uri:
        return
    objects = list(_objects(machine.s3, uri))
    if not objects:
        raise DownloadFailed(_not_downloaded(uri))
    is_archive = not uri.endswith("/")
    target = folder.with_name(f".{folder.name}.archive") if is_archive else folder
    for item in objects:
        _fetch(machine.s3, item, target / item.place, require_time)
    if is_archive:
        _unpack(target / objects[0].place, folder)
        shutil.rmtree(target)
    done.write_text(uri, encoding="utf-8")


def _objects(s3: Any, uri: str) -> Iterator[_Object]:
    """What the URI names.

    Raises:
        DownloadFailed: a key that would leave the folder.
    """
    parts = urlsplit(uri)
    bucket, key = parts.netloc, parts.path.lstrip("/")
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key):
        for found in page.get("Contents", ()):
            name = found["Key"]
            if uri.endswith("/"):
                place = PurePosixPath(name.removeprefix(key))
            elif name == key:
                place = PurePosixPath(PurePosixPath(name).name)
            else:
                continue  # only begins like it
            if name.endswith("/"):
                continue  # a folder's marker
            if place.is_absolute() or ".." in place.parts:
                raise DownloadFailed(f"{_not_downloaded(uri)} (the key {name!r} leaves its prefix)")
            yield _Object(bucket, name, int(found["Size"]), found["ETag"].strip('"'), place)


def _fetch(s3: Any, item: _Object, path: Path, require_time: Any) -> None:
    """One object, whole and checked, or an error; what arrived before an interruption is used.

    Raises:
        DownloadFailed: what arrived is not what S3 announced.
    """
    if path.exists() and _is_whole(path, item):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ETag in the name: pieces of different contents never meet.
    partial = path.with_name(f".{path.name}.{hashlib.sha256(item.etag.encode()).hexdigest()[:12]}.partial")
    for attempt in range(_ATTEMPTS):
        require_time()
        try:
            _append_rest(s3, item, partial, require_time)
            break
        except (BotoCoreError, OSError):
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.2 * 2**attempt)
    if not _is_whole(partial, item):
        partial.unlink()
        raise DownloadFailed(
            f"{_not_downloaded(f's3://{item.bucket}/{item.key}')} (its bytes do not match its ETag)"
        )
    os.replace(partial, path)


def _append_rest(s3: Any, item: _Object, partial: Path, require_time: Any) -> None:
    with open(partial, "ab") as handle:
        have = handle.tell()
        if have == item.size:
            return
        if have > item.size:
            handle.truncate(0)
            have = 0
        span = {"Range": f"bytes={have}-"} if have else {}
        body = s3.get_object(Bucket=item.bucket, Key=item.key, IfMatch=item.etag, **span)["Body"]
        for chunk in body.iter_chunks(_CHUNK_BYTES):
            require_time()
            handle.write(chunk)
        handle.flush()
        os.fsync(handle.fileno())


def _is_whole(path: Path, item: _Object) -> bool:
    """Right size and, where the ETag is a plain MD5 (one part, no KMS), right bytes."""
    if path.stat().st_size != item.size:
        return False
    if len(item.etag) != 32 or not all(letter in "0123456789abcdef" for letter in item.etag):
        return True
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == item.etag


def _unpack(archive: Path, folder: Path) -> None:
    """Into place at once. Members that would leave the folder, links out of it and devices are refused."""
    fresh = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(archive, "r:*") as opened:
        opened.extractall(fresh, filter="data")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)


def _not_downloaded(uri: str) -> str:
    return (
        f'Failed to download model data for container "primary" from URL: {json.dumps(uri)}. Please ensure that '
        "there is an object located at the URL and that the role passed to CreateModel has permissions to download "
        "the model."
    )
