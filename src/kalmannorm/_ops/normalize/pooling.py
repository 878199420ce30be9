"""A max pool that keeps one byte for each of its outputs, instead of its input and an index of eight bytes.

The index of torch is the position of the maximum in the image: row · width + column. The byte is its place in the
window. The backward of torch reads the shape of the input, but not its values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops.aten

Pair = tuple[int, int]
Window = tuple[Pair, Pair, Pair, Pair, bool]
"""Size, stride, padding, dilation, and whether a last window may begin inside the padding."""


def fits_bytes(x: Tensor, size: Pair, _: Pair, __: Pair, dilation: Pair, ___: bool) -> bool:
    """Whether every place in a window has a byte of its own, from which its index can be found."""
    return tuple(dilation) == (1, 1) and size[0] * size[1] <= 256 and x.shape[3] >= size[1]


def _corners(y: Tensor, columns: int, stride: Pair, padding: Pair) -> Tensor:
    """The index of the first place of every window, one for each position of y. It may lie in the padding."""
    height, width = y.shape[2:]
    rows = torch.arange(height, device=y.device) * stride[0] - padding[0]
    return rows[:, None] * columns + torch.arange(width, device=y.device) * stride[1] - padding[1]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        y, indices = _ops.max_pool2d_with_indices(x, *window)
        size, stride, padding, *_ = ctx.window = window
        ctx.shape, ctx.strides = x.shape, x.stride()
        inside = indices - _corners(y, x.shape[3], stride, padding)  # row · width + column in the window
        row = inside.div(x.shape[3], rounding_mode="floor")
        ctx.save_for_backward(inside.sub_(row, alpha=x.shape[3] - size[1]).to(torch.uint8))
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        size, stride, padding, *_ = ctx.window
        columns = ctx.shape[3]
        row = places.div(size[1], rounding_mode="floor").long()
        indices = row.mul_(columns - size[1]).add_(places)
        indices += _corners(places, columns, stride, padding)
        x = grad.new_empty_strided(ctx.shape, ctx.strides)
        return _Backward.apply(grad, x, indices, ctx.window), *[None] * len(ctx.window)  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    """The gradient is a selection of values of `grad`, so its own gradient is a selection too."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, indices: Tensor, window: Any) -> Tensor:
        ctx.save_for_backward(indices)
        gradient: Tensor = _ops.max_pool2d_with_indices_backward(grad, x, *window, indices)
        return gradient

    @staticmethod
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return again.flatten(2).gather(2, indices.flatten(2)).view(indices.shape), None, None, None


def max_pool(x: Tensor, *window: Any) -> Tensor:
    """As `F.max_pool2d`. `fits_bytes` must hold."""
    y: Tensor = _MaxPool.apply(x, *window)  # type: ignore[no-untyped-call]
    return y
