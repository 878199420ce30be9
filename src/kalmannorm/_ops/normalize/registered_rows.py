"""The op on rows as a registered op, for compiled models: `kalmannorm::normalize_rows` and its backward.

Rows hold γ, β, the prior's mean and variance, and the gain, (5, G, C): see `propagate/bundle.py`. A norm is then one
node with few inputs. The moments are a result, (4, G, C) in one dimension: those of the posterior, then those of the
observation. They have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmannorm._groups import group_count, group_size, statistics_dtype
from kalmannorm._ops.dispatch import on_current_device, on_device_of, row_kernels_for
from kalmannorm._ops.library import ANY_LAYOUT, below_autograd, register, register_differentiable
from kalmannorm._ops.normalize import registered
from kalmannorm._ops.normalize.aten_rows import AtenRows
from kalmannorm._ops.normalize.row_kernels import Memory, RowKernels, Scratch
from kalmannorm._ops.normalize.rows import registered_backward, through_the_op

KEPT = 1024
"""Norms and shapes for which prepared kernels are kept. After more, all are dropped."""
_PREPARED: dict[tuple[Any, ...], RowKernels | None] = {}


def _key(x: Tensor, rows: Tensor, size: int, eps: float, relu: bool, residual: bool) -> tuple[Any, ...]:
    """What kernels are prepared for."""
    return x.shape, x.stride(), x.dtype, x.device, rows.stride(0), rows.storage_offset() % 4, size, eps, relu, residual


def _kernels(x: Tensor, rows: Tensor, size: int, eps: float, relu: bool, residual: bool) -> RowKernels | None:
    """Prepared kernels. None: PyTorch operations run, or x has gaps."""
    key = _key(x, rows, size, eps, relu, residual)
    if key not in _PREPARED:
        kind = row_kernels_for(x, size)
        usable = kind is not None and kind is not AtenRows and registered.dense(x) is x
        if len(_PREPARED) >= KEPT:
            _PREPARED.clear()
        made = kind(x, size, eps, residual=residual, relu=relu, pitch=rows.stride(0)) if usable and kind else None
        _PREPARED[key] = made
    return _PREPARED[key]


def _forward(
    x: Tensor, rows: Tensor, residual: Tensor | None, size: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    kernels = _PREPARED.get(_key(x, rows, size, eps, relu, residual is not None))
    if kernels is not None and on_current_device(x):
        return _run_forward(kernels, x, rows, residual)
    with on_device_of(x):
        kernels = _kernels(x, rows, size, eps, relu, residual is not None)
        if kernels is not None:
            return _run_forward(kernels, x, rows, residual)
        weight, bias, mean, var, gain = rows.unbind(0)
        y, *parts = registered.forward(registered.dense(x), mean, var, gain, weight, bias, size, eps, residual, relu)
        return y, torch.cat([part.reshape(-1) for part in parts])


def _run_forward(kernels: RowKernels, x: Tensor, rows: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    if residual is not None and residual.stride() != x.stride():
        residual = torch.empty_like(x).copy_(residual)
    moments = rows.new_empty(4 * kernels.groups * x.shape[1])
    return kernels.forward(x, rows, residual, Memory(moments, Scratch()), 0), moments


def _fake_forward(
    x: Tensor, rows: Tensor, residual: Tensor | None, size: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    groups = group_count(x.shape[0], group_size(x.shape[0], size))
    return torch.empty_like(registered.dense(x)), x.new_empty(4 * groups * x.shape[1], dtype=statistics_dtype(x))


def _backward(
    grad_y: Tensor, x: Tensor, rows: Tensor, moments: Tensor, y: Tensor | None, size: int, eps: float, relu: bool,
    residual: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x and of the rows. If y is given, it has the mask of the ReLU. Then the gradient of a residual, the
    masked `grad_y`, follows."""
    kernels = _PREPARED.get(_key(x, rows, size, eps, relu, residual))
    if kernels is not None and on_current_device(x):
        return _run_backward(kernels, grad_y, x, rows, moments, y)
    with on_device_of(x):
        kernels = _kernels(x, rows, size, eps, relu, residual)
        if kernels is not None:
            return _run_backward(kernels, grad_y, x, rows, moments, y)
        kept = moments.view(4, *rows.shape[1:]).unbind(0)
        found = through_the_op(registered.backward, grad_y, registered.dense(x), rows, kept, y, (size, eps, relu))
        return [*found[: 2 if y is None or not residual else 3]]


def _run_backward(
    kernels: RowKernels, grad_y: Tensor, x: Tensor, rows: Tensor, moments: Tensor, y: Tensor | None
) -> list[Tensor]:
    dx, d_rows, d_residual = kernels.backward(grad_y, x, y, rows, Memory(moments, Scratch()), 0)
    return [dx, d_rows] if y is None or d_residual is None else [dx, d_rows, d_residual]


def _fake_backward(
    grad_y: Tensor, x: Tensor, rows: Tensor, moments: Tensor, y: Tensor | None, size: int, eps: float, relu: bool,
    residual: bool,
) -> list[Tensor]:  # fmt: skip
    like = registered.dense(x)
    gradients = [torch.empty_like(like), rows.new_empty(rows.shape)]
    return gradients if y is None or not residual else [*gradients, torch.empty_like(like)]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        x, rows, residual, *ctx.how = given
        y, moments = below_autograd("normalize_rows", *given)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(moments)
        ctx.residual = residual is not None
        # As in `registered`: kernels on a GPU find the mask of a ReLU without a residual from x and β.
        keeps = ctx.how[-1] and (ctx.residual or x.device.type == "cpu")
        ctx.save_for_backward(x, rows, moments, y if keeps else None)
        return y, moments

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, _: None) -> tuple[Any, ...]:
        if grad_y is None:
            return (None,) * 6
        x, rows, moments, y = ctx.saved_tensors
        if torch.is_grad_enabled():
            kept = moments.view(4, *rows.shape[1:]).unbind(0)
            found = through_the_op(registered_backward, grad_y, x, rows, kept, y, tuple(ctx.how))
        else:
            run = torch.ops.kalmannorm.normalize_rows_backward
            found = (*run(grad_y, x, rows, moments, y, *ctx.how, ctx.residual), grad_y)
        return *found[:2], found[2] if ctx.residual else None, None, None, None


_apply: Callable[..., tuple[Tensor, Tensor]] = _Node.apply
_SCHEMA = (
    "(Tensor x, Tensor rows, Tensor? residual, SymInt statistics_batch_size, float eps, bool relu) -> (Tensor, Tensor)"
)
register_differentiable("normalize_rows", _SCHEMA, _forward, _fake_forward, _apply, tags=ANY_LAYOUT)
_SCHEMA = (
    "(Tensor grad_y, Tensor x, Tensor rows, Tensor moments, Tensor? y, SymInt statistics_batch_size, float eps, "
    "bool relu, bool residual) -> Tensor[]"
)
register("normalize_rows_backward", _SCHEMA, _backward, _fake_backward, ANY_LAYOUT)


normalize_rows: Callable[..., tuple[Tensor, Tensor]] = torch.ops.kalmannorm.normalize_rows
"""y, and the moments: (4, G, C), in one dimension."""
