"""The op with Triton kernels, forward and backward, with the arguments and results of `aten.py`.

Launches of a forward: 1 on chip, 2 streamed. Launches of a backward: 1 or 2, one more to sum the rows of parameters
over groups, and one more if the gain is a single number. Gradients have the shapes and dtypes of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.grid import blocks_of, power, processors_of
from kalmannorm._ops.normalize import triton_again
from kalmannorm._ops.normalize import triton_backward as gradient
from kalmannorm._ops.normalize import triton_forward as norm
from kalmannorm._ops.normalize import triton_on_chip as held
from kalmannorm._ops.normalize.arguments import Inputs, Results
from kalmannorm._ops.normalize.tiling import Launch, Shape, launch_for, observing, shape_of
from kalmannorm._ops.triton_launching import KEPT, Ready, launch_options, ready


def forward(inputs: Inputs) -> Results:
    """As `aten.forward`."""
    x, prior_mean, prior_var, gain, weight, bias, statistics_batch_size, eps, residual, relu = inputs
    shape = shape_of(x, statistics_batch_size)
    adds = residual is not None
    how = launch_for(shape, processors_of(x), residual=adds, wide=x.dtype == torch.float32)
    parameters, row_strides = laid_out(weight, bias, prior_mean, prior_var, gain)
    launches = forward_launches(shape, how, x.device, row_strides, eps, relu, adds)
    y = torch.empty_like(x)
    # Separate tensors, because results of an op may not share memory.
    mean = torch.empty((shape.groups, shape.C), device=x.device, dtype=torch.float32)
    moments = mean, torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(mean)
    if how.splits == 0:
        launches[0](x, y, residual, *parameters, *moments)
        return Results(y, *moments)
    partial = partial_sums(shape, how, x.device)
    count = torch.empty((how.splits, shape.groups), device=x.device, dtype=torch.float32)
    launches[0](x, partial, count)
    launches[1](x, y, residual, partial, count, *parameters, *moments)
    return Results(y, *moments)


@functools.lru_cache(maxsize=KEPT)
def forward_launches(
    shape: Shape, how: Launch, device: torch.device, row_strides: RowStrides, eps: float, relu: bool, residual: bool
) -> tuple[Ready, ...]:
    sizes, rows = (shape.N, shape.groups, *shape[1:4]), row_strides.numbers
    options = tile_of(shape, how, device) | {
        "PRIOR": row_strides.prior_mean is not None,
        "WEIGHT": row_strides.weight is not None,
        "BIAS": row_strides.bias is not None,
        "RELU": relu,
        "RESIDUAL": residual,
    }
    blocks = blocks_of(shape.C * how.K, how.BC) * shape.groups
    if how.held:
        return (Ready(held.held_forward_kernel, (blocks,), (*sizes, *rows, eps), options),)
    if how.splits == 0:
        numbers = *sizes, how.chunks, *rows, eps
        return (Ready(norm.forward_kernel, (blocks,), numbers, options | {"ONCE": how.once}),)
    numbers = *sizes, how.splits, how.chunks, *rows, eps
    apply = Ready(norm.apply_kernel, (blocks * how.splits,), numbers, options | {"K": how.K, "BS": how.merged})
    return reducing(shape, how, device), apply


@functools.lru_cache(maxsize=KEPT)
def reducing(shape: Shape, how: Launch, device: torch.device) -> Ready:
    numbers = shape.N, shape.groups, *shape[1:4], how.splits, how.chunks
    grid = (blocks_of(shape.C * how.K, how.BC) * how.splits * shape.groups,)
    return Ready(norm.reduce_kernel, grid, numbers, tile_of(shape, how, device) | {"K": how.K, "ONCE": how.once})


def partial_sums(shape: Shape, how: Launch, device: torch.device) -> Tensor:
    return torch.empty((2, how.splits, shape.groups, how.K, shape.C), device=device, dtype=torch.float32)


def observe(x: Tensor, statistics_batch_size: int) -> tuple[Tensor, Tensor]:
    """As `aten.observe`: the first of the streamed launches, then a launch that merges the shares."""
    shape = shape_of(x, statistics_batch_size)
    how = observing(shape, processors_of(x), wide=x.dtype == torch.float32)
    G, C = shape.groups, shape.C
    mean, var = (torch.empty((G, C), device=x.device, dtype=torch.float32) for _ in range(2))
    partial = partial_sums(shape, how, x.device)
    count = torch.empty((how.splits, G), device=x.device, dtype=torch.float32)
    reducing(shape, how, x.device)(x, partial, count)
    BC = 32
    ready(norm.observe_kernel, (G, blocks_of(C, BC)), x.device, K=how.K, BS=how.merged, BC=BC)(
        partial, count, mean, var, G, C, how.splits
    )
    return mean, var


def again(inputs: Inputs, mean: Tensor, var: Tensor, observed_mean: Tensor) -> Tensor:
    """As `aten.again`, in one launch."""
    x, _, _, _, weight, bias, statistics_batch_size, eps, residual, relu = inputs
    shape = shape_of(x, statistics_batch_size)
    how = observing(shape, processors_of(x), wide=x.dtype == torch.float32)
    (weight, bias, *_), row_strides = laid_out(weight, bias, None, None, None)
    y = torch.empty_like(x)
    if residual is not None and residual.stride() != x.stride():
        residual = torch.empty_like(x).copy_(residual)
    launch = again_launch(shape, how, x.device, row_strides, eps, relu, residual is not None)
    launch(x, y, residual, weight, bias, mean, var)
    return y


@functools.lru_cache(maxsize=KEPT)
def again_launch(
    shape: Shape, how: Launch, device: torch.device, row_strides: RowStrides, eps: float, relu: bool, residual: bool
) -> Ready:
    numbers = shape.N, shape.groups, *shape[1:4], how.splits, how.chunks, *row_strides.numbers[:2], eps
    options = tile_of(shape, how, device) | {
        "K": how.K,
        "WEIGHT": row_strides.weight is not None,
        "BIAS": row_strides.bias is not None,
        "RELU": relu,
        "RESIDUAL": residual,
    }
    grid = (blocks_of(shape.C * how.K, how.BC) * how.splits * shape.groups,)
    return Ready(triton_again.again_kernel, grid, numbers, options)


def backward(grads: Results, inputs: Inputs, results: Results, bias_rows: int) -> list[Tensor]:
    """As `aten.backward`."""
    x, prior_mean, prior_var, gain, weight, bias, statistics_batch_size, eps, _, relu = inputs
    grad_y, *grad_moments = grads
    y, *moments = results
    rows = moments[0]
    assert rows is not None
    shape = shape_of(x, statistics_batch_size)
    how = launch_for(shape, processors_of(x), backward=True, residual=y is not None, wide=x.dtype == torch.float32)
    parameters, row_strides = laid_out(weight, bias, prior_mean, prior_var, gain)
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    grad_posterior, grad_observation = pair(grad_moments[:2]), pair(grad_moments[2:])
    arrived = grad_posterior[0] is not None, grad_observation[0] is not None
    launches = backward_launches(shape, how, x.device, row_strides, eps, relu, y is not None, bias_rows > 0, arrived)
    dx = torch.empty_like(x)
    d_residual = None if y is None else torch.empty_like(x)
    rooms = rooms_for((weight, prior_mean, prior_var, gain), rows)
    bias_shape = bias_rows, shape.C
    rooms.insert(1, room_of(bias_shape, bias_rows * shape.C, torch.float32, rows) if bias_rows else NO_ROOM)
    rows_of_groups = *moments, *grad_posterior, *grad_observation, *[room.rows for room in rooms]
    if how.splits == 0:
        launches[0](grad_y, x, y, dx, d_residual, *parameters, *rows_of_groups)
    else:
        partial = partial_sums(shape, how, x.device)
        launches[0](grad_y, x, y, d_residual, partial, *parameters[:2], *moments[:2])
        launches[1](grad_y if d_residual is None else d_residual, x, dx, partial, *parameters, *rows_of_groups)
    sum_over_groups(rooms)
    d_weight, d_bias, d_prior_mean, d_prior_var, d_gain = [room.result for room in rooms]
    if gain is not None and d_gain is None:
        assert rooms[-1].rows is not None
        d_gain = rooms[-1].rows.sum().view(gain.shape).to(gain.dtype)
    gradients = dx, d_residual, d_prior_mean, d_prior_var, d_gain, d_weight, d_bias
    return [t for t in gradients if t is not None]


@functools.lru_cache(maxsize=KEPT)
def backward_launches(
    shape: Shape,
    how: Launch,
    device: torch.device,
    row_strides: RowStrides,
    eps: float,
    relu: bool,
    residual: bool,
    to_bias: bool,
    arrived: tuple[bool, bool],
) -> tuple[Ready, ...]:
    sizes, rows = (shape.N, shape.groups, *shape[1:4]), row_strides.numbers
    # With a residual, the mask of the ReLU comes from the output.
    affine = {
        "WEIGHT": row_strides.weight is not None,
        "BIAS": row_strides.bias is not None,
        "RELU": relu and not residual,
    }
    looking = tile_of(shape, how, device) | affine
    options = looking | {
        "PRIOR": row_strides.prior_mean is not None,
        "TO_BIAS": to_bias,
        "AT_POSTERIOR": arrived[0],
        "AT_OBSERVATION": arrived[1],
    }
    blocks = blocks_of(shape.C * how.K, how.BC) * shape.groups
    masked = {"RESIDUAL": residual}
    if how.held:
        return (Ready(held.held_backward_kernel, (blocks,), (*sizes, *rows, eps), options | masked),)
    if how.splits == 0:
        return (Ready(gradient.backward_kernel, (blocks,), (*sizes, how.chunks, *rows, eps), options | masked),)
    grid, share, abreast = (blocks * how.splits,), (how.splits, how.chunks), {"K": how.K}
    merging = options | abreast | {"BS": how.merged}
    return (
        Ready(gradient.backward_reduce_kernel, grid, (*sizes, *share, *rows[:2], eps), looking | abreast | masked),
        Ready(gradient.backward_apply_kernel, grid, (*sizes, *share, *rows, eps), merging),
    )


def tile_of(shape: Shape, how: Launch, device: torch.device) -> dict[str, Any]:
    tile = {"BR": how.BR, "BC": how.BC, "V": shape.abreast(how.K).vector, "num_warps": how.warps}
    tile |= {"CHANNELS_LAST": shape.channels_last, "EVEN": how.even(shape)}
    return tile | launch_options(device) | ({} if how.held else {"STAGES": how.stages})


class Room(NamedTuple):
    """Memory for a parameter's gradient: rows per group (G, C), which kernels write, and the final gradient."""

    rows: Tensor | None
    result: Tensor | None
    sums_rows: bool
    """Whether `result` must still be summed from the rows. Otherwise it is a view of the rows, or a single number."""


