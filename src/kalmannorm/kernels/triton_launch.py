"""How the Triton kernels are launched: which path, which tiles, how many programs share a group."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kalmannorm.groups import group_count, group_size
from kalmannorm.kernels import triton_gradient as gradient
from kalmannorm.kernels import triton_norm as norm
from kalmannorm.moments import Moments

ON_CHIP = 32768
"""Values of a slab that one program may read twice: 64 KiB in half precision."""
SHARES = 32
"""Channels of a program that merges shares."""


class Shape(NamedTuple):
    """x as the kernels see it: N examples of C channels at L positions, in groups of m."""

    N: int
    C: int
    L: int
    m: int
    channels_last: bool

    @property
    def groups(self) -> int:
        return group_count(self.N, self.m)


class Launch(NamedTuple):
    """Tiles of BR positions × BC channels; `splits` programs share a group, 0 for one program that does all of it."""

    BR: int
    BC: int
    splits: int
    chunks: int

    @property
    def per_split(self) -> int:
        return -(-self.chunks // self.splits)


def shape_of(x: Tensor, statistics_batch_size: int) -> Shape:
    examples, channels = x.shape[:2]
    positions = x.numel() // max(examples * channels, 1)
    # With one position the two layouts are the same memory, and rows of channels are the ones that vectorise.
    channels_last = positions == 1 or not x.is_contiguous()
    return Shape(examples, channels, positions, group_size(examples, statistics_batch_size), channels_last)


def power(n: int) -> int:
    return int(triton.next_power_of_2(max(n, 1)))


@functools.lru_cache(maxsize=4096)
def launch_for(shape: Shape, processors: int) -> Launch:
    """Chosen by shape alone, so that equal inputs run the same way and give equal bits; tuned on an H200."""
    if shape.channels_last:
        for BC in (64, 32, 16, 8):  # the widest that leaves work for every processor, of slabs that the cache holds
            if power(shape.C) >= BC and _fills(shape, BC, processors) and shape.m * shape.L * BC <= ON_CHIP:
                return _launch(shape, min(4096 // BC, power(shape.m * shape.L)), BC, 0)
        BC = min(power(shape.C), 32)
        return _launch(shape, min(4096 // BC, power(shape.m * shape.L)), BC, _splits(shape, BC, processors))
    BR = min(power(shape.L), 1024)
    BC = min(max(2048 // BR, 1), power(shape.C), 16)
    while BC > 1 and not _fills(shape, BC, processors):
        BC //= 2
    if _programs(shape, BC) >= 8 * processors or (_fills(shape, BC, processors) and shape.m * shape.L * BC <= ON_CHIP):
        return _launch(shape, BR, BC, 0)
    return _launch(shape, BR, BC, _splits(shape, BC, processors))


def _programs(shape: Shape, BC: int) -> int:
    return shape.groups * -(-shape.C // BC)


def _fills(shape: Shape, BC: int, processors: int) -> bool:
    return _programs(shape, BC) >= 0.9 * processors


def _splits(shape: Shape, BC: int, processors: int) -> int:
    """About four programs per processor."""
    return -(-4 * processors // _programs(shape, BC))


def _launch(shape: Shape, BR: int, BC: int, splits: int) -> Launch:
    per_example = shape.m * shape.L if shape.channels_last else shape.L
    chunks = -(-per_example // BR) * (1 if shape.channels_last else shape.m)
    return Launch(BR, BC, min(splits, chunks) if chunks > 2 else 0, chunks)


def processors_of(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 4  # Triton's interpreter: any number will do
    return _processors(x.device.index)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def row_stride(rows: Tensor | None, channels: int) -> int:
    """0 where one row is for all groups."""
    return channels if rows is not None and rows.dim() == 2 and rows.shape[0] > 1 else 0


def forward(
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics_batch_size: int,
    eps: float,
    *,
    relu: bool = False,
    residual: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `aten.forward`; with a ReLU, and a residual added before it, in the same pass."""
    shape = shape_of(x, statistics_batch_size)
    how = launch or launch_for(shape, processors_of(x))
    y = torch.empty_like(x)
    mean, var, observed_mean, observed_var = torch.empty(
        (4, shape.groups, shape.C), device=x.device, dtype=torch.float32
    ).unbind()
    N, C, L, m, channels_last = shape
    blocks = triton.cdiv(C, how.BC)
    tile = {"BR": how.BR, "BC": how.BC, "CHANNELS_LAST": channels_last, "num_warps": 4}
    last = {
        "WEIGHT": weight is not None,
        "BIAS": bias is not None,
        "RELU": relu,
        "RESIDUAL": residual is not None,
    }
    prior = prior_mean is not None
    rows = row_stride(weight, C), row_stride(prior_mean, C), gain_step(gain)
    if how.splits == 0:
        norm.forward_kernel[shape.groups, blocks](
            x, y, residual, weight, bias, prior_mean, prior_var, gain, mean, var, observed_mean, observed_var,
            N, C, L, m, how.chunks, *rows, eps, PRIOR=prior, **last, **tile,
        )  # fmt: skip
    else:
        partial = torch.empty((2, how.splits, shape.groups, C), device=x.device, dtype=torch.float32)
        count = torch.empty((how.splits, shape.groups), device=x.device, dtype=torch.float32)
        grid = blocks, how.splits, shape.groups
        tile["num_warps"] = 8 if channels_last else 4
        norm.reduce_kernel[grid](x, partial, count, N, C, L, m, how.chunks, how.per_split, **tile)
        norm.filter_kernel[shape.groups, triton.cdiv(C, SHARES)](
            partial, count, prior_mean, prior_var, gain, mean, var, observed_mean, observed_var,
            shape.groups, C, how.splits, rows[1], rows[2], BS=power(how.splits), BC=SHARES, PRIOR=prior,
        )  # fmt: skip
        norm.apply_kernel[grid](
            x, y, residual, weight, bias, mean, var, N, C, L, m, how.chunks, how.per_split, rows[0], eps, **last, **tile
        )
    return y, mean, var, observed_mean, observed_var


