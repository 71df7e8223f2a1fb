"""What this machine is, and how it computes fast: number format, threads. Nothing of torch: settings ask too."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Literal

NumberFormat = Literal["auto", "bfloat16", "float32", "float16"]
_CPU_INFO = Path("/proc/cpuinfo")
# As /proc/cpuinfo spells them on x86 and on ARM.
_MULTIPLIES_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_NVIDIA = Path("/dev/nvidiactl")


@cache
def native_number_format() -> Literal["bfloat16", "float32"]:
    """`bfloat16` on a machine with an NVIDIA GPU or a CPU that multiplies it; else `float32`.

    A CPU without such instructions converts number by number: 15 GFLOP/s in bfloat16 were measured where float32
    ran at 120 (AMD EPYC of 2021, two cores, PyTorch 2.13), and the demo's extraction at 24 tokens/s.
    """
    if _NVIDIA.exists() or _MULTIPLIES_BFLOAT16 & _cpu_flags():
        return "bfloat16"
    return "float32"


def resolve_number_format(name: NumberFormat) -> NumberFormat:
    """`auto` as what this machine multiplies; every other name as it is."""
    return native_number_format() if name == "auto" else name


def openmp_library(prefix: Path) -> Path | None:
    """Intel's OpenMP in a Python environment (package `intel-openmp`); None without one."""
    path = prefix / "lib" / "libiomp5.so"
    return path if path.exists() else None


def prepare_threads() -> None:
    """How torch's threads on a CPU wait for each other. To be called before torch is imported; later it does nothing.

    Not for long: threads that spin take the core from the one that they wait for as soon as anything else
    runs (one other busy process made a training on two cores ten times slower). But a thread that sleeps is
    woken late: a training step on two cores took 1.25 times as long with GNU's OpenMP asleep as with Intel's,
    which spins for a millisecond first. Variables that are set win.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (library := openmp_library(Path(sys.prefix))) is not None:
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # milliseconds
        # Its GOMP_* functions are found before those of the library that torch brings along.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _cpu_flags() -> frozenset[str]:
    """Instruction sets, in the kernel's words; none where there is no Linux."""
    return frozenset(_cpu_line("flags").split() + _cpu_line("Features").split())


def _cpu_line(name: str) -> str:
    """The first value of that name in /proc/cpuinfo; empty when there is none."""
    if not _CPU_INFO.exists():
        return ""
    for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def describe_machine() -> str:
    """Processor, cores, memory and the number format it multiplies, as far as this system tells."""
    processor = _cpu_line("model name") or platform.processor() or platform.machine()
    memory = ""
    if platform.system() == "Linux":
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB memory"
    return f"{processor}, {os.cpu_count()} cores{memory}, {native_number_format()} natively"
