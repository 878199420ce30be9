"""The autograd node of a norm whose parameters are one tensor of rows: two inputs and one output in most models.

It is the fast way through an eager step. Double backward, `torch.func` and tracers of the backward use the registered
op instead, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmannorm._ops.normalize.arguments import BackwardInputs, Inputs, Results
from kalmannorm._ops.normalize.registered import batch_kalman_norm_backward, watched
from kalmannorm._ops.normalize.row_kernels import Memory, RowKernels, Run


class Normalize(torch.autograd.Function):
    """y from x, rows (5, G, C) and a residual. The moments are written into memory that many norms share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, residual: Tensor | None, run: Run) -> Tensor:
        kernels, memory, start = run
        y = kernels.forward(x, rows, residual, memory, start)
        ctx.run = kernels, memory.scratch, start
        # The moments are saved as tensors are, so that a backward frees them even if the graph lives on.
        if kernels.keeps_output:
            ctx.save_for_backward(x, rows, memory.moments, y)
        else:
            ctx.save_for_backward(x, rows, memory.moments)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kernels, scratch, start = ctx.run
        x, rows, moments, *rest = ctx.saved_tensors
        y = rest[0] if rest else None
        if grad_y.__class__ is not Tensor or torch.is_grad_enabled() or watched(x):
            gradients = _through_the_op(kernels, grad_y, x, rows, y, kernels.moments(moments, start))
        else:
            gradients = kernels.backward(grad_y, x, y, rows, Memory(moments, scratch), start)
            if start == 0:  # the first norm of the bundle, so the last of its backward
                scratch.memory = None
        return *gradients, None


def _through_the_op(
    kernels: RowKernels, grad_y: Tensor, x: Tensor, rows: Tensor, y: Tensor | None, kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    weight, bias, mean, var, gain = rows.unbind(0)
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
    return dx, torch.stack([d_weight, d_bias, d_mean, d_var, d_gain]), d_residual if kernels.residual else None


normalize: Callable[..., Tensor] = super(torch.autograd.Function, Normalize).apply
"""`Normalize.apply` without its checks for `torch.func`. The caller has made them."""