def gain_step(gain: Tensor | None) -> int:
    return 1 if gain is not None and gain.numel() > 1 else 0


class Gradients(NamedTuple):
    """dx, the residual's, and rows (5, G, C): at weight, bias, prior mean, prior variance, gain."""

    x: Tensor
    residual: Tensor | None
    rows: Tensor


def backward(
    grad_y: Tensor,
    grad_posterior: Moments | None,
    grad_observation: Moments | None,
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    posterior: Moments,
    observation: Moments,
    statistics_batch_size: int,
    eps: float,
    *,
    relu: bool = False,
    output: Tensor | None = None,
    launch: Launch | None = None,
) -> Gradients:
    """`output` is y, where a residual was added to it; `bias` is needed where the ReLU's mask is computed again."""
    shape = shape_of(x, statistics_batch_size)
    how = launch or launch_for(shape, processors_of(x))
    N, C, L, m, channels_last = shape
    residual = output is not None
    dx = torch.empty_like(x)
    d_residual = torch.empty_like(x) if residual else None
    prior = prior_mean is not None
    rows = torch.empty((5 if prior else 2, shape.groups, C), device=x.device, dtype=torch.float32)
    blocks = triton.cdiv(C, how.BC)
    tile = {"BR": how.BR, "BC": how.BC, "CHANNELS_LAST": channels_last, "num_warps": 4}
    last = {"WEIGHT": weight is not None, "BIAS": bias is not None, "RELU": relu, "RESIDUAL": residual}
    given = {"AT_POSTERIOR": grad_posterior is not None, "AT_OBSERVATION": grad_observation is not None}
    at = *(grad_posterior or (None, None))[:2], *(grad_observation or (None, None))[:2]
    moments = posterior.mean, posterior.var, observation.mean, observation.var
    steps = row_stride(weight, C), row_stride(prior_mean, C), gain_step(gain)
    if how.splits == 0:
        gradient.backward_kernel[shape.groups, blocks](
            grad_y, x, output, dx, d_residual, weight, bias, prior_mean, prior_var, gain, *moments, *at, rows,
            N, C, L, m, how.chunks, *steps, eps, PRIOR=prior, **last, **given, **tile,
        )  # fmt: skip
        return Gradients(dx, d_residual, rows)
    partial = torch.empty((2, how.splits, shape.groups, C), device=x.device, dtype=torch.float32)
    line = torch.empty((2, shape.groups, C), device=x.device, dtype=torch.float32)
    grid = blocks, how.splits, shape.groups
    gradient.backward_reduce_kernel[grid](
        grad_y, x, output, partial, weight, bias, *moments[:2],
        N, C, L, m, how.chunks, how.per_split, steps[0], eps, **last, **tile,
    )  # fmt: skip
    gradient.backward_filter_kernel[shape.groups, triton.cdiv(C, SHARES)](
        partial, weight, prior_mean, prior_var, gain, *moments, *at, line, rows,
        N, shape.groups, C, L, m, how.splits, *steps, eps,
        BS=power(how.splits), BC=SHARES, PRIOR=prior, WEIGHT=weight is not None, **given,
    )  # fmt: skip
    gradient.backward_apply_kernel[grid](
        grad_y, x, output, dx, d_residual, weight, bias, *moments[:3], line,
        N, C, L, m, how.chunks, how.per_split, steps[0], eps, **last, **tile,
    )  # fmt: skip
    return Gradients(dx, d_residual, rows)


def fold(rows: Tensor) -> Tensor:
    """Rows (K, G, C) summed over groups: (K, C)."""
    kinds, groups, channels = rows.shape
    if groups == 1:
        return rows[:, 0]
    folded = torch.empty((kinds, channels), device=rows.device, dtype=rows.dtype)
    BG, BC = min(power(groups), 64), 16
    gradient.fold_kernel[triton.cdiv(channels, BC), kinds](rows, folded, groups, channels, BG=BG, BC=BC)
    return folded
