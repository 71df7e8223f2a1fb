"""`fledge doctor` says what is missing and what to do."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tasks.check_machine import Check, check_machine
from tasks.local_environment import Ports, announced, only_one
from tasks.settings import Places


def checks_of(places: Places, target: Path) -> dict[str, Check]:
    return {check.name: check for check in check_machine(places, target, ())}


def test_a_missing_vllm_environment_and_target_are_named_with_a_remedy(tmp_path: Path) -> None:
    places = Places(home=tmp_path / "home", vllm_python=tmp_path / "none" / "python")
    checks = checks_of(places, tmp_path / "no-target")
    assert "make setup" in (checks["vLLM environment"].remedy or "")
    assert "make demo" in (checks["target"].remedy or "")
    assert checks["packages"].remedy is None
    assert not (tmp_path / "home").exists(), "looking must not make anything"


def test_an_environment_without_vllm_is_not_taken_for_one(tmp_path: Path) -> None:
    checks = checks_of(Places(home=tmp_path, vllm_python=Path(sys.executable)), tmp_path)
    assert checks["vLLM environment"].remedy == "make setup"


def test_a_full_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.check_machine.LEAST_DISK_GB", 1e9)
    assert "FLEDGE_HOME" in (checks_of(Places(home=tmp_path), tmp_path)["disk"].remedy or "")


def test_a_check_reads_as_a_line_and_its_remedy() -> None:
    assert str(Check(name="disk", found="1 GB", remedy="free some")).splitlines() == [
        "->  disk: 1 GB",
        "     what to do: free some",
    ]


def test_too_little_memory_for_two_fleets_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "memory for endpoints here"
    monkeypatch.setattr("tasks.check_machine._total_memory_gb", lambda: 11.0)
    assert "two fleets" in (checks_of(Places(home=tmp_path), tmp_path)[name].remedy or "")
    monkeypatch.setattr("tasks.check_machine._total_memory_gb", lambda: 16.0)
    assert checks_of(Places(home=tmp_path), tmp_path)[name].remedy is None


def test_ports_of_a_running_up_are_no_mystery(tmp_path: Path) -> None:
    places = Places(home=tmp_path)
    with only_one(places), announced(places, Ports(1, 2, 3, 4, 5)):
        assert "fledge up runs on this home" in checks_of(places, tmp_path)["ports"].found
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = {check.name: check for check in check_machine(places, tmp_path, (port,))}["ports"].found
    assert f"{port} in use" in found
