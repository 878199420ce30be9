"""The op on Triton's kernels, forward and backward, with the arguments and results of `aten.py`.

Launches: forward 1 on chip, 2 streamed; backward 1 or 2, one more to sum the parameters' rows over groups, and one for
a gain that is a single number. Gradients come in the shapes and dtypes of what was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmannorm.kernels import triton_gradient as gradient
from kalmannorm.kernels import triton_held as held
from kalmannorm.kernels import triton_norm as norm
from kalmannorm.kernels.triton_launch import (
    Launch,
    Shape,
    blocks_of,
    launch_for,
    observing,
    power,
    processors_of,
    shape_of,
)
from kalmannorm.kernels.triton_turns import turns


def forward(
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics_batch_size: int,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `aten.forward`."""
    shape = shape_of(x, statistics_batch_size)
    wide = x.dtype == torch.float32
    how = launch_for(shape, processors_of(x), residual=residual is not None, wide=wide)
    N, C, L, m, _ = shape
    G = shape.groups
    prior_mean, prior_var, gain, weight, bias = dense(prior_mean, prior_var, gain, weight, bias)
    y = torch.empty_like(x)
    # One by one, because what an op returns may not share memory.
    moments = [torch.empty((G, C), device=x.device, dtype=torch.float32) for _ in range(4)]
    tile = tile_of(shape, how, x.device)
    last = {
        "WEIGHT": weight is not None,
        "BIAS": bias is not None,
        "RELU": relu,
        "RESIDUAL": residual is not None,
    }
    prior = prior_mean is not None
    affine = row_step(weight, C), row_step(bias, C)
    predicted = row_step(prior_mean, C), row_step(prior_var, C), gain_step(gain)
    blocks = blocks_of(C, how.BC)
    if how.splits == 0:
        launch, loop = (held.held_forward_kernel, ()) if how.held else (norm.forward_kernel, (how.chunks,))
        once = {} if how.held else {"ONCE": how.once}
        launch[(G * blocks,)](
            x, y, residual, weight, bias, prior_mean, prior_var, gain, *moments,
            N, G, C, L, m, *loop, *affine, *predicted, eps, PRIOR=prior, **once, **last, **tile,
        )  # fmt: skip
        return y, *moments  # type: ignore[return-value]
    partial = torch.empty((2, how.splits, G, C), device=x.device, dtype=torch.float32)
    count = torch.empty((how.splits, G), device=x.device, dtype=torch.float32)
    grid = (blocks * how.splits * G,)
    share = how.splits, how.chunks
    norm.reduce_kernel[grid](x, partial, count, N, G, C, L, m, *share, ONCE=how.once, **tile)
    norm.apply_kernel[grid](
        x, y, residual, partial, count, weight, bias, prior_mean, prior_var, gain, *moments,
        N, G, C, L, m, *share, *affine, *predicted, eps, BS=how.merged, PRIOR=prior, **last, **tile,
    )  # fmt: skip
    return y, *moments  # type: ignore[return-value]


def observe(x: Tensor, statistics_batch_size: int) -> tuple[Tensor, Tensor]:
    """As `aten.observe`: the first of the streamed launches, and one that merges the shares."""
    shape = shape_of(x, statistics_batch_size)
    how = observing(shape, processors_of(x), wide=x.dtype == torch.float32)
    N, C, L, m, _ = shape
    G = shape.groups
    mean, var = (torch.empty((G, C), device=x.device, dtype=torch.float32) for _ in range(2))
    partial = torch.empty((2, how.splits, G, C), device=x.device, dtype=torch.float32)
    count = torch.empty((how.splits, G), device=x.device, dtype=torch.float32)
    norm.reduce_kernel[(blocks_of(C, how.BC) * how.splits * G,)](
        x, partial, count, N, G, C, L, m, how.splits, how.chunks, ONCE=how.once, **tile_of(shape, how, x.device)
    )  # fmt: skip
    BC = 32
    norm.observe_kernel[G, blocks_of(C, BC)](
        partial, count, mean, var, G, C, how.splits, BS=how.merged, BC=BC, **turns(x.device)
    )
    return mean, var