NO_ROOM = Room(None, None, False)


def rooms_for(parameters: Sequence[Tensor | None], like: Tensor) -> list[Room]:
    """The rooms of these parameters. `like` has rows (G, C) in float32."""
    return [
        NO_ROOM if parameter is None else room_of(parameter.shape, parameter.numel(), parameter.dtype, like)
        for parameter in parameters
    ]


def room_of(shape: tuple[int, ...], values: int, dtype: torch.dtype, like: Tensor) -> Room:
    """The room of a parameter with this shape and so many values."""
    groups, channels = like.shape
    if values == groups * channels:
        rows = torch.empty_like(like, dtype=dtype)
        return Room(rows, rows if shape == like.shape else rows.view(shape), False)
    result = None if values < channels else torch.empty(shape, device=like.device, dtype=dtype)
    return Room(torch.empty_like(like), result, values == channels)


def sum_over_groups(rooms: Sequence[Room]) -> None:
    """Sum the rows of all rooms that need it, in one launch."""
    summing = [room for room in rooms if room.sums_rows]
    if not summing:
        return
    assert summing[0].rows is not None
    G, C = summing[0].rows.shape
    missing = [None] * (5 - len(summing))
    sources, targets = [room.rows for room in summing], [room.result for room in summing]
    BG, BC = min(power(G), 64), 16
    grid = blocks_of(C, BC), len(summing)
    ready(gradient.sum_over_groups_kernel, grid, summing[0].rows.device, COUNT=len(summing), BG=BG, BC=BC)(
        *sources, *missing, *targets, *missing, G, C
    )


