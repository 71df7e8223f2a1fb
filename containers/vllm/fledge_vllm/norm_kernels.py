"""Root-mean-square norms on CPU by vLLM's own kernels, for the vLLM versions that leave them unused there.

vLLM 0.32 has kernels for both norms of a layer in its CPU build and calls them on accelerators only: on CPU each
norm is ten PyTorch operations, 58 to 64 us for one to four tokens of 576 values where the kernel takes 4 to 5
(two cores of an AMD EPYC of 2021), and a model of 30 layers has 61 of them in every step.

vLLM calls `register` in each of its processes through the entry point group `vllm.general_plugins`. A model that
vLLM compiles keeps PyTorch's operations, which the compiler fuses.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger("vllm.fledge")

_AFFECTED_MINOR_VERSIONS = ((0, 32),)


def register() -> None:
    """Let `RMSNorm` use the kernels if this vLLM does not. Safe to call again; does nothing on accelerators."""
    import vllm
    from vllm.platforms import current_platform

    version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if version not in _AFFECTED_MINOR_VERSIONS or not current_platform.is_cpu():
        return

    from vllm.model_executor.layers.layernorm import RMSNorm

    if RMSNorm.forward_cpu is norm:
        return
    current_platform.import_kernels()
    if not all(hasattr(torch.ops._C, name) for name in ("rms_norm", "fused_add_rms_norm")):
        return  # this build of vLLM has none for this processor
    RMSNorm.forward_cpu = norm
    logger.info("Fledge: norms on CPU use vLLM's kernels (vLLM %s)", vllm.__version__)


def norm(
    self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """In place of `RMSNorm.forward_cpu`; what the kernels cannot do is left to PyTorch.

    Args:
        self: vLLM's `RMSNorm`.
        x: [..., hidden].
        residual: as x; added before. Both are written over then, as on accelerators.
    """
    weight = self.weight
    takes_kernel = (
        self.pass_weight
        and self.pass_weight_add
        and self.variance_size_override is None
        and weight.dtype == x.dtype
        and x.is_contiguous()
        and (residual is None or residual.is_contiguous())
    )
    if not takes_kernel:
        return self.forward_native(x, residual)  # type: ignore[no-any-return]
    if residual is None:
        output = torch.empty_like(x)
        torch.ops._C.rms_norm(output, x, weight, self.variance_epsilon)
        return output
    torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
    return x, residual
