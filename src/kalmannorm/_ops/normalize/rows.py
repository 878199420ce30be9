"""The autograd node of a norm whose parameters are one tensor of rows: two inputs and one output in most models.

It is the fast way through an eager step. Double backward, `torch.func` and tracers of the backward use the registered
op instead, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kalmannorm._ops.normalize.arguments import BackwardInputs, Inputs, Results
from kalmannorm._ops.normalize.recipes import give, keep, plan_of
from kalmannorm._ops.normalize.registered import again, batch_kalman_norm, batch_kalman_norm_backward, watched
from kalmannorm._ops.normalize.row_kernels import Memory, RowKernels, Run


class Normalize(torch.autograd.Function):
    """y from x, rows (5, G, C) and a residual. The moments are written into memory that many norms share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, residual: Tensor | None, run: Run) -> Tensor:
        kernels, memory, start, planned = run
        y = kernels.forward(x, rows, residual, memory, start)
        ctx.run = kernels, memory.scratch, start, None if planned is None else planned[0]
        # The moments are saved as tensors are, so that a backward frees them even if the graph lives on.
        if kernels.keeps_output:
            ctx.save_for_backward(x, rows, memory.moments, *([y] if planned is None else planned[1]))
        else:
            ctx.save_for_backward(x, rows, memory.moments)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kernels, scratch, start, plan = ctx.run
        x, rows, moments, *rest = ctx.saved_tensors
        y = None
        if kernels.keeps_output:
            y = rest[0] if plan is None else plan.take((x, rows, moments, *rest))
        if plan is not None:
            plan.release()
        if grad_y.__class__ is not Tensor or torch.is_grad_enabled() or watched(x):
            how = kernels.size, kernels.eps, kernels.masked
            kept = kernels.moments(moments, start)
            dx, d_rows, d_residual = through_the_op(registered_backward, grad_y, x, rows, kept, y, how)
            gradients: tuple[Tensor | None, ...] = dx, d_rows, d_residual if kernels.residual else None
        else:
            gradients = kernels.backward(grad_y, x, y, rows, Memory(moments, scratch), start)
            if start == 0:  # the first norm of the bundle, so the last of its backward
                scratch.memory = None
        return *gradients, None


def through_the_op(
    backward: Callable[[BackwardInputs], Sequence[Tensor]],
    grad_y: Tensor,
    x: Tensor,
    rows: Tensor,
    moments: Sequence[Tensor],
    y: Tensor | None,
    how: tuple[int, float, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the rows and of the residual. `how` is m, eps, and whether a ReLU follows.

    If y is given, it has the mask of the ReLU. Otherwise the mask is computed from x and β.
    """
    size, eps, relu = how
    if y is not None:
        grad_y, relu = torch.ops.aten.threshold_backward(grad_y, y, 0), False
    weight, bias, mean, var, gain = rows.unbind(0)
    inputs = Inputs(x, mean, var, gain, weight, bias if relu else None, size, eps, None, relu)
    given = BackwardInputs(Results(grad_y, *[None] * 4), inputs, Results(None, *moments), rows.shape[1])
    dx, d_mean, d_var, d_gain, d_weight, d_bias = backward(given)
    return dx, torch.stack([d_weight, d_bias, d_mean, d_var, d_gain]), grad_y


def registered_backward(given: BackwardInputs) -> list[Tensor]:
    """The registered op, which can be differentiated again."""
    found: list[Tensor] = batch_kalman_norm_backward(*given.flat())
    return found


class _Formula:
    """y from x, the rows of a norm and its moments."""

    def __init__(self, kernels: RowKernels, start: int) -> None:
        self.kernels, self.start = kernels, start

    def again(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        x, rows, moments = tensors
        mean, var, observed_mean, _ = self.kernels.moments(moments, self.start)
        size, eps, relu = self.kernels.size, self.kernels.eps, self.kernels.relu
        return again(Inputs(x, None, None, None, rows[0], rows[1], size, eps, residual, relu), mean, var, observed_mean)

    def attached(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        x, rows, _ = tensors
        weight, bias, mean, var, gain = rows.unbind(0)
        how = self.kernels.size, self.kernels.eps, residual, self.kernels.relu
        y: Tensor = batch_kalman_norm(x, mean, var, gain, weight, bias, *how)[0]
        return y


_apply: Callable[..., Tensor] = super(torch.autograd.Function, Normalize).apply
"""`Normalize.apply` without its checks for `torch.func`. The caller has made them."""


def normalize(
    x: Tensor, rows: Tensor, residual: Tensor | None, kernels: RowKernels, memory: Memory, start: int, region: Any
) -> Tensor:
    """y. It gets a recipe for readers in `region`, if one is given."""
    if region is None or not torch.is_grad_enabled():
        return _apply(x, rows, residual, (kernels, memory, start, None))
    planned = plan_of(_Formula(kernels, start), 3, residual, region)
    y = _apply(x, rows, residual, (kernels, memory, start, planned))
    if planned is not None and y.requires_grad:
        plan, rest = planned
        plan.readers += kernels.keeps_output
        give(y, plan, (x, rows, memory.moments, *rest), region)
    elif kernels.keeps_output:
        keep(y, region)
    return y