def try_out(device: torch.device) -> None:
    """Build and launch the smallest kernel. Raises if Triton cannot."""
    rows = torch.zeros((2, 1), device=device)
    sum_over_groups([Room(rows, torch.empty(1, device=device), True)])


class RowStrides(NamedTuple):
    """Strides of parameters from one group's row to the next. 0: one row for all groups. None: no such parameter.

    For the gain it is the stride from channel to channel.
    """

    weight: int | None
    bias: int | None
    prior_mean: int | None
    prior_var: int | None
    gain: int | None

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(step or 0 for step in self)


def laid_out(*parameters: Tensor | None) -> tuple[list[Tensor | None], RowStrides]:
    """γ, β, the prior's moments and the gain with contiguous rows, and their strides."""
    laid = list(parameters)
    row_strides: list[int | None] = []
    for place, rows in enumerate(parameters):
        if rows is None:
            row_strides += (None,)
            continue
        strides = rows.stride()
        if strides and strides[-1] != 1:
            laid[place] = rows = rows.contiguous()
            strides = rows.stride()
        row_strides += (strides[0] if strides[1:] and rows.shape[0] > 1 else 0,)
    if (gain := laid[-1]) is not None:  # a gain (G, C) has equal rows, so the first is enough
        row_strides[-1] = 1 if gain.numel() > 1 else 0
    return laid, RowStrides(*row_strides)


def pair(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous gradients with respect to mean and variance: both or none. A missing one becomes zeros."""
    mean, var = (None if grad is None else grad.contiguous() for grad in grads)
    if mean is None and var is not None:
        mean = torch.zeros_like(var)
    if var is None and mean is not None:
        var = torch.zeros_like(mean)
    return mean, var
