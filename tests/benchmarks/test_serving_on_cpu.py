"""The benchmark of serving on a CPU: which server loads what, its table, its help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving_on_cpu import (
    ServedWay,
    ServingOnCpu,
    ServingOnCpuSettings,
    _plugins_of,
    _server,
    show,
)
from drafter.measurement import Variant
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("before", [None, "a_plugin_of_the_users"])
def test_only_vllm_as_it_comes_goes_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if before is not None:
        monkeypatch.setenv("VLLM_PLUGINS", before)
    for way in ("kernels", "compiled"):
        with _plugins_of(way):
            assert os.environ.get("VLLM_PLUGINS") == before
    with _plugins_of("vllm"):
        assert os.environ["VLLM_PLUGINS"] == "fledge_sampling_fix,fledge_quick_start"
    assert os.environ.get("VLLM_PLUGINS") == before


def test_only_the_compiled_one_is_compiled(tmp_path: Path) -> None:
    settings = ServingOnCpuSettings(target=tmp_path, dataset=tmp_path)
    commands = {
        way: _server(settings, way, Variant(None, 0)).command(Path("python")) for way in settings.ways
    }
    assert [way for way, command in commands.items() if "--enforce-eager" not in command] == ["compiled"]


def test_the_table_compares_each_way_with_the_first_at_the_same_k(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cell(way: str, k: int, speed: float, ratio: float, length: float | None) -> ServedWay:
        return ServedWay.model_validate(
            {
                "way": way,
                "num_speculative_tokens": k,
                "output_tokens_per_second": speed,
                "ratio": ratio,
                "acceptance_length": length,
                "start_s": 33.4,
            }
        )

    cells = (cell("vllm", 0, 16.0, 1.0, None), cell("kernels", 3, 24.0, 1.08, 1.84))
    show(ServingOnCpu(cells=cells, repeats=3, machine="two cores", versions={"vllm": "0.32.0"}))
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["none", "vllm", "16.0", "1.00x", "", "33"] in rows
    assert ["3", "kernels", "24.0", "1.08x", "1.84", "33"] in rows


def test_help_says_what_it_does() -> None:
    command = [sys.executable, "-m", "benchmarks.serving_on_cpu", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m benchmarks.serving_on_cpu" in done.stdout
    assert "--ways" in done.stdout
