"""The autograd node of a norm whose parameters are one tensor of rows: two inputs and one output in most models.

It is the fast way through an eager step. Double backward, `torch.func` and tracers of the backward use the registered
op instead, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kalmannorm._ops.normalize.arguments import BackwardInputs, Inputs, Results
from kalmannorm._ops.normalize.registered import batch_kalman_norm_backward, watched


class RowKernels(Protocol):
    """One norm on x of one shape, prepared: see `triton_rows.py`."""

    keeps_output: bool
    masked: bool
    residual: bool
    values: int
    size: int
    eps: float

    def forward(self, x: Tensor, rows: Tensor, residual: Tensor | None, moments: Tensor, start: int) -> Tensor: ...

    def backward(
        self, grad_y: Tensor, x: Tensor, y: Tensor | None, rows: Tensor, moments: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]: ...


Run = tuple[RowKernels, Tensor, int]
"""The kernels, the memory for the moments, and where those of this norm begin."""


class Normalize(torch.autograd.Function):
    """y from x, rows (5, G, C) and a residual. The moments are written into memory that many norms share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, residual: Tensor | None, run: Run) -> Tensor:
        kernels, moments, start = run
        y = kernels.forward(x, rows, residual, moments, start)
        ctx.kernels, ctx.start = kernels, start
        if kernels.keeps_output:
            ctx.save_for_backward(x, rows, moments, y)
        else:
            ctx.save_for_backward(x, rows, moments)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kernels = ctx.kernels
        x, rows, moments, *rest = ctx.saved_tensors
        y = rest[0] if rest else None
        if grad_y.__class__ is not Tensor or torch.is_grad_enabled() or watched(x):
            gradients = _through_the_op(ctx, grad_y, x, rows, moments, y)
        else:
            gradients = kernels.backward(grad_y, x, y, rows, moments, ctx.start)
        return *gradients, None


def _through_the_op(
    ctx: Any, grad_y: Tensor, x: Tensor, rows: Tensor, moments: Tensor, y: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    kernels = ctx.kernels
    weight, bias, mean, var, gain = rows.unbind(0)
    kept = kernels.moments(moments, ctx.start)
    relu = kernels.masked or kernels.keeps_output
    given = BackwardInputs(
        Results(grad_y, None, None, None, None),
        Inputs(x, mean, var, gain, weight, bias if kernels.masked else None, kernels.size, kernels.eps, None, relu),
        Results(y, *kept),
        rows.shape[1],
    )
    found = list(batch_kalman_norm_backward(*given.flat()))
    dx = found.pop(0)
    d_residual = found.pop(0) if y is not None else grad_y if kernels.residual else None
    d_mean, d_var, d_gain, d_weight, d_bias = found
    return dx, torch.stack([d_weight, d_bias, d_mean, d_var, d_gain]), d_residual


normalize: Callable[..., Tensor] = super(torch.autograd.Function, Normalize).apply
"""`Normalize.apply` without its checks for `torch.func`. The caller has made them."""
