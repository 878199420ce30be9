"""The op on rows as a registered op, for compiled models: `kalmannorm::normalize_rows` and its backward.

Rows hold γ, β, the prior's mean and variance, and the gain, (5, G, C): see `propagate/bundle.py`. A norm is then one
node with few inputs. The moments are a result, (4, G, C): those of the posterior, then those of the observation. They
have no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmannorm._groups import group_count, group_size, statistics_dtype
from kalmannorm._ops.dispatch import on_device_of, row_kernels_for
from kalmannorm._ops.normalize import registered
from kalmannorm._ops.normalize.aten_rows import AtenRows
from kalmannorm._ops.normalize.row_kernels import Memory, RowKernels, Scratch
from kalmannorm._ops.normalize.rows import registered_backward, through_the_op

KEPT = 1024
"""Norms and shapes for which prepared kernels are kept. After more, all are dropped."""
_PREPARED: dict[tuple[Any, ...], RowKernels] = {}

torch.library.define(
    "kalmannorm::normalize_rows",
    "(Tensor x, Tensor rows, Tensor? residual, SymInt statistics_batch_size, float eps, bool relu) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "kalmannorm::normalize_rows_backward",
    "(Tensor grad_y, Tensor x, Tensor rows, Tensor moments, Tensor? y, SymInt statistics_batch_size, float eps, "
    "bool relu, bool residual) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _kernels(x: Tensor, rows: Tensor, size: int, eps: float, relu: bool, residual: bool) -> RowKernels | None:
    """Prepared kernels. None: only `registered` can do it."""
    key = x.shape, x.stride(), x.dtype, x.device, rows.stride(0), size, eps, relu, residual
    if key not in _PREPARED:
        kind = row_kernels_for(x, size)
        if kind is None or kind is AtenRows:
            return None
        if len(_PREPARED) >= KEPT:
            _PREPARED.clear()
        _PREPARED[key] = kind(x, size, eps, residual=residual, relu=relu, pitch=rows.stride(0))
    return _PREPARED[key]


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=registered.memory_format_of(x))


def _normalize_rows(
    x: Tensor, rows: Tensor, residual: Tensor | None, size: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    x = _dense(x)
    if residual is not None and residual.stride() != x.stride():
        residual = torch.empty_like(x).copy_(residual)
    with on_device_of(x):
        kernels = _kernels(x, rows, size, eps, relu, residual is not None)
        if kernels is not None:
            moments = rows.new_empty((4, kernels.groups, x.shape[1]))
            return kernels.forward(x, rows, residual, Memory(moments.view(-1), Scratch()), 0), moments
        weight, bias, mean, var, gain = rows.unbind(0)
        y, *parts = registered.forward(x, mean, var, gain, weight, bias, size, eps, residual, relu)
        return y, torch.stack(parts)


torch.library.impl("kalmannorm::normalize_rows", "default", _normalize_rows)


def _fake_normalize_rows(
    x: Tensor, rows: Tensor, residual: Tensor | None, size: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    groups = group_count(x.shape[0], group_size(x.shape[0], size))
    return torch.empty_like(_dense(x)), x.new_empty((4, groups, x.shape[1]), dtype=statistics_dtype(x))


torch.library.register_fake("kalmannorm::normalize_rows", _fake_normalize_rows)


def _normalize_rows_backward(
    grad_y: Tensor, x: Tensor, rows: Tensor, moments: Tensor, y: Tensor | None, size: int, eps: float, relu: bool,
    residual: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, of the rows, and of the residual if it is not `grad_y` itself."""
    x = _dense(x)
    with on_device_of(x):
        kernels = _kernels(x, rows, size, eps, relu, residual)
        if kernels is not None:
            dx, d_rows, d_residual = kernels.backward(grad_y, x, y, rows, Memory(moments.view(-1), Scratch()), 0)
            return [dx, d_rows] if y is None or d_residual is None else [dx, d_rows, d_residual]
        found = through_the_op(registered.backward, grad_y, x, rows, moments.unbind(0), y, (size, eps, relu))
        return [*found[: 2 if y is None else 3]]


torch.library.impl("kalmannorm::normalize_rows_backward", "default", _normalize_rows_backward)


def _fake_normalize_rows_backward(
    grad_y: Tensor, x: Tensor, rows: Tensor, moments: Tensor, y: Tensor | None, size: int, eps: float, relu: bool,
    residual: bool,
) -> list[Tensor]:  # fmt: skip
    like = _dense(x)
    gradients = [torch.empty_like(like), rows.new_empty(rows.shape)]
    return gradients if y is None else [*gradients, torch.empty_like(like)]


torch.library.register_fake("kalmannorm::normalize_rows_backward", _fake_normalize_rows_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, rows, residual, *ctx.settings = inputs
    y, moments = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(moments)
    ctx.residual = residual is not None
    # As in `registered`: kernels on a GPU find the mask of a ReLU without a residual from x and β.
    keeps = ctx.settings[-1] and (ctx.residual or x.device.type == "cpu")
    ctx.save_for_backward(x, rows, moments, y if keeps else None)


def _differentiate(ctx: Any, grad_y: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad_y is None:
        return (None,) * 6
    x, rows, moments, y = ctx.saved_tensors
    size, eps, relu = ctx.settings
    if torch.is_grad_enabled():
        found = through_the_op(registered_backward, grad_y, x, rows, moments.unbind(0), y, (size, eps, relu))
        return *found[:2], found[2] if ctx.residual else None, None, None, None
    dx, d_rows, *rest = torch.ops.kalmannorm.normalize_rows_backward(
        grad_y, x, rows, moments, y, size, eps, relu, ctx.residual
    )
    d_residual = (rest[0] if rest else grad_y) if ctx.residual else None
    return dx, d_rows, d_residual, None, None, None


torch.library.register_autograd("kalmannorm::normalize_rows", _differentiate, setup_context=_save)


def normalize_rows(
    x: Tensor, rows: Tensor, residual: Tensor | None, statistics_batch_size: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """y, and the moments (4, G, C)."""
    found: tuple[Tensor, Tensor] = torch.ops.kalmannorm.normalize_rows(
        x, rows, residual, statistics_batch_size, eps, relu
    )
    return found
