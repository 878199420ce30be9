"""The op on CPUs, in C: see `native.c`. The functions are those of `aten.py`.

Every group and channel is read while it is in a cache: once for its mean, once for its variance, once for y. So y is
computed from x minus the mean of the posterior, and nothing cancels where |x̄| ≫ σ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kalmannorm._groups import cast, group_count, group_size, statistics_dtype
from kalmannorm._ops.native_library import library, threads_for, usable
from kalmannorm._ops.normalize import aten
from kalmannorm._ops.normalize.arguments import Inputs, Results, SettledGrads

ROWS = 5
"""γ, β, the mean and the variance of the prior, the gain, in this order."""


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("examples", "channels", "positions", "size", "last", "relu")),
        ("eps", ctypes.c_double),
        ("strides", (ctypes.c_long * 2) * ROWS),
    ]


class Forward(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("rows", ctypes.c_void_p * ROWS),
        ("y", ctypes.c_void_p),
        ("moments", ctypes.c_void_p),
    ]


class Backward(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("grad", "x", "y", "moments")),
        ("rows", ctypes.c_void_p * ROWS),
        ("grad_moments", ctypes.c_void_p * 4),
        *((name, ctypes.c_void_p) for name in ("dx", "d_residual", "d_rows")),
        *((name, ctypes.c_void_p) for name in ("centre", "rho", "averages", "collected")),  # of a settled norm
    ]


def fits(x: Tensor) -> bool:
    """Whether the kernels can read x: float32 or float64, on a CPU, in a layout without gaps."""
    return usable(x) and x.numel() > 0 and _dense(x) and not x.is_neg()


def readable(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these tensors have memory that the kernels can read.

    Tensors of another device or without memory of their own do not: PyTorch operations support them, or raise.
    """
    return all(
        each is None or (type(each) in (Tensor, nn.Parameter) and each.is_cpu and not each.is_neg()) for each in tensors
    )


def _dense(x: Tensor) -> bool:
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def shape_of(x: Tensor, size: int, eps: float, relu: bool) -> Shape:
    examples, channels = x.shape[:2]
    positions = x.numel() // (examples * channels)
    last = not x.is_contiguous() or positions == 1
    size = min(group_size(examples, size), examples)  # a larger one might not fit into 64 bits
    return Shape(examples, channels, positions, size, last, relu, eps)


def address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def rows_of(shape: Shape, inputs: Inputs | SettledGrads, dtype: torch.dtype) -> list[Tensor | None]:
    """γ, β, prior and gain as the kernels read them. Their strides are written into `shape`."""
    given = (inputs.weight, inputs.bias, inputs.prior_mean, inputs.prior_var, inputs.gain)
    found: list[Tensor | None] = []
    for which, each in enumerate(given):
        row = None if each is None else cast(each, dtype)
        if row is not None:
            # One number for all, (C,), (1, C) or (G, C).
            steps = (0, *row.stride())[-2:] if row.numel() > 1 else (0, 0)
            shape.strides[which][0] = steps[0] if row.dim() > 1 and row.shape[0] > 1 else 0
            shape.strides[which][1] = steps[1] if row.dim() > 0 and row.shape[-1] > 1 else 0
        found.append(row)
    return found


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*map(address, tensors))


def observe(x: Tensor, statistics_batch_size: int) -> tuple[Tensor, Tensor]:
    shape = shape_of(x, statistics_batch_size, 0.0, False)
    moments = _moments(x, statistics_batch_size)
    _library(x).observe(ctypes.byref(shape), x.data_ptr(), moments.data_ptr(), threads_for(x.numel()))
    return moments[2].clone(), moments[3].clone()


def _library(x: Tensor) -> ctypes.CDLL:
    found = library(x.dtype)
    assert found is not None, "see `fits`"
    return found


def _moments(x: Tensor, size: int) -> Tensor:
    groups = group_count(x.shape[0], group_size(x.shape[0], size))
    return x.new_empty((4, groups, x.shape[1]), dtype=statistics_dtype(x))  # on the CPU, whatever the default device


def forward(inputs: Inputs) -> Results:
    x = inputs.x
    if not readable((*inputs[1:6], inputs.residual)):
        return aten.forward(inputs)
    moments = _moments(x, inputs.statistics_batch_size)
    y = _run("forward", inputs, moments)
    return Results(y, *(row.clone() for row in moments.unbind(0)))  # an op may not return views of one tensor


def again(inputs: Inputs, mean: Tensor, var: Tensor, observed_mean: Tensor) -> Tensor:
    """y of a forward that is over, by the same kernels, from x, γ, β, the residual and the moments."""
    if not readable((*inputs[1:6], inputs.residual)):
        return aten.again(inputs, mean, var, observed_mean)
    return _run("again", inputs, torch.stack([mean, var]))


def _run(name: str, inputs: Inputs, moments: Tensor) -> Tensor:
    x, y = inputs.x, torch.empty_like(inputs.x)
    shape = shape_of(x, inputs.statistics_batch_size, inputs.eps, inputs.relu)
    rows = rows_of(shape, inputs, x.dtype)
    residual = None if inputs.residual is None else cast(inputs.residual, x.dtype)
    given = Forward(x.data_ptr(), address(residual), addresses(rows), y.data_ptr(), moments.data_ptr())
    getattr(_library(x), name)(ctypes.byref(shape), ctypes.byref(given), threads_for(x.numel()))
    return y


def backward(grads: Results, inputs: Inputs, results: Results, bias_rows: int) -> list[Tensor]:
    if not readable((*grads, *inputs[1:6], *results)):
        return aten.backward(grads, inputs, results, bias_rows)
    x, prior_mean, prior_var, gain, weight, _, size, eps, _, relu = inputs
    grad_y, *grad_moments = grads
    y, *moments = results
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    grad_y, shape = cast(grad_y, x.dtype), shape_of(x, size, eps, relu)
    rows = rows_of(shape, inputs, x.dtype)
    known = torch.stack(moments)  # type: ignore[arg-type]
    dx, d_rows = torch.empty_like(x), known.new_empty((ROWS, *known.shape[1:]))
    d_residual = None if y is None else torch.empty_like(x)
    further = [None if grad is None else cast(grad, x.dtype).contiguous() for grad in grad_moments]
    given = Backward(
        grad_y.data_ptr(), x.data_ptr(), address(y), known.data_ptr(), addresses(rows),
        addresses(further), dx.data_ptr(), address(d_residual), d_rows.data_ptr(),
    )  # fmt: skip
    _library(x).backward(ctypes.byref(shape), ctypes.byref(given), threads_for(x.numel()))
    d_weight, d_bias, d_mean, d_var, d_gain = d_rows.unbind(0)
    gradients = [dx] if d_residual is None else [dx, d_residual]
    pairs = ((d_mean, prior_mean), (d_var, prior_var), (d_gain, gain), (d_weight, weight))
    gradients += [own(aten.summed(grad, like), grad) for grad, like in pairs if like is not None]
    if bias_rows:
        rows_of_bias = d_bias.sum(0, keepdim=True) if bias_rows < d_bias.shape[0] else d_bias
        gradients.append(own(rows_of_bias, d_bias))
    return gradients


def own(found: Tensor, row: Tensor) -> Tensor:
    """A gradient with memory of its own: an op may not return views of one tensor."""
    return found.clone() if found.data_ptr() == row.data_ptr() else found
