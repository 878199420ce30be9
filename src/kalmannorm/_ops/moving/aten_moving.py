"""Moving Average Batch Norm in PyTorch operations, by the formulas in `_norms/moving_average.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kalmannorm._groups import expand_groups, group_size, mean_groups, statistics_dtype
from kalmannorm._ops.moving.arguments import R_MAX, History, Rows, Settings
from kalmannorm.moments import Moments


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, seen: Moments, history: History, settings: Settings
) -> tuple[Tensor, Rows]:
    """y and rows. `seen` are the moments of the groups."""
    size, eps, warmup_steps = settings
    past, running, groups, batches = history
    squares = squares_of(seen)
    own = (groups <= len(past)) | (batches == 0)
    moving = torch.where(own, squares, windowed(past, squares))
    rho = (moving + eps).rsqrt()
    r = (1 / rho * (running + eps).rsqrt()).clamp(1 / R_MAX, R_MAX)
    r = torch.where(batches < warmup_steps - 1, torch.ones_like(r), r)
    gamma = 1 if weight is None else weight.to(rho.dtype)
    y = x * _spread(gamma * r * rho, x, size)
    if bias is not None:
        y = y + bias.to(rho.dtype).view(1, -1, *(1,) * (x.dim() - 2))
    return y.to(x.dtype), Rows(torch.zeros_like(moving), moving, r, own)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, past: Tensor, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, γ and β. The means of g z are appended to `past`, (K - 1, C)."""
    size = settings.size
    over = tuple(range(2, x.dim()))
    grad = grad.to(statistics_dtype(x))
    products = grad * x
    by_example = products.mean(over) if over else products  # (N, C)
    rho = (rows.moving + settings.eps).rsqrt()
    gamma = 1 if weight is None else weight.to(rho.dtype)
    step = gamma * rows.r * rho
    means = step * mean_groups(by_example, group_size(len(x), size))
    average = torch.where(rows.own.bool(), means, windowed(past.to(means.dtype), means))
    push(past, means.to(past.dtype))
    dx = grad * _spread(step, x, size) - x * _spread(rho.square() * average, x, size)
    d_weight = d_bias = None
    positions = x[0, 0].numel()
    if weight is not None:
        scaled = by_example * expand_groups(rows.r * rho, len(x), group_size(len(x), size))
        d_weight = (positions * scaled.sum(0)).to(weight.dtype)
    if bias is not None:
        d_bias = grad.sum((0, *over)).to(bias.dtype)
    return dx.to(x.dtype), d_weight, d_bias


def windowed(past: Tensor, rows: Tensor) -> Tensor:
    """Averages of each row, the rows before it and past rows: (K - 1, C) and (G, C) -> (G, C), over K rows each."""
    window = len(past) + 1
    return F.avg_pool1d(torch.cat([past, rows]).t().unsqueeze(0), window, 1)[0].t()


def append(past: Tensor, groups: Tensor, seen: Moments) -> None:
    """Append the mean squares of groups to the past, and count these groups."""
    squares = squares_of(seen)
    groups.add_(push(past, squares) * len(squares))


@torch.no_grad()
def push(past: Tensor, rows: Tensor) -> Tensor:
    """Append rows to the past, in place, and drop as many. Not if one of them is NaN or Inf. Returns whether it did."""
    finite = torch.isfinite(rows).all()
    joined = torch.cat([past, rows])
    past.copy_(torch.where(finite, joined[len(rows) :], past))
    return finite


def squares_of(seen: Moments) -> Tensor:
    return seen.var + seen.mean.square()


def _spread(rows: Tensor, x: Tensor, size: int) -> Tensor:
    """A row of each group for its examples, in the shape of x."""
    return expand_groups(rows, len(x), group_size(len(x), size)).view(len(x), -1, *(1,) * (x.dim() - 2))