def backward(
    grad_y: Tensor | None,
    grad_moments: Sequence[Tensor | None],
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Sequence[Tensor],
    y: Tensor | None,
    statistics_batch_size: int,
    eps: float,
    relu: bool = False,
    bias_rows: int = 0,
) -> list[Tensor]:
    """As `aten.backward`."""
    shape = shape_of(x, statistics_batch_size)
    wide = x.dtype == torch.float32
    how = launch_for(shape, processors_of(x), backward=True, wide=wide)
    N, C, L, m, _ = shape
    G = shape.groups
    prior_mean, prior_var, gain, weight, bias = dense(prior_mean, prior_var, gain, weight, bias)
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    at_posterior, at_observation = pair(grad_moments[:2]), pair(grad_moments[2:])
    dx = torch.empty_like(x)
    d_residual = None if y is None else torch.empty_like(x)
    none: tuple[Sequence[int] | None, torch.dtype] = (None, torch.float32)
    to_weight, *to_prior = (none if t is None else (t.shape, t.dtype) for t in (weight, prior_mean, prior_var, gain))
    to_bias = ((bias_rows, C), torch.float32) if bias_rows else none
    rooms = [room_for(shape, x.device, *parameter) for parameter in (to_weight, to_bias, *to_prior)]
    tile = tile_of(shape, how, x.device)
    last = {"WEIGHT": weight is not None, "BIAS": bias is not None, "RELU": relu and y is None}
    settled = {
        "PRIOR": prior_mean is not None,
        "TO_BIAS": bias_rows > 0,
        "AT_POSTERIOR": at_posterior[0] is not None,
        "AT_OBSERVATION": at_observation[0] is not None,
    }
    at = *moments, *at_posterior, *at_observation, *(room.rows for room in rooms)
    weight_row, bias_row = row_step(weight, C), row_step(bias, C)
    predicted = row_step(prior_mean, C), row_step(prior_var, C), gain_step(gain)
    blocks = blocks_of(C, how.BC)
    if how.splits == 0:
        launch, loop = (held.held_backward_kernel, ()) if how.held else (gradient.backward_kernel, (how.chunks,))
        launch[(G * blocks,)](
            grad_y, x, y, dx, d_residual, weight, bias, prior_mean, prior_var, gain, *at,
            N, G, C, L, m, *loop, weight_row, bias_row, *predicted, eps,
            RESIDUAL=y is not None, **last, **settled, **tile,
        )  # fmt: skip
    else:
        partial = torch.empty((2, how.splits, G, C), device=x.device, dtype=torch.float32)
        grid = (blocks * how.splits * G,)
        share = how.splits, how.chunks
        gradient.backward_reduce_kernel[grid](
            grad_y, x, y, d_residual, partial, weight, bias, *moments[:3],
            N, G, C, L, m, *share, weight_row, bias_row, eps, RESIDUAL=y is not None, **last, **tile,
        )  # fmt: skip
        gradient.backward_apply_kernel[grid](
            grad_y if d_residual is None else d_residual, x, dx, partial,
            weight, bias, prior_mean, prior_var, gain, *at,
            N, G, C, L, m, *share, weight_row, bias_row, *predicted, eps,
            BS=how.merged, **last, **settled, **tile,
        )  # fmt: skip
    fold(rooms)
    d_weight, d_bias, d_prior_mean, d_prior_var, d_gain = (room.result for room in rooms)
    if gain is not None and d_gain is None:
        assert rooms[-1].rows is not None
        d_gain = rooms[-1].rows.sum().view(gain.shape).to(gain.dtype)
    results = dx, d_residual, d_prior_mean, d_prior_var, d_gain, d_weight, d_bias
    return [t for t in results if t is not None]


def tile_of(shape: Shape, how: Launch, device: torch.device) -> dict[str, Any]:
    tile = {"BR": how.BR, "BC": how.BC, "V": shape.vector, "CHANNELS_LAST": shape.channels_last, "num_warps": how.warps}
    tile["EVEN"] = how.even(shape)
    return tile | turns(device) | ({} if how.held else {"STAGES": how.stages})


class Room(NamedTuple):
    """Where the kernels leave a parameter's gradient, a row per group (G, C), and the gradient in its own shape."""

    rows: Tensor | None
    result: Tensor | None
    folds: bool
    """Whether `result` is yet to be summed from the rows; else it is a view of them, or a single number."""


def room_for(shape: Shape, device: torch.device, parameter: Sequence[int] | None, dtype: torch.dtype) -> Room:
    if parameter is None:
        return Room(None, None, False)
    G, C = shape.groups, shape.C
    values = math.prod(parameter)
    if values == G * C:
        rows = torch.empty((G, C), device=device, dtype=dtype)
        return Room(rows, rows if parameter == (G, C) else rows.view(parameter), False)
    rows = torch.empty((G, C), device=device, dtype=torch.float32)
    return Room(rows, None if values < C else torch.empty(parameter, device=device, dtype=dtype), values == C)


def fold(rooms: Sequence[Room]) -> None:
    """Sum what is yet to be summed, all in one launch."""
    folding = [room for room in rooms if room.folds]
    if not folding:
        return
    assert folding[0].rows is not None
    G, C = folding[0].rows.shape
    missing = [None] * (5 - len(folding))
    sources, targets = [room.rows for room in folding], [room.result for room in folding]
    BG, BC = min(power(G), 64), 16
    gradient.fold_kernel[blocks_of(C, BC), len(folding)](
        *sources, *missing, *targets, *missing, G, C, COUNT=len(folding), BG=BG, BC=BC, **turns(folding[0].rows.device)
    )


def try_out(device: torch.device) -> None:
    """Build and launch the smallest kernel; raises where Triton cannot."""
    rows = torch.zeros((2, 1), device=device)
    fold([Room(rows, torch.empty(1, device=device), True)])


def dense(*parameters: Tensor | None) -> list[Tensor | None]:
    """Such that rows lie together; how far they are from each other, `row_step` tells."""
    return [t if t is None or (t.dim() == 2 and t.stride(1) == 1) else t.contiguous() for t in parameters]


def pair(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """Gradients at a mean and a variance, row behind row: both, or none at all."""
    mean, var = (None if grad is None else grad.contiguous() for grad in grads)
    if mean is None and var is not None:
        mean = torch.zeros_like(var)
    if var is None and mean is not None:
        var = torch.zeros_like(mean)
    return mean, var


def row_step(rows: Tensor | None, channels: int) -> int:
    """From one group's row of a parameter to the next: 0 where one row is for all."""
    return rows.stride(0) if rows is not None and rows.numel() > channels else 0


def gain_step(gain: Tensor | None) -> int:
    """From channel to channel. Rows (G, C) of a gain are equal, for its gradients' sake: the first serves."""
    return 1 if gain is not None and gain.numel() > 1 else 0
