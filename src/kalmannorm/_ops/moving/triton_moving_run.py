"""Launch the kernels of Moving Average Batch Norm, with the functions of `aten_moving.py`.

After the two launches that observe, a forward takes one for y and one that shifts the past. A backward takes two for
sums of g and g x, one for dx, one that shifts the past, and one that sums the gradient rows of γ and β over groups.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kalmannorm._ops.grid import blocks_of, power, processors_of
from kalmannorm._ops.moving import triton_moving as kernels
from kalmannorm._ops.moving.arguments import History, Rows, Settings
from kalmannorm._ops.normalize import triton_backward as gradient
from kalmannorm._ops.normalize.tiling import Launch, Shape, observing, shape_of
from kalmannorm._ops.normalize.triton_run import partial_sums, rooms_for, sum_over_groups, tile_of
from kalmannorm._ops.triton_launching import KEPT, Ready, launch_options
from kalmannorm.moments import Moments

WIDEST = 32
"""The most rows of a window that a program reads at a time."""
SCANNED = 4096
"""The most values that a program checks at a time."""


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, seen: Moments, history: History, settings: Settings
) -> tuple[Tensor, Rows]:
    shape = shape_of(x, settings.size)
    how = observing(shape, processors_of(x), wide=x.dtype == torch.float32)
    window = len(history.past) + 1
    y = torch.empty_like(x)
    mean, moving, r = (torch.empty_like(seen.mean) for _ in range(3))
    own = torch.empty((), device=x.device, dtype=torch.int32)
    launch = forward_launch(shape, how, x.device, window, settings, weight is not None, bias is not None)
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    past, running, groups, batches = history
    launch(x, y, weight, bias, seen.mean, seen.var, past, running, groups, batches, mean, moving, r, own)
    return y, Rows(mean, moving, r, own)


@functools.lru_cache(maxsize=KEPT)
def forward_launch(
    shape: Shape, how: Launch, device: torch.device, window: int, settings: Settings, weight: bool, bias: bool
) -> Ready:
    sizes = shape.N, shape.groups, *shape[1:4], how.splits, how.chunks
    options = tile_of(shape, how, device) | {"K": how.K, "BW": _block(window), "WEIGHT": weight, "BIAS": bias}
    numbers = *sizes, window, settings.warmup_steps, settings.eps
    return Ready(kernels.moving_forward_kernel, _grid(shape, how), numbers, options)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, past: Tensor, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    shape = shape_of(x, settings.size)
    how = observing(shape, processors_of(x), backward=True, wide=x.dtype == torch.float32)
    dx, means = torch.empty_like(x), torch.empty_like(rows.moving)
    partial = partial_sums(shape, how, x.device)
    rooms = rooms_for((weight, bias), rows.moving)
    weight = None if weight is None else weight.contiguous()
    launches = backward_launches(
        shape, how, x.device, len(past) + 1, settings.eps, weight is not None, bias is not None
    )
    launches[0](grad, x, None, None, partial, None, None, rows.mean, rows.moving)
    launches[1](partial, weight, rows.moving, rows.r, means, rooms[0].rows, rooms[1].rows)
    launches[2](grad, x, dx, weight, rows.moving, rows.r, rows.own, means, past)
    _push(past, None, means, None)
    sum_over_groups(rooms)
    return dx, rooms[0].result, rooms[1].result


@functools.lru_cache(maxsize=KEPT)
def backward_launches(
    shape: Shape, how: Launch, device: torch.device, window: int, eps: float, weight: bool, bias: bool
) -> tuple[Ready, ...]:
    sizes, share = (shape.N, shape.groups, *shape[1:4]), (how.splits, how.chunks)
    tile, grid, BC = tile_of(shape, how, device) | {"K": how.K}, _grid(shape, how), 32
    plain = {"WEIGHT": False, "BIAS": False, "RELU": False, "RESIDUAL": False}
    merging = {"K": how.K, "BS": how.merged, "BC": BC, "WEIGHT": weight, "BIAS": bias} | launch_options(device)
    return (
        Ready(gradient.backward_reduce_kernel, grid, (*sizes, *share, 0, 0, eps), tile | plain),
        Ready(
            kernels.moving_merge_kernel, (shape.groups * blocks_of(shape.C, BC),), (*sizes, how.splits, eps), merging
        ),
        Ready(
            kernels.moving_backward_kernel, grid, (*sizes, *share, window, eps),
            tile | {"BW": _block(window), "WEIGHT": weight},
        ),
    )  # fmt: skip


def append(past: Tensor, groups: Tensor, seen: Moments) -> None:
    _push(past, seen.mean, seen.var, groups)


def _push(past: Tensor, mean: Tensor | None, rows: Tensor, groups: Tensor | None) -> None:
    """`past` is shifted in place. With means, `rows` are variances, and the groups are counted."""
    push_launch(*rows.shape, len(past) + 1, rows.device, mean is not None)(past, mean, rows, groups)
    torch.autograd.graph.increment_version([past] if groups is None else [past, groups])


@functools.lru_cache(maxsize=KEPT)
def push_launch(groups: int, channels: int, window: int, device: torch.device, squares: bool) -> Ready:
    BC = min(power(channels), 64)
    scanned = SCANNED if groups * channels > 1024 else 1024
    options = {"BC": BC, "BW": _block(window - 1), "BV": scanned, "SQUARES": squares} | launch_options(device)
    return Ready(kernels.moving_push_kernel, (blocks_of(channels, BC),), (groups, channels, window), options)


def _block(rows: int) -> int:
    return min(power(rows), WIDEST)


def _grid(shape: Shape, how: Launch) -> tuple[int, ...]:
    return (blocks_of(shape.C * how.K, how.BC) * how.splits * shape.groups,)
