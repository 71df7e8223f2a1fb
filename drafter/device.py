"""Where tensors are computed, and how much memory that took."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from drafter.errors import FledgeError

_GIB = 2**30


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one.

    Raises:
        FledgeError: a GPU is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FledgeError(
            f"device {name!r}: {error}", "auto, cpu, cuda or cuda:N", "correct --device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FledgeError(f"device {name!r}", "a CUDA GPU that this PyTorch can use", "use --device cpu")
    return device


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far, GiB: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB


def process_memory_gb() -> float:
    """Resident memory of this process now, GiB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / _GIB
