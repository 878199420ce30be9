"""The autograd node of a norm with a learned transition, whose γ, β and gain are one tensor of rows.

It predicts, observes, updates and normalizes. Its results are y and the posterior, (2, G, C), which the next norm
reads. As in `rows.py`, it is the fast way through an eager step. Double backward and tracers of the backward use the
registered op instead, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kalmannorm import _filter as kalman
from kalmannorm._ops.normalize.arguments import Inputs
from kalmannorm._ops.normalize.recipes import give, keep, plan_of
from kalmannorm._ops.normalize.registered import again, batch_kalman_norm, watched
from kalmannorm._ops.normalize.row_kernels import LearnedKernels, Memory, Planned, Transition
from kalmannorm.moments import Moments, closed

Run = tuple[LearnedKernels, Memory, int, Planned | None]
"""As in `row_kernels.py`."""


class Filter(torch.autograd.Function):
    """y and the posterior from x, rows (5, G, C), a residual, the posterior before, the matrix A and the noise r.

    The last three are None for a norm without a prior. All moments are written into memory that many norms share. The
    posterior is a view of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        residual: Tensor | None,
        previous: Any,
        matrix: Any,
        noise: Any,
        run: Run,
    ) -> tuple[Tensor, Tensor]:
        kernels, memory, start, planned = run
        given = None if previous is None else (previous, matrix, noise)
        y, posterior = kernels.filter(x, rows, residual, given, memory, start)
        ctx.run = kernels, memory.scratch, start, None if planned is None else planned[0]
        kept = x, rows, memory.moments, previous, matrix, noise
        if kernels.keeps_output:
            ctx.save_for_backward(*kept, *([y] if planned is None else planned[1]))
        else:
            ctx.save_for_backward(*kept)
        return y, posterior

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_posterior: Tensor) -> tuple[Tensor | None, ...]:
        kernels, scratch, start, plan = ctx.run
        x, rows, moments, previous, matrix, noise, *rest = ctx.saved_tensors
        y = None
        if kernels.keeps_output:
            y = rest[0] if plan is None else plan.take((x, rows, moments, previous, matrix, noise, *rest))
        if plan is not None:
            plan.release()
        if grad_y.__class__ is not Tensor or torch.is_grad_enabled() or watched(x):
            return *_through_the_op(kernels, (x, rows, previous, matrix, noise), y, grad_y, grad_posterior), None
        given = None if previous is None else (previous, matrix, noise)
        dx, d_rows, d_residual, predicted = kernels.differentiate(
            grad_y, grad_posterior, x, y, rows, given, Memory(moments, scratch), start, ctx.needs_input_grad[4]
        )
        if start == 0:  # the first norm of the bundle, so the last of its backward
            scratch.memory = None
        return dx, d_rows, d_residual, *predicted, None


def _plainly(
    kernels: LearnedKernels,
    x: Tensor,
    rows: Tensor,
    given: Sequence[Any],
    residual: Tensor | None,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """y and the posterior through the registered op, which can be differentiated again."""
    weight, bias, mean, var, gain = rows.unbind(0)
    previous, matrix, noise = given
    if previous is not None:
        mean, var, _ = kalman.predict(Moments(*previous.unbind(0)), matrix, noise.abs())
    y, mean, var, _, _ = batch_kalman_norm(x, mean, var, gain, weight, bias, kernels.size, kernels.eps, residual, relu)
    return y, torch.stack([mean, var])


def _through_the_op(
    kernels: LearnedKernels,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    y: Tensor | None,
    grad_y: Tensor,
    grad_posterior: Tensor,
) -> list[Tensor | None]:
    """Gradients of x, rows, residual, the posterior before, matrix and noise.

    If y is given, it has the mask of the ReLU. Otherwise the mask is computed from x and β.
    """
    if y is not None:
        grad_y = torch.ops.aten.threshold_backward(grad_y, y, 0)

    def plainly(x: Tensor, rows: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        return _plainly(kernels, x, rows, given, None, kernels.masked)

    gradients = closed.again(plainly, inputs, (grad_y, grad_posterior))
    if not torch.is_grad_enabled():
        gradients = [None if grad is None else grad.detach() for grad in gradients]
    gradients.insert(2, grad_y if kernels.residual else None)
    return gradients


class _Formula:
    """y from all tensors of a norm, and its moments."""

    def __init__(self, kernels: LearnedKernels, start: int) -> None:
        self.kernels, self.start = kernels, start

    def again(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        x, rows, moments, *_ = tensors
        mean, var, observed_mean, _ = self.kernels.moments(moments, self.start)
        size, eps, relu = self.kernels.size, self.kernels.eps, self.kernels.relu
        return again(Inputs(x, None, None, None, rows[0], rows[1], size, eps, residual, relu), mean, var, observed_mean)

    def attached(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        x, rows, _, *given = tensors
        return _plainly(self.kernels, x, rows, given, residual, self.kernels.relu)[0]


_apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, Filter).apply
"""`Filter.apply` without its checks for `torch.func`. The caller has made them."""

NOTHING = None, None, None


def filtered(
    x: Tensor,
    rows: Tensor,
    residual: Tensor | None,
    given: Transition | None,
    kernels: LearnedKernels,
    memory: Memory,
    start: int,
    region: Any,
) -> tuple[Tensor, Tensor]:
    """y and the posterior. y gets a recipe for readers in `region`, if one is given."""
    if region is None or not torch.is_grad_enabled():
        return _apply(x, rows, residual, *(given or NOTHING), (kernels, memory, start, None))
    planned = plan_of(_Formula(kernels, start), 6, residual, region)
    y, posterior = _apply(x, rows, residual, *(given or NOTHING), (kernels, memory, start, planned))
    if planned is not None and y.requires_grad:
        plan, rest = planned
        plan.readers += kernels.keeps_output
        give(y, plan, (x, rows, memory.moments, *(given or NOTHING), *rest), region)
    elif kernels.keeps_output:
        keep(y, region)
    return y, posterior
