"""A norm with running statistics on CUDA, with the arguments and results of `aten_settled.py`.

Launches of a forward: 1 if one program has a whole group, else 2. Launches of a backward: 1 if that group is also the
only one, else 2. A gain that is a single number needs one more.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kalmannorm._ops.grid import blocks_of, power, processors_of
from kalmannorm._ops.normalize import triton_settled as kernels
from kalmannorm._ops.normalize.arguments import SettledGrads, SettledInputs, SettledResults
from kalmannorm._ops.normalize.tiling import Launch, Shape, settling, shape_of
from kalmannorm._ops.normalize.triton_run import RowStrides, laid_out, pair, partial_sums, rooms_for, tile_of
from kalmannorm._ops.triton_launching import KEPT, Ready, launch_options


def whole(how: Launch) -> bool:
    """Whether one program has all values of a group and a channel."""
    return how.splits * how.K == 1


def total(shape: Shape, how: Launch) -> bool:
    """Whether one program has all values of a channel."""
    return whole(how) and shape.groups == 1


def forward(inputs: SettledInputs) -> SettledResults:
    x, prior_mean, prior_var, gain, weight, bias, run_mean, run_var, statistics_batch_size, eps, residual, relu = inputs
    shape = shape_of(x, statistics_batch_size)
    how = settling(shape, processors_of(x), residual=residual is not None, wide=x.dtype == torch.float32)
    parameters, row_strides = laid_out(weight, bias, prior_mean, prior_var, gain)
    y = torch.empty_like(x)
    # Separate tensors, because results of an op may not share memory.
    mean = torch.empty((shape.groups, shape.C), device=x.device, dtype=torch.float32)
    moments = mean, torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(mean)
    centre = torch.empty(shape.C, device=x.device, dtype=torch.float32)
    rho = torch.empty_like(centre)
    launches = forward_launches(shape, how, x.device, row_strides, eps, relu, residual is not None)
    partial = count = None
    if not whole(how):
        partial = partial_sums(shape, how, x.device)
        count = torch.empty((how.splits, shape.groups), device=x.device, dtype=torch.float32)
    running = run_mean.contiguous(), run_var.contiguous()
    launches[0](x, y, residual, partial, count, *parameters, *running, centre, rho, *moments)
    if not whole(how):
        launches[1](partial, count, *parameters[2:], *moments)
    return SettledResults(y, *moments, centre, rho)


@functools.lru_cache(maxsize=KEPT)
def forward_launches(
    shape: Shape, how: Launch, device: torch.device, row_strides: RowStrides, eps: float, relu: bool, residual: bool
) -> tuple[Ready, ...]:
    G, C, rows, filtered = shape.groups, shape.C, row_strides.numbers, row_strides.prior_mean is not None
    numbers = shape.N, G, *shape[1:4], how.splits, how.chunks, *rows, eps
    options = tile_of(shape, how, device) | {
        "K": how.K,
        "ONCE": how.once,
        "WHOLE": whole(how),
        "PRIOR": filtered,
        "RELU": relu,
        "RESIDUAL": residual,
    }
    grid = (blocks_of(C * how.K, how.BC) * how.splits * G,)
    pass_ = Ready(kernels.settled_forward_kernel, grid, numbers, options)
    if whole(how):
        return (pass_,)
    BC = 32
    merging = {"K": how.K, "BS": how.merged, "BC": BC, "PRIOR": filtered} | launch_options(device)
    grid = (G * blocks_of(C, BC),)
    return pass_, Ready(kernels.settled_merge_kernel, grid, (G, C, how.splits, *rows[2:]), merging)


def backward(given: SettledGrads) -> list[Tensor]:
    x, y, weight, bias = given.x, given.y, given.weight, given.bias
    shape = shape_of(x, given.statistics_batch_size)
    C = shape.C
    how = settling(shape, processors_of(x), backward=True, residual=y is not None, wide=x.dtype == torch.float32)
    filtered = given.prior_mean, given.prior_var, given.gain
    parameters, row_strides = laid_out(weight, bias, *filtered)
    at_posterior, at_observation = pair(given[13:15]), pair(given[15:17])
    arrived = at_posterior[0] is not None, at_observation[0] is not None
    launch = backward_launch(shape, how, x.device, row_strides, given.relu, y is not None, arrived)
    dx, d_residual = torch.empty_like(x), None if y is None else torch.empty_like(x)
    partial = None if total(shape, how) else partial_sums(shape, how, x.device)
    rooms = rooms_for(filtered, given.observed_mean)
    d_weight, d_bias = (torch.empty(each.shape, device=x.device, dtype=torch.float32) for each in (weight, bias))
    collected = torch.empty((C, 3), device=x.device, dtype=torch.float32)
    launch(
        given.grad_y, x, y, dx, d_residual, partial, *parameters, given.centre, given.rho, given.averages.contiguous(),
        given.observed_mean, given.observed_var, *at_posterior, *at_observation, *[room.rows for room in rooms],
        *((d_weight, d_bias, collected) if partial is None else [None] * 3),
    )  # fmt: skip
    if partial is not None:
        per_group = weight.dim() == 2 and weight.shape[0] > 1, bias.dim() == 2 and bias.shape[0] > 1
        summing = [room for room in rooms if room.sums_rows]
        missing = [None] * (3 - len(summing))
        sums_launch(shape, how, x.device, len(summing), per_group)(
            partial, given.rho, d_weight, d_bias, collected,
            *[room.rows for room in summing], *missing, *[room.result for room in summing], *missing,
        )  # fmt: skip
    gradients = [dx, d_weight, d_bias, collected]
    if given.residual:
        assert d_residual is not None
        gradients.append(d_residual)
    for room, parameter in zip(rooms, filtered, strict=True):
        if parameter is not None and room.rows is not None:
            one = room.rows.sum().view(parameter.shape) if room.result is None else room.result
            gradients.append(one)
    return gradients


@functools.lru_cache(maxsize=KEPT)
def backward_launch(
    shape: Shape,
    how: Launch,
    device: torch.device,
    row_strides: RowStrides,
    relu: bool,
    residual: bool,
    arrived: tuple[bool, bool],
    adds: bool = False,
) -> Ready:
    """`adds`: to the sums that were collected before."""
    numbers = shape.N, shape.groups, *shape[1:4], how.splits, how.chunks, *row_strides.numbers
    options = tile_of(shape, how, device) | {
        "K": how.K,
        "PRIOR": row_strides.prior_mean is not None,
        "RELU": relu and not residual,  # with a residual, the mask of the ReLU comes from the output
        "RESIDUAL": residual,
        "AT_POSTERIOR": arrived[0],
        "AT_OBSERVATION": arrived[1],
        "TOTAL": total(shape, how),
        "ADDS": adds,
    }
    grid = (blocks_of(shape.C * how.K, how.BC) * how.splits * shape.groups,)
    return Ready(kernels.settled_backward_kernel, grid, numbers, options)


@functools.lru_cache(maxsize=KEPT)
def sums_launch(
    shape: Shape, how: Launch, device: torch.device, summed: int, per_group: tuple[bool, bool], adds: bool = False
) -> Ready:
    """Sums of shares, and of the rows of `summed` parameters. `per_group`: whether γ and β get a row for each group."""
    G, C, BC = shape.groups, shape.C, 16
    jobs = 2 + summed + (G if any(per_group) else 0)
    options = {"K": how.K, "BG": min(power(how.splits * G * how.K), 64), "BS": how.merged, "BC": BC}
    options |= {"COUNT": summed, "WEIGHT_ROWS": per_group[0], "BIAS_ROWS": per_group[1], "ADDS": adds}
    options |= launch_options(device)
    return Ready(kernels.settled_sums_kernel, (jobs * blocks_of(C, BC),), (G, C, how.splits), options)
