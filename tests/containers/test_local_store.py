"""The store keeps what was written, over restarts and kills."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from containers.local.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.db")


def test_what_was_written_is_there_after_reopening(store: Store, tmp_path: Path) -> None:
    store.put("model", "m", {"a": [1, {"b": None}]})
    store.put_tags("arn:m", {"k": "v"})
    created_at = store.get("model", "m").created_at
    store.close()
    again = Store(tmp_path / "state.db")
    found = again.get("model", "m")
    assert (found.body, found.created_at) == ({"a": [1, {"b": None}]}, created_at)
    assert again.tags("arn:m") == {"k": "v"}


def test_a_change_keeps_the_time_of_creation(store: Store) -> None:
    store.put("endpoint", "e", {"status": "Creating"})
    created_at = store.get("endpoint", "e").created_at
    store.put("endpoint", "e", {"status": "InService"})
    found = store.get("endpoint", "e")
    assert found.body == {"status": "InService"}
    assert found.created_at == created_at
    assert found.modified_at > created_at


def test_kinds_do_not_share_names_and_deleting_forgets_the_tags(store: Store) -> None:
    store.put("model", "same", {})
    store.put("endpoint-config", "same", {})
    store.put_tags("arn:model/same", {"k": "v"})
    store.delete("model", "same", "arn:model/same")
    assert store.get("model", "same") is None
    assert store.get("endpoint-config", "same") is not None
    assert store.tags("arn:model/same") == {}


WRITER = """
import sys
from pathlib import Path
from containers.local.store import Store
store = Store(Path(sys.argv[1]))
number = 0
while True:
    store.put("endpoint", "e", {"number": number, "text": "x" * 2000})
    print(number, flush=True)
    number += 1
"""


def test_every_finished_write_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    last = 0
    while last < 50:
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    found = Store(path).get("endpoint", "e")
    assert found.body["number"] >= last
    assert found.body["text"] == "x" * 2000
