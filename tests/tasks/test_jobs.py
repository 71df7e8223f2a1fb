"""Verbs as processes: their own words when they refuse, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.config import PrepareSettings, SourceSettings
from drafter.records import DatasetRecord
from tasks.jobs import JobCrashed, JobError, run_verb
from tasks.settings import Places
from tests.waiting import is_alive, wait_until


def prepare_settings(tmp_path: Path) -> PrepareSettings:
    return PrepareSettings(
        sources=(SourceSettings(uri=str(tmp_path / "chats.jsonl")),),
        target=tmp_path / "target",
        output=tmp_path / "dataset",
    )


def stand_in_for_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script run in place of `python -m drafter`: what a verb's process may do to us."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("FLEDGE_PYTHON", str(path))


def test_a_verb_that_refuses_is_raised_in_its_own_words(places: Places, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{broken\n")

    with pytest.raises(JobError) as caught:
        run_verb("prepare", prepare_settings(tmp_path), DatasetRecord)

    assert "target" in caught.value.given or "chats.jsonl" in caught.value.given
    assert caught.value.expected
    assert caught.value.remedy
    assert "Traceback" not in str(caught.value)


def test_a_verb_that_is_killed_is_a_crash_with_its_last_lines(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_python(tmp_path, monkeypatch, "echo 'reading shard 7' >&2; kill -9 $$")

    with pytest.raises(JobCrashed, match=r"exit code 137.*\nreading shard 7"):
        run_verb("prepare", prepare_settings(tmp_path), DatasetRecord)


LOST = "python -m drafter train: rank 0 of 2 has lost another rank: closed\n  expected: all\n  what to do: again\n"
REFUSED = "python -m drafter train: shard 3 holds NaN\n  expected: numbers\n  what to do: extract anew\n"


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (LOST, JobCrashed, "has lost another rank"),
        (LOST + REFUSED, JobError, r"^shard 3 holds NaN\n  expected: numbers\n  what to do: extract anew$"),
        (REFUSED + LOST, JobError, r"^shard 3 holds NaN\n  expected: numbers\n  what to do: extract anew$"),
    ],
)
def test_of_several_ranks_the_one_that_knows_the_reason_is_believed(
    said: str,
    kind: type[Exception],
    words: str,
    places: Places,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that was killed says nothing, and running the verb again may help."""
    (tmp_path / "said").write_text(said)
    stand_in_for_python(tmp_path, monkeypatch, f"cat {tmp_path}/said >&2; exit 1")

    with pytest.raises(kind, match=words):
        run_verb("prepare", prepare_settings(tmp_path), DatasetRecord)


def test_lines_of_the_verb_reach_the_log_as_they_come(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in_for_python(tmp_path, monkeypatch, "echo '12 of 20 conversations' >&2; echo null")

    with caplog.at_level("INFO", logger="fledge"), pytest.raises(Exception, match="DatasetRecord"):
        run_verb("prepare", prepare_settings(tmp_path), DatasetRecord)

    assert "prepare: 12 of 20 conversations" in caplog.text


RUN_PREPARE = """
import sys
from drafter.config import PrepareSettings
from drafter.records import DatasetRecord
from tasks.jobs import run_verb
run_verb("prepare", PrepareSettings.model_validate_json(sys.argv[1]), DatasetRecord)
"""


def start_run(tmp_path: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    settings = prepare_settings(tmp_path).model_dump_json()
    return subprocess.Popen([sys.executable, "-c", RUN_PREPARE, settings], env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_when_the_flow_ends(
    ending: signal.Signals, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    stand_in_for_python(
        tmp_path, monkeypatch, f"sleep 3600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    )
    flow = start_run(tmp_path)
    wait_until(pids.exists)
    verb, grandchild = map(int, pids.read_text().split())

    flow.send_signal(ending)
    flow.wait()

    wait_until(lambda: not is_alive(verb) and not is_alive(grandchild))


@pytest.mark.slow
def test_a_second_run_waits_until_the_killed_one_has_let_go(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb of a killed flow may still be writing: the lock is its, not the flow's."""
    log = tmp_path / "log"
    stand_in_for_python(
        tmp_path,
        monkeypatch,
        f"[ -e {log} ] && again=yes\n"
        f"trap 'sleep 2; echo end >> {log}; exit 0' TERM; echo begin >> {log}\n"
        "[ $again ] || { sleep 3600 & wait; }",  # the first one ends by TERM alone
    )
    first = start_run(tmp_path)
    wait_until(log.exists)
    first.kill()
    first.wait()

    second = start_run(tmp_path)
    second.wait()

    assert log.read_text().split()[:3] == ["begin", "end", "begin"]
