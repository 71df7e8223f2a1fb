"""The demo's prompts: the same each time, varied, and without twins on both sides of a split."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo_conversations import (
    Function,
    distinct,
    documented_functions,
    humaneval_prompts,
    stdlib_prompts,
    write_conversations,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return stdlib_prompts()


def test_prompts_are_many_distinct_and_varied(prompts: list[str]) -> None:
    assert len(prompts) > 2500
    assert len(set(prompts)) == len(prompts)
    openings = {prompt.split("`")[0] for prompt in prompts}
    assert len(openings) >= 3
    assert all(len(prompt) < 700 for prompt in prompts)


def test_prompts_hold_nothing_of_this_process(prompts: list[str]) -> None:
    assert not [prompt for prompt in prompts if re.search(r" at 0x[0-9a-f]", prompt) or str(ROOT) in prompt]


def test_another_process_writes_the_same_files(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from examples.demo_conversations import write_conversations;"
        "write_conversations(Path(sys.argv[1]))"
    )
    files = []
    for seed in ("1", "2"):
        directory = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, directory], check=True, cwd=ROOT, env=environment)
        files.append({path.name: path.read_bytes() for path in directory.iterdir()})
    assert files[0] == files[1]
    assert set(files[0]) == {"python-stdlib.jsonl", "humaneval.jsonl"}


def test_what_this_process_did_to_the_standard_library_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_conversations(tmp_path / "before")["python-stdlib"].read_bytes()
    monkeypatch.setattr(json.dumps, "__doc__", "Write what a library put here when it was imported.")
    assert any("a library put here" in prompt for prompt in stdlib_prompts())
    assert write_conversations(tmp_path / "after")["python-stdlib"].read_bytes() == before


def test_near_duplicates_are_left_out() -> None:
    join = Function(
        "os.path.join", "(a, *p)", "Join two or more pathname components, inserting slashes as needed."
    )
    twin = Function(
        "ntpath.join", "(a, *p)", "Join two or more pathname components, inserting slashes as needed."
    )
    other = Function("math.sin", "(x)", "Return the sine of x (measured in radians).")
    assert list(distinct([join, twin, other])) == [join, other]


def test_functions_found_twice_are_taken_once() -> None:
    paths = [function.path for function in documented_functions()]
    assert len(set(paths)) == len(paths)
    assert "textwrap.dedent" in paths
    assert any(path.endswith("Counter.most_common") for path in paths)


def test_humaneval_is_whole() -> None:
    prompts = humaneval_prompts()
    assert len(prompts) == 164
    assert all(prompt.startswith("Complete this Python function:\n```python\n") for prompt in prompts)


def test_conversations_are_one_user_turn_and_can_be_capped(tmp_path: Path) -> None:
    paths = write_conversations(tmp_path, max_prompts={"python-stdlib": 20, "humaneval": 20})
    for path in paths.values():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == 20
        assert all([message["role"] for message in line["messages"]] == ["user"] for line in lines)
    before = {path: path.stat().st_mtime_ns for path in paths.values()}
    write_conversations(tmp_path, max_prompts={"python-stdlib": 20, "humaneval": 20})
    assert {path: path.stat().st_mtime_ns for path in paths.values()} == before
