"""Moments of sums, products, concatenations and selections. Operands are independent.

    x + y     mean_x + mean_y        var_x + var_y
    a x + b   a mean + b             a² var
    x y       mean_x mean_y          var_x var_y + var_x mean_y² + var_y mean_x²

A single row holds for every group and broadcasts to (G, C). A single channel (a spatial gate) broadcasts to all
channels. The full covariance follows the same equations entry by entry, with mean_i mean_j instead of mean². It is kept
if every operand has one, and dropped otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kalmannorm.moments.core import Moments


def _shapes(operands: Sequence[Moments]) -> str:
    return ", ".join(str(tuple(m.mean.shape)) for m in operands)


def _check(name: str, operands: Sequence[Moments]) -> None:
    for what, axis in (("rows", 0), ("channels", 1)):
        wide = [m.mean.shape[axis] for m in operands if m.mean.shape[axis] != 1]
        if any(size != wide[0] for size in wide):  # not a set: an exporter's symbolic size has no hash
            raise ValueError(f"{name}: operands must have the same number of {what}, or 1, got {_shapes(operands)}")


def _outer(values: Tensor) -> Tensor:
    return values.unsqueeze(-1) * values.unsqueeze(-2)


def add(a: Moments, b: Moments, *others: Moments) -> Moments:
    """The sum of independent branches: means add, variances add."""
    operands = (a, b, *others)
    _check("add", operands)
    mean, var, cov = a
    for m in operands[1:]:
        mean, var = mean + m.mean, var + m.var
        cov = None if cov is None or m.cov is None else cov + m.cov
    return Moments(mean, var, cov)


def subtract(a: Moments, b: Moments) -> Moments:
    """The difference of independent branches: means subtract, variances add."""
    _check("subtract", (a, b))
    cov = None if a.cov is None or b.cov is None else a.cov + b.cov
    return Moments(a.mean - b.mean, a.var + b.var, cov)


def _per_channel(name: str, m: Moments, value: float | Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        return value  # a tensor would be copied to the device at every call
    channels = m.mean.shape[-1]
    if value.numel() not in (1, channels):
        raise ValueError(
            f"{name} must be one number or hold one for each of the {channels} channels, got shape {tuple(value.shape)}"
        )
    return value.to(m.mean.dtype).reshape(-1)


def scale(m: Moments, factor: float | Tensor) -> Moments:
    """Multiply by one number, or by one number per channel (C,)."""
    number = _per_channel("scale: `factor`", m, factor)
    cov = None
    if m.cov is not None:
        cov = m.cov * (_outer(number) if isinstance(number, Tensor) else number * number)
    return Moments(m.mean * number, m.var * (number * number), cov)


def shift(m: Moments, offset: float | Tensor) -> Moments:
    """Add one number, or one number per channel (C,)."""
    return Moments(m.mean + _per_channel("shift: `offset`", m, offset), m.var, m.cov)


def concatenate(operands: Sequence[Moments]) -> Moments:
    """Concatenate channels. Single rows broadcast to the number of rows. Covariances become diagonal blocks."""
    operands = list(operands)
    if not operands:
        raise ValueError("concatenate: `operands` must hold at least one Moments, got none")
    rows = max(m.mean.shape[0] for m in operands)
    if any(m.mean.shape[0] not in (1, rows) for m in operands):
        raise ValueError(f"concatenate: operands must have the same number of rows, or 1, got {_shapes(operands)}")
    mean = torch.cat([m.mean.expand(rows, -1) for m in operands], 1)
    var = torch.cat([m.var.expand(rows, -1) for m in operands], 1)
    blocks = [m.cov for m in operands if m.cov is not None]
    if len(blocks) < len(operands):
        return Moments(mean, var)
    cov, start = mean.new_zeros(rows, mean.shape[1], mean.shape[1]), 0
    for block in blocks:
        end = start + block.shape[-1]
        pad = (start, mean.shape[1] - end, start, mean.shape[1] - end)
        cov, start = cov + torch.nn.functional.pad(block, pad), end
    return Moments(mean, var, cov)


def product(a: Moments, b: Moments) -> Moments:
    """The product of independent branches, such as a feature and its gate."""
    _check("product", (a, b))
    var = a.var * b.var + a.var * b.mean.square() + b.var * a.mean.square()
    cov = None
    if a.cov is not None and b.cov is not None:
        cov = a.cov * b.cov + a.cov * _outer(b.mean) + b.cov * _outer(a.mean)
    return Moments(a.mean * b.mean, var, cov)


def pooling(m: Moments) -> Moments:
    """Through average or max pooling: unchanged.

    This is an approximation. Averaging n independent values divides their variance by n, and a maximum raises the mean.
    But neighbouring values in a pooling window are correlated, and moments of single values do not say how much.
    """
    return m


def flatten(m: Moments, positions: int) -> Moments:
    """Repeat each channel `positions` times, as in `torch.flatten(x, 1)` of (N, C, *) with that many positions.

    A covariance is dropped, because the covariance between positions is not known.
    """
    if positions < 1:
        raise ValueError(f"flatten: `positions` must be at least 1, the number of pixels in a map, got {positions}")
    mean, var = (part.unsqueeze(2).expand(-1, -1, positions).flatten(1) for part in (m.mean, m.var))
    return Moments(mean, var)


def select(m: Moments, index: slice | Sequence[int] | Tensor) -> Moments:
    """Select or reorder channels. `index` is a slice, a list of channels, a tensor of channels, or a mask."""
    if isinstance(index, int):
        raise TypeError(f"select: `index` must be a slice, a list or a tensor of channels, got {index}; use [{index}]")
    which = index if isinstance(index, (slice, Tensor)) else list(index)
    cov = None if m.cov is None else m.cov[:, which][:, :, which]
    return Moments(m.mean[:, which], m.var[:, which], cov)
