"""Where tensors are computed, and how much memory that took."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from drafter.errors import FledgeError

_GIB = 2**30


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """`auto` takes a GPU if there is one.

    Args:
        local_rank: which of this machine's training processes asks: each takes the GPU of its number. None:
            it is alone.

    Raises:
        FledgeError: a GPU is asked for and there is none, or none for this process.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FledgeError(
            f"device {name!r}: {error}", "auto, cpu, cuda or cuda:N", "correct --device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FledgeError(f"device {name!r}", "a CUDA GPU that this PyTorch can use", "use --device cpu")
    return device if local_rank is None or device.type != "cuda" else _own_gpu(device, local_rank)


def _own_gpu(device: torch.device, local_rank: int) -> torch.device:
    """The GPU of one of several processes."""
    count = torch.cuda.device_count()
    if device.index is not None or local_rank >= count:
        raise FledgeError(
            f"device {device} for the process {local_rank} of this machine, which has {count} GPUs",
            "a GPU for each process, named by --device cuda without a number",
            "start as many processes as there are GPUs; CUDA_VISIBLE_DEVICES says which they are",
        )
    return torch.device("cuda", local_rank)


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
