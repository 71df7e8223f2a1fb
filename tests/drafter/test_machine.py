"""Which number format a machine multiplies, what `auto` becomes there, and how torch's threads wait."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from drafter import machine
from drafter.config import EvaluateSettings, ServerSettings, TrainSettings

MILAN = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_1 avx avx2 fma\n\nprocessor\t: 1\n"
SAPPHIRE_RAPIDS = "model name\t: Xeon\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16\n"
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
GRAVITON_2 = "processor\t: 0\nFeatures\t: fp asimd asimddp\n"


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Be on a machine whose kernel says this of its processor."""

    def be_on(cpu_info: str | None, has_gpu: bool = False) -> None:
        path, nvidia = tmp_path / "cpuinfo", tmp_path / "nvidiactl"
        if cpu_info is not None:
            path.write_text(cpu_info)
        if has_gpu:
            nvidia.touch()
        monkeypatch.setattr(machine, "_CPU_INFO", path)
        monkeypatch.setattr(machine, "_NVIDIA", nvidia)
        machine.native_number_format.cache_clear()

    yield be_on
    monkeypatch.undo()
    machine.native_number_format.cache_clear()


@pytest.mark.parametrize(
    ("cpu_info", "expected"),
    [
        (MILAN, "float32"),
        (SAPPHIRE_RAPIDS, "bfloat16"),
        (GRAVITON_3, "bfloat16"),
        (GRAVITON_2, "float32"),
        (None, "float32"),  # not Linux
    ],
)
def test_the_format_is_the_one_that_the_processor_multiplies(on, cpu_info: str | None, expected: str) -> None:
    on(cpu_info)
    assert machine.native_number_format() == expected


def test_a_gpu_multiplies_bfloat16_whatever_the_processor_does(on) -> None:
    on(MILAN, has_gpu=True)
    assert machine.native_number_format() == "bfloat16"


def test_auto_becomes_the_machines_own_when_settings_are_made(on) -> None:
    on(MILAN)
    assert ServerSettings().dtype == "float32"
    assert TrainSettings.model_fields["dtype"].default == "auto"  # what help and the run form show
    assert ServerSettings(dtype="bfloat16").dtype == "bfloat16"
    on(SAPPHIRE_RAPIDS)
    assert ServerSettings().dtype == "bfloat16"


def test_identity_is_compared_once_in_each_format(on, tmp_path: Path) -> None:
    values = {"dataset": tmp_path, "target": tmp_path, "output": tmp_path}
    on(SAPPHIRE_RAPIDS)
    assert EvaluateSettings.model_validate(values).identity_dtypes == ("bfloat16", "float32")
    on(MILAN)
    assert EvaluateSettings.model_validate(values).identity_dtypes == ("float32",)


def test_the_description_names_processor_and_format(on) -> None:
    on(MILAN)
    assert machine.describe_machine().startswith("AMD EPYC, ")
    assert machine.describe_machine().endswith("float32 natively")


COMPUTE = """
from drafter.machine import prepare_threads
prepare_threads()
import torch
torch.set_num_threads(2)
(torch.ones(400, 400) @ torch.ones(400, 400)).sigmoid_()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Intel's OpenMP is for x86-64 alone")
@pytest.mark.parametrize(("variables", "expected"), [({}, "1ms"), ({"KMP_BLOCKTIME": "7"}, "7ms")])
def test_torch_computes_with_threads_that_wait_awake_for_a_moment(
    variables: dict[str, str], expected: str
) -> None:
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_"))}
    # Intel's OpenMP prints its settings when the first of torch's threads asks for it.
    environment = {**unset, "KMP_SETTINGS": "1", **variables}
    told = subprocess.run(
        [sys.executable, "-c", COMPUTE], env=environment, capture_output=True, text=True, check=True
    )
    assert f"KMP_BLOCKTIME={expected}" in told.stdout + told.stderr
    assert "OMP_WAIT_POLICY=PASSIVE" in told.stdout + told.stderr
