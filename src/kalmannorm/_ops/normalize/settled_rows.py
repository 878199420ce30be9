"""The autograd node of a settled norm on the short way. Its parameters are one tensor of rows, as in `rows.py`.

A settled norm is at the end of its closing phase: see `_norms/settled.py`. The gradient is that of no function, so
there is no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmannorm._ops.normalize import registered_settled
from kalmannorm._ops.normalize.aten_settled_rows import through_the_op
from kalmannorm._ops.normalize.registered import watched
from kalmannorm._ops.normalize.row_kernels import Expected, Memory, Pair, SettledRowKernels


class Settle(torch.autograd.Function):
    """y from x, rows (5, G, C) and a residual. The moments are written into memory that many norms share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, residual: Tensor | None, run: Any) -> Tensor:
        kernels, memory, start, running, expected = run
        y = kernels.settle(x, rows, residual, running, memory, start)
        ctx.run = kernels, memory.scratch, start, expected
        # As in `rows.py`: a backward frees what was saved, even if the graph lives on.
        if kernels.keeps_output:
            ctx.save_for_backward(x, rows, memory.moments, y)
        else:
            ctx.save_for_backward(x, rows, memory.moments)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return (_refusing if torch.is_grad_enabled() else _differentiated)(ctx, grad_y)


def _differentiated(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    kernels, scratch, start, expected = ctx.run
    x, rows, moments, *rest = ctx.saved_tensors
    saved = x, rest[0] if rest else None, rows, expected
    if grad_y.__class__ is not Tensor or watched(x):
        gradients = through_the_op(kernels, grad_y, saved, moments, start, registered_settled.backward)
    else:
        memory = Memory(moments, scratch)
        gradients = kernels.differentiate(grad_y, saved, memory, start)
        if start == 0:  # the first norm of the bundle, so the last of its backward
            scratch.memory = None
    return *gradients, None


_refusing: Callable[..., tuple[Tensor | None, ...]] = once_differentiable(_differentiated)
"""With `create_graph=True` it raises an error when its results are differentiated. It takes longer."""


_apply: Callable[..., Tensor] = super(torch.autograd.Function, Settle).apply
"""`Settle.apply` without its checks for `torch.func`. The caller has made them."""


def normalize_settled(
    x: Tensor,
    rows: Tensor,
    residual: Tensor | None,
    kernels: SettledRowKernels,
    memory: Memory,
    start: int,
    running: Pair,
    expected: Expected,
) -> Tensor:
    """y. `running` are mean and variance. They and the averages are those of this forward."""
    return _apply(x, rows, residual, (kernels, memory, start, running, expected))
