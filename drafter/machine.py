"""What this machine is, and which number format it multiplies fast. Nothing of torch: settings ask too."""

from __future__ import annotations

import os
import platform
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
