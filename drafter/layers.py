"""Linear maps, norms and the gated unit with float32 master weights and a compute type of their own.

Shapes: R rows, I and O features in and out.

Autocast would cast every weight in every call. Here a weight's copy in the compute type is made once per
optimizer step (`ComputeWeights`), and each backward adds its gradient to the float32 master in float32, so
that many segments do not round each other away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ComputeWeights:
    """Copies of master weights in the compute type; renewed when an optimizer changed the masters.

    Several masters asked for together are stacked by rows, so that q, k and v (or gate and up) are one
    product, while the checkpoint keeps their separate names.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copies: dict[tuple[int, ...], tuple[tuple[int, ...], Tensor]] = {}

    def of(self, *masters: Tensor) -> Tensor:
        """The stacked copy of `masters`, outside any graph."""
        key = tuple(id(master) for master in masters)
        versions = tuple(master._version for master in masters) + tuple(m.data_ptr() for m in masters)
        known = self._copies.get(key)
        if known is not None and known[0] == versions:
            return known[1]
        with torch.no_grad():
            stacked = masters[0] if len(masters) == 1 else torch.cat(masters)
            copy = stacked.detach().to(self.dtype)
        self._copies[key] = (versions, copy)
        return copy

    def linear(self, x: Tensor, *masters: Tensor) -> Tensor:
        """`x` [R, I] through the stacked masters [O, I], without bias."""
        return _Linear.apply(x, self.of(*masters), *masters)


class _Linear(torch.autograd.Function):
    """Matrix product with a copy; its weight gradient goes to the masters in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Tensor, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, copy)
        ctx.sizes = [len(master) for master in masters]
        return F.linear(x, copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, copy = ctx.saved_tensors
        gradient = gradients[0]
        by_input = gradient @ copy if ctx.needs_input_grad[0] else None
        by_weight = (gradient.t() @ x).float().split(ctx.sizes)
        return by_input, None, *by_weight


class _RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight, computed in float32; with `residual`, of x + residual, which is returned too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        wide = total.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(total, scale, weight)
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)  # the sum often has no gradient of its own
        return (wide * scale).mul_(weight).to(x.dtype), total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, weight = ctx.saved_tensors
        by_output = gradients[0].float()
        normed = total * scale  # float32 by promotion
        by_weight = (by_output * normed).sum(0) if ctx.needs_input_grad[2] else None
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            return None, None, by_weight, None
        by_normed = by_output * weight
        mean = (by_normed * normed).mean(-1, keepdim=True)
        by_total = by_normed.sub_(normed.mul_(mean)).mul_(scale).to(total.dtype)
        if gradients[1] is not None:
            by_total = by_total + gradients[1]
        return by_total, by_total if ctx.has_residual else None, by_weight, None


class RmsNorm(nn.Module):
    """Root-mean-square norm with a float32 master weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm of `x` [R, size]."""
        return _RmsNorm.apply(x, None, self.weight, self.eps)[0]

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of `x + residual`, and that sum as the new residual."""
        return _RmsNorm.apply(x, residual, self.weight, self.eps)


class _GatedUnit(torch.autograd.Function):
    """silu(gate) * up of a joint projection; keeps only the projection for the backward."""

    @staticmethod
    def forward(ctx: Any, projection: Tensor) -> Tensor:
        ctx.save_for_backward(projection)
        gate, up = projection.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (projection,) = ctx.saved_tensors
        gate, up = projection.chunk(2, dim=-1)
        result = torch.empty_like(projection)
        by_gate, by_up = result.chunk(2, dim=-1)
        torch.mul(gradients[0], F.silu(gate), out=by_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=by_gate)
        return result


def gated_unit(projection: Tensor) -> Tensor:
    """silu(gate) * up, [R, I] from the joint projection [R, 2I]."""
    return _GatedUnit.apply(projection)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, keeping only `x`: the backward runs it again."""
    if not torch.is_grad_enabled():
        return function(x)
    result: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return result
