"""Dockerfiles: linted, and everything that they copy is there. No Docker engine runs here, so none is built."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
HADOLINT = Path(sys.executable).parent / "hadolint"
CONTEXTS = {"train": ROOT, "serve": ROOT / "containers" / "serve"}


def dockerfile(image: str) -> Path:
    return ROOT / "containers" / image / "Dockerfile"


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", dockerfile(image).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def sent_to_docker(image: str) -> set[str]:
    """Files of the build context, by Docker's own reading of the ignore file beside the Dockerfile."""
    ignore = dockerfile(image).with_name("Dockerfile.dockerignore")
    patterns = ignore.read_text().split() if ignore.exists() else []
    return exclude_paths(str(CONTEXTS[image]), patterns, str(dockerfile(image)))


@pytest.mark.parametrize("image", CONTEXTS)
def test_hadolint_has_no_objection(image: str) -> None:
    done = subprocess.run([HADOLINT, "--format", "json", dockerfile(image)], capture_output=True, text=True)
    assert json.loads(done.stdout) == []


def test_hadolint_would_object(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install torch\n")
    found = json.loads(subprocess.run([HADOLINT, "--format", "json", bad], capture_output=True).stdout)
    assert {"DL3007", "DL3013"} <= {problem["code"] for problem in found}


@pytest.mark.parametrize("image", CONTEXTS)
def test_everything_that_is_copied_reaches_docker(image: str) -> None:
    sent = sent_to_docker(image)
    sources = [part for name, rest in instructions(image) if name == "COPY" for part in rest.split()[:-1]]
    assert sources
    for source in sources:
        assert any(path == source or path.startswith(f"{source}/") for path in sent), source


def test_nothing_of_this_machine_reaches_docker() -> None:
    sent = sent_to_docker("train")
    assert not [path for path in sent if path.startswith((".venv", ".fledge", ".git/", "tests/"))]
    assert not [path for path in sent if "__pycache__" in path and path.endswith(".pyc")]


@pytest.mark.parametrize(
    ("image", "script"), [("train", "train/entrypoint.py"), ("serve", "serve/entrypoint.py")]
)
def test_the_first_process_is_our_entrypoint_and_no_shell(image: str, script: str) -> None:
    (arguments,) = [rest for name, rest in instructions(image) if name == "ENTRYPOINT"]
    command = json.loads(arguments)
    assert command[0].startswith("python")
    assert command[1] == "/opt/fledge/entrypoint.py"
    assert (ROOT / "containers" / script).is_file()


def test_the_serving_image_is_aws_vllm_and_nothing_but_our_entrypoint() -> None:
    named = [name for name, _ in instructions("serve")]
    assert named == ["ARG", "FROM", "ENV", "COPY", "ENTRYPOINT"]
    assert re.search(r"\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com/vllm:\S*sagemaker", instructions("serve")[0][1])


def test_versions_are_the_lock_ones_without_the_mark_of_the_cpu_build() -> None:
    (step,) = [rest for name, rest in instructions("train") if name == "RUN" and "constraints" in rest]
    (expression,) = re.findall(r"sed '([^']+)'", step)
    done = subprocess.run(["sed", expression, ROOT / "requirements.lock"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert any(re.fullmatch(r"torch==[\d.]+", line) for line in lines)
    # pip takes neither extras nor local files as constraints
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+-]+", line) for line in lines)


@pytest.mark.slow
def test_what_is_sent_installs_as_the_trainer(tmp_path: Path) -> None:
    context = tmp_path / "context"
    for path in sent_to_docker("train"):
        if (ROOT / path).is_file():
            (context / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, context / path)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, context], check=True, timeout=PATIENCE_S)
    (wheel,) = tmp_path.glob("fledge-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"drafter/__main__.py", "drafter/trainer.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tasks/", "flows/", "tests/"))]
