"""How a training step is cut up so that it stays within a memory budget.

Legend: n slots of a packed sequence, H hidden size, I width of the gated unit, Q and KV widths of queries and
of keys, L layers, Vd draft vocabulary, e bytes of a number of the compute type.

Memory is a fixed part, a part per slot (the real stream keeps each layer's activations until its backward),
a part per placeholder of the one segment that is computed, and one chunk of logits:

    fixed      16 + e bytes a trained weight (float32 master, gradient, two moments; compute copy), the frozen
               embedding, the teacher's head, and the process itself
    per slot   e * (8H + L * (4H + 3Q + 4KV + 3I) + 12I) + 8L * KV: inputs, what the layers keep, and what passes
               through the one whose backward runs. For SmolLM2's shape in bfloat16 with L = 4 0.12 MiB, and
               0.08 MiB when feed-forwards are computed again (without L * 3I)
    per row    of a segment the same again, and of a chunk 2e * Vd

So memory grows linearly with the length, whatever K and retention are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from drafter.device import process_memory_gb
from drafter.errors import FledgeError
from drafter.model import DrafterConfig
from drafter.two_stream import StepOptions

_GIB = 2**30
_PROCESS_GB = 0.6  # Python and its libraries
_SLACK = 1.15  # what an allocator holds beyond what is in use
_SEGMENT_SIZES = (512, 256, 128, 64, 32)  # chains; more brings no speed
_CHUNK_SIZES = (1024, 512, 256)  # rows of logits


def fit_step(
    config: DrafterConfig,
    num_slots: int,
    num_depths: int,
    dtype: torch.dtype,
    device: torch.device,
    budget_gb: float | None = None,
    num_processes: int = 1,
) -> StepOptions:
    """The fastest way to cut a step of at most `num_slots` slots that fits the budget.

    Args:
        budget_gb: GiB of the whole process, or of the GPU; None: most of what the machine can give now,
            and if that is too little, as little as can be.
        num_processes: that share this memory evenly.

    Raises:
        FledgeError: the stated budget is too small for this length.
    """
    limit_gb = (_available_gb(device) if budget_gb is None else budget_gb) / num_processes
    # A block of more rows costs fewer passes over keys' gradients, and more masked scores.
    default = StepOptions(dtype=dtype, attention_rows=256 if num_slots >= 4096 else 128)
    if device.type == "cuda":
        # Kernels are launched one by one: fewer and larger pieces.
        default = replace(default, attention_rows=1024, attention_columns=4096)
    least_gb = float("inf")
    for keep in (True, False):
        for chains, rows in zip(_SEGMENT_SIZES, (*_CHUNK_SIZES, 256, 256), strict=True):
            options = replace(default, chains_per_segment=chains, rows_per_chunk=rows, keep_feed_forward=keep)
            least_gb = step_memory_gb(config, num_slots, num_depths, options)
            if least_gb <= limit_gb:
                return options
    if budget_gb is None:
        return options
    raise FledgeError(
        f"a memory budget of {budget_gb:.1f} GiB for sequences of {num_slots} tokens"
        + (f" in {num_processes} processes" if num_processes > 1 else ""),
        f"at least {least_gb * num_processes:.1f} GiB with a drafter of {config.num_layers} layers",
        "raise --memory-budget-gb, or lower --max-length-tokens",
    )


def step_memory_gb(config: DrafterConfig, num_slots: int, num_depths: int, options: StepOptions) -> float:
    """An upper estimate of the process's peak memory in a training step, GiB."""
    number = options.dtype.itemsize
    size, heads, width = config.hidden_size, config.heads, config.intermediate_size
    layer = 4 * size + 3 * heads.query_width + 4 * heads.kv_width
    layer += 3 * width if options.keep_feed_forward else 0
    row = number * (4 * size + config.num_layers * layer) + config.num_layers * 8 * heads.kv_width
    passing = 4 * number * 3 * width  # of the layer whose backward runs
    segment = options.chains_per_segment * (num_depths - 1) * (row + passing)
    chunk = options.rows_per_chunk * 3 * number * config.draft_vocab_size
    inputs = num_slots * (number * 4 * size + 32)
    total = fixed_bytes(config, number) + inputs + num_slots * (row + passing) + segment + chunk
    return _PROCESS_GB + _SLACK * total / _GIB


def fixed_bytes(config: DrafterConfig, number: int) -> float:
    """Weights, their gradients, moments and copies, the embedding and the teacher's head."""
    size, heads = config.hidden_size, config.heads
    attention = size * (2 * heads.query_width + 2 * heads.kv_width)
    layers = config.num_layers * (attention + 3 * size * config.intermediate_size)
    trained = layers + 4 * size * size + size * config.draft_vocab_size
    embedding = config.vocab_size * size
    kept = (16 if config.train_embedding else 0) * embedding + number * embedding
    return (16 + number) * trained + kept + number * config.draft_vocab_size * size


def _available_gb(device: torch.device) -> float:
    """Memory that this process may come to hold, GiB."""
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0] / _GIB
    available = _meminfo_available_gb()
    return float("inf") if available is None else 0.8 * available + process_memory_gb()


def _meminfo_available_gb() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None  # no Linux: the defaults, then
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable:")), None)
