"""Model data from S3: whole, checked, resumed, within its time, and never outside its folder."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from containers.local import model_data
from containers.local.machine import Machine
from containers.local.model_data import DownloadFailed, download_model_data
from tests.containers.data_plane import BUCKET

WEIGHTS = bytes(range(256)) * 20_000


class RecordingS3:
    """A client that remembers which bytes were asked for, and may break off."""

    def __init__(self, client: Any, breaks_after: int | None = None) -> None:
        self._client = client
        self._breaks_after = breaks_after
        self.ranges: list[str | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_object(self, **request: Any) -> Any:
        self.ranges.append(request.get("Range"))
        answer = self._client.get_object(**request)
        if self._breaks_after is not None:
            answer["Body"] = BrokenBody(answer["Body"], self._breaks_after)
            self._breaks_after = None
        return answer


class BrokenBody:
    """A connection that is reset."""

    def __init__(self, body: Any, breaks_after: int) -> None:
        self._body = body
        self._left = breaks_after

    def iter_chunks(self, size: int) -> Any:
        for chunk in self._body.iter_chunks(size):
            if len(chunk) > self._left:
                raise ConnectionResetError("reset by peer")
            self._left -= len(chunk)
            yield chunk


def download(machine: Machine, uri: str, folder: Path, timeout_s: float = 30.0) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(download_model_data(machine, uri, folder, time.monotonic() + timeout_s))


@pytest.fixture
def machine(tmp_path: Path, s3: Any) -> Machine:
    return Machine(tmp_path / "home", memory_gb=10)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_prefix_becomes_a_folder_with_what_lies_below_it(machine: Machine, s3: Any, tmp_path: Path) -> None:
    for key in ("model/config.json", "model/deep/weights", "model-other/x", "model/empty/"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
    download(machine, f"s3://{BUCKET}/model/", tmp_path / "model")
    assert files(tmp_path / "model") == {
        "config.json": b"model/config.json",
        "deep/weights": b"model/deep/weights",
    }


def test_an_archive_is_unpacked(machine: Machine, s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="model.tar.gz", Body=archive({"a/config.json": b"{}"}))
    s3.put_object(Bucket=BUCKET, Key="model.tar.gz.backup", Body=b"x")
    download(machine, f"s3://{BUCKET}/model.tar.gz", tmp_path / "model")
    assert files(tmp_path / "model") == {"a/config.json": b"{}"}


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            opened.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("body", [archive({"../escaped": b"x"}), b"no archive at all"])
def test_an_archive_that_is_none_or_leaves_the_folder_is_refused(
    machine: Machine, s3: Any, tmp_path: Path, body: bytes
) -> None:
    s3.put_object(Bucket=BUCKET, Key="model.tar.gz", Body=body)
    with pytest.raises(DownloadFailed, match="Failed to download model data"):
        download(machine, f"s3://{BUCKET}/model.tar.gz", tmp_path / "deep" / "model")
    assert not list(tmp_path.rglob("escaped"))


def test_a_key_that_leaves_the_folder_is_refused(machine: Machine, s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="model/../../escaped", Body=b"x")
    with pytest.raises(DownloadFailed, match="leaves its prefix"):
        download(machine, f"s3://{BUCKET}/model/", tmp_path / "deep" / "model")
    assert not list(tmp_path.rglob("escaped"))


def test_a_connection_that_breaks_is_resumed_where_it_broke(
    machine: Machine, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket=BUCKET, Key="model/weights", Body=WEIGHTS)
    recording = RecordingS3(s3, breaks_after=3_000_000)
    monkeypatch.setattr(machine, "_s3", recording)
    download(machine, f"s3://{BUCKET}/model/", tmp_path / "model")
    assert files(tmp_path / "model") == {"weights": WEIGHTS}
    assert recording.ranges == [None, f"bytes={2 << 20}-"]


def test_what_was_downloaded_before_a_kill_is_not_fetched_again(
    machine: Machine, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("model/a", "model/b"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=WEIGHTS + key.encode())
    recording = RecordingS3(s3)
    monkeypatch.setattr(machine, "_s3", recording)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_bytes(WEIGHTS + b"model/a")
    download(machine, f"s3://{BUCKET}/model/", tmp_path / "model")
    assert recording.ranges == [None]  # b alone
    download(machine, f"s3://{BUCKET}/model/", tmp_path / "model")
    assert recording.ranges == [None]  # all there: S3 is not asked


def test_bytes_that_do_not_match_their_etag_are_not_kept(
    machine: Machine, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket=BUCKET, Key="model/weights", Body=WEIGHTS)
    real = model_data._append_rest

    def corrupt(client: Any, item: Any, partial: Path, require_time: Any) -> None:
        real(client, item, partial, require_time)
        partial.write_bytes(b"?" + partial.read_bytes()[1:])

    monkeypatch.setattr(model_data, "_append_rest", corrupt)
    with pytest.raises(DownloadFailed, match="do not match its ETag"):
        download(machine, f"s3://{BUCKET}/model/", tmp_path / "model")
    assert files(tmp_path / "model") == {}


def test_a_damaged_file_is_fetched_again(machine: Machine, s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="model/weights", Body=WEIGHTS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"?" + WEIGHTS[1:])
    download(machine, f"s3://{BUCKET}/model/", tmp_path / "model")
    assert files(tmp_path / "model") == {"weights": WEIGHTS}


def test_a_download_past_its_time_limit_fails_and_names_the_limit(
    machine: Machine, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket=BUCKET, Key="model/weights", Body=WEIGHTS)
    monkeypatch.setattr(model_data, "_CHUNK_BYTES", 1024)
    with pytest.raises(DownloadFailed, match="ModelDataDownloadTimeoutInSeconds"):
        download(machine, f"s3://{BUCKET}/model/", tmp_path / "model", timeout_s=0.01)


@pytest.mark.parametrize("uri", [f"s3://{BUCKET}/nothing/", "s3://no-such-bucket-here/model/"])
def test_data_that_is_not_there_is_named(machine: Machine, tmp_path: Path, uri: str) -> None:
    with pytest.raises(DownloadFailed, match=f'from URL: "{uri}"'):
        download(machine, uri, tmp_path / "model")
