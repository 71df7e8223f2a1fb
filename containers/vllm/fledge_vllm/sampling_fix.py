"""Sampling with speculation on CPU, put right for the vLLM versions that get it wrong.

vLLM 0.32 replaces Triton kernels on CPU by functions of its own. Two of them break every request with a
temperature above 0 as soon as a drafter is loaded:

- `expand_kernel` (each request's temperature, repeated for each of its draft tokens) casts the temperature
  to an integer and writes into a copy that nobody reads: logits are divided by uninitialised memory.
- top-k and top-p stop the engine in a step without draft tokens: a maximum over zero rows.

vLLM calls `register` in each of its processes through the entry point group `vllm.general_plugins`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger("vllm.fledge")

_AFFECTED_MINOR_VERSIONS = ((0, 32),)


def register() -> None:
    """Replace both functions if this vLLM needs it. Safe to call again; does nothing on accelerators."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if version not in _AFFECTED_MINOR_VERSIONS or not current_platform.is_cpu() or HAS_TRITON:
        return

    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    if cpu_triton_utils._expand_kernel_impl is expand:
        return
    # The platform hands out the kernels when a worker starts, which is after plugins are loaded.
    cpu_triton_utils._expand_kernel_impl = expand
    topk_topp_sampler.apply_top_k_top_p_pytorch = skip_without_rows(
        topk_topp_sampler.apply_top_k_top_p_pytorch
    )
    logger.info("Fledge: sampling with speculation on CPU is fixed (vLLM %s)", vllm.__version__)


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # the kernel's own spelling
) -> None:
    """Repeat each request's value for each of its draft tokens.

    Values [0.0, 0.7] with cumulative counts [1, 3], replacing 0 by 1, give [1.0, 0.7, 0.7].

    Args:
        output: [tokens], written in place.
        input_val: [requests], integer or float.
        cu_num_tokens: [requests], cumulative numbers of draft tokens.
    """
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(values, counts)
    output[: len(expanded)].copy_(expanded)


def skip_without_rows(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`apply(logits, k, p, ...)`, left out where logits has no row."""

    def apply_to_rows(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, *args: object, **kwargs: object
    ) -> torch.Tensor:
        return logits if logits.shape[0] == 0 else apply(logits, k, p, *args, **kwargs)

    return apply_to_rows
