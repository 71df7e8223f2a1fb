"""README and the other pages name what exists, and the commands in them work."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drafter.__main__ import VERBS
from drafter.command_line import Verb, parse_verb
from flows.command_line import VERBS as FLEDGE_VERBS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(program: str) -> list[list[str]]:
    """Words of each line of the README's shell blocks that starts with `program`."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(program + " ")]


def targets_of_makefile() -> set[str]:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    return {name for name in phony.group(1).split() if not name.startswith(".")} - {"help"}


def test_readme_names_every_make_target() -> None:
    assert {name for name in targets_of_makefile() if f"make {name}" not in README} == set()


def test_make_help_names_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name for name in targets_of_makefile() if f"make {name}" not in shown} == set()


def test_every_make_command_of_the_readme_exists() -> None:
    assert {words[1] for words in commands("make")} <= targets_of_makefile()


def test_readme_shows_every_verb() -> None:
    assert {words[3] for words in commands("python -m drafter")} == {verb.name for verb in VERBS}
    assert {words[1] for words in commands("fledge")} == {verb.name for verb in FLEDGE_VERBS}


@pytest.mark.parametrize("words", commands("python -m drafter"), ids=lambda words: words[3])
def test_every_drafter_command_of_the_readme_parses(words: list[str]) -> None:
    parse(VERBS, "python -m drafter", words[3:])


@pytest.mark.parametrize("words", commands("fledge"), ids=lambda words: words[1])
def test_every_fledge_command_of_the_readme_parses(words: list[str]) -> None:
    parse(FLEDGE_VERBS, "fledge", words[1:])


def test_the_serve_command_of_the_readme_holds_valid_json() -> None:
    (words,) = commands("vllm")
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["parallel_drafting"] is True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(
        re.findall(r"`((?:drafter|tasks|flows|containers|examples|tests|scripts|docs)/[\w./-]*)`", text)
    )
    named |= {link for link in re.findall(r"\]\(([\w./-]+)\)", text) if "://" not in link}
    assert {name for name in named if not ((ROOT / name).exists() or (page.parent / name).exists())} == set()


def test_the_tree_of_the_readme_names_folders_that_exist() -> None:
    tree = re.search(r"## What is where\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    for line in tree.group(1).splitlines():
        name, *explanation = line.split()
        assert (ROOT / name).exists(), name
        assert explanation, f"{name} is not explained"


def test_the_page_of_modules_is_current() -> None:
    script = [sys.executable, "scripts/list_modules.py", "--print"]
    shown = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/modules.md").read_text(encoding="utf-8") == shown, "python scripts/list_modules.py"


def test_every_folder_of_modules_is_on_that_page() -> None:
    text = (ROOT / "docs/modules.md").read_text(encoding="utf-8")
    folders = {
        str(path.parent.relative_to(ROOT))
        for top in ("flows", "tasks", "drafter", "containers", "benchmarks", "examples")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py" and "build" not in path.parts
    }
    assert {folder for folder in folders if f"## {folder}/" not in text} == set()


def test_the_readme_shows_what_was_measured() -> None:
    block = re.search(r"<!-- measured: begin -->(.*?)<!-- measured: end -->", README, re.DOTALL)
    assert block is not None
    assert "|" in block.group(1), "README's table of measured speeds is missing"


def parse(verbs: tuple[Verb, ...], program: str, words: list[str]) -> None:
    verb = next(verb for verb in verbs if verb.name == words[0])
    parse_verb(program, verb, words[1:])
