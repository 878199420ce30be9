"""The backward of `triton_forward.py`: reduce, filter and apply, streamed or on chip, and the sums over groups.

Each group has S0 = Σ g and S1 = ρ Σ g (x - mean). From these the backward of the filter computes the gradients with
respect to the observation. Then dx = γρ g + b (x - mean) + c is linear in g and x (docs/equations.md). All is relative
to the posterior's mean, like the output: a value near it may be far from x̄, and x - x̄ would lose digits.

With a residual and a ReLU, the output is the mask. The masked g is also the gradient of the residual. So the first pass
writes it, and the second pass reads it instead of g and the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.normalize.triton_forward import (
    VARYING,
    channel_at,
    channels_of,
    in_rows,
    in_vectors,
    load_prior,
    load_row,
    place,
    shares_at,
    tile_at,
)
from kalmannorm._ops.triton_shared import await_previous, settle_keys, update_backward


@triton.jit
def gradient_at(g_ptr, within, mask, away, scale, bias, RELU: tl.constexpr):
    """Load g. If RELU, apply the mask of the ReLU, which is computed from `away` = x - mean."""
    g = tl.load(g_ptr + within, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(away * scale[None, :] + bias[None, :] <= 0.0, 0.0, g)
    return g


@triton.jit
def came_through(g, y_ptr, within, mask):
    """g with the mask of a ReLU after a residual. The mask is the sign of the output."""
    y = tl.load(y_ptr + within, mask=mask, other=0.0).to(tl.float32)
    return tl.where(y <= 0.0, 0.0, g)


@triton.jit
def store_row(pointer, offset, value, mask, GIVEN: tl.constexpr):
    if GIVEN:
        tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_filter(
    group, channel, in_c, weight_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
    C, weight_row, prior_mean_row, prior_var_row, gain_step,
    PRIOR: tl.constexpr, WEIGHT: tl.constexpr, AT_POSTERIOR: tl.constexpr, AT_OBSERVATION: tl.constexpr,
):  # fmt: skip
    """All rows that `settle` needs. They are loaded together and early, because their latency dominates."""
    row = group.to(tl.int64) * C + channel
    mean = tl.load(mean_ptr + row, mask=in_c, other=0.0)
    var = tl.load(var_ptr + row, mask=in_c, other=1.0)
    weight = load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    observed_mean = tl.load(observed_mean_ptr + row, mask=in_c, other=0.0)
    observed_var = load_row(observed_var_ptr, row, in_c, 1.0, PRIOR)
    prior_mean, prior_var, q = load_prior(
        prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c, prior_mean_row, prior_var_row, gain_step, PRIOR
    )  # fmt: skip
    grad_mean = load_row(grad_mean_ptr, row, in_c, 0.0, AT_POSTERIOR)
    grad_var = load_row(grad_var_ptr, row, in_c, 0.0, AT_POSTERIOR)
    grad_observed_mean = load_row(grad_observed_mean_ptr, row, in_c, 0.0, AT_OBSERVATION)
    grad_observed_var = load_row(grad_observed_var_ptr, row, in_c, 0.0, AT_OBSERVATION)
    # A flat tuple: Triton 3.2 does not support nested tuples.
    return (
        mean, var, weight, observed_mean, observed_var, prior_mean, prior_var, q,
        grad_mean, grad_var, grad_observed_mean, grad_observed_var,
    )  # fmt: skip


@triton.jit
def settle(
    sum_g, sum_gx, mean, rho, weight, observed_mean, observed_var, prior_mean, prior_var, q,
    grad_mean, grad_var, grad_observed_mean, grad_observed_var, group, channel, mine,
    d_weight_ptr, d_bias_ptr, d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr,
    N, C, L, m, PRIOR: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """From a group's Σ g and Σ g (x - mean): store the gradient rows of parameters where `mine` is true.

    Return slope b and constant c of dx.
    """
    row = group.to(tl.int64) * C + channel
    scale = rho * weight
    sum_gx *= rho
    store_row(d_weight_ptr, row, sum_gx, mine, WEIGHT)
    store_row(d_bias_ptr, row, sum_g, mine, BIAS)
    grad_mean -= scale * sum_g
    grad_var -= 0.5 * scale * rho * sum_gx
    if PRIOR:
        grad_mean, grad_var, grad_prior_mean, grad_prior_var, grad_gain = update_backward(
            grad_mean, grad_var, observed_mean, observed_var, prior_mean, prior_var, q
        )
        store_row(d_prior_mean_ptr, row, grad_prior_mean, mine, PRIOR)
        store_row(d_prior_var_ptr, row, grad_prior_var, mine, PRIOR)
        store_row(d_gain_ptr, row, grad_gain, mine, PRIOR)
    count = (tl.minimum(N - group * m, m) * L).to(tl.float32)
    slope = 2.0 * (grad_var + grad_observed_var) / count
    return slope, (grad_mean + grad_observed_mean) / count + slope * (mean - observed_mean)


@triton.jit(do_not_specialize=VARYING)
def backward_kernel(
    g_ptr, x_ptr, y_ptr, dx_ptr, d_residual_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
    d_weight_ptr, d_bias_ptr, d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr,
    N, G, C, L, m, chunks, weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    EVEN: tl.constexpr, PRIOR: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TO_BIAS: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr,
    AT_POSTERIOR: tl.constexpr, AT_OBSERVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """On chip: dx of one group and BC channels, and the group's gradient rows (G, C) of the parameters."""
    await_previous(PDL)
    C, L = in_vectors(C, L, V, CHANNELS_LAST)
    group = tl.program_id(0) % G
    channel, in_c = channels_of(tl.program_id(0) // G, C, BC, EVEN)
    mean, var, weight, observed_mean, observed_var, prior_mean, prior_var, q, d_0, d_1, d_2, d_3 = load_filter(
        group, channel, in_c, weight_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
        grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
        C, weight_row, prior_mean_row, prior_var_row, gain_step, PRIOR, WEIGHT, AT_POSTERIOR, AT_OBSERVATION,
    )  # fmt: skip
    rho = tl.rsqrt(var + eps)
    scale = rho * weight
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    lanes_g = tl.zeros([BR, BC], tl.float32)
    lanes_gx = tl.zeros([BR, BC], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        start, within, valid = tile_at(chunk, group, channel, N, C, L, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        away = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        g = gradient_at(g_ptr + start, within, mask, away, scale, bias, RELU)
        if RESIDUAL:
            g = came_through(g, y_ptr + start, within, mask)
            tl.store(d_residual_ptr + start + within, g.to(d_residual_ptr.dtype.element_ty), mask=mask)
        lanes_g += g
        lanes_gx += g * away
    slope, constant = settle(
        tl.sum(lanes_g, 0), tl.sum(lanes_gx, 0),
        mean, rho, weight, observed_mean, observed_var, prior_mean, prior_var, q, d_0, d_1, d_2, d_3,
        group, channel, in_c,
        d_weight_ptr, d_bias_ptr, d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr, N, C, L, m, PRIOR, WEIGHT, TO_BIAS,
    )  # fmt: skip
    arriving_ptr = g_ptr
    if RESIDUAL:
        arriving_ptr = d_residual_ptr
        # The compiler assigns values to threads separately for each load and store. So a thread may read below a value
        # that another thread wrote above.
        tl.debug_barrier()
    for turn in tl.range(0, chunks, num_stages=STAGES):
        start, within, valid = tile_at(chunks - 1 - turn, group, channel, N, C, L, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        away = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        g = gradient_at(arriving_ptr + start, within, mask, away, scale, bias, RELU)
        dx = scale[None, :] * g + (slope[None, :] * away + constant[None, :])
        tl.store(dx_ptr + start + within, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def backward_reduce_kernel(
    g_ptr, x_ptr, y_ptr, d_residual_ptr, partial_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr,
    N, G, C, L, m, splits, chunks, weight_row, bias_row, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Streamed, first launch: Σ g and Σ g (x - mean) of a group's shares, (2, S, G, K, C).

    It also writes the gradient of the residual.
    """
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    row = group.to(tl.int64) * C + channel
    mean = tl.load(mean_ptr + row, mask=in_c, other=0.0)
    var = tl.load(var_ptr + row, mask=in_c, other=1.0)
    scale = tl.rsqrt(var + eps) * load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    lanes_g = tl.zeros([BR, BC], tl.float32)
    lanes_gx = tl.zeros([BR, BC], tl.float32)
    for chunk in tl.range(split, chunks, splits, num_stages=STAGES):
        start, within, valid = tile_at(chunk, group, column, N, columns, rows, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        away = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        g = gradient_at(g_ptr + start, within, mask, away, scale, bias, RELU)
        if RESIDUAL:
            g = came_through(g, y_ptr + start, within, mask)
            tl.store(d_residual_ptr + start + within, g.to(d_residual_ptr.dtype.element_ty), mask=mask)
        lanes_g += g
        lanes_gx += g * away
    share = (split * G + group).to(tl.int64) * columns + column
    plane = tl.full([1], splits, tl.int64) * G * columns
    tl.store(partial_ptr + share, tl.sum(lanes_g, 0), mask=in_c)
    tl.store(partial_ptr + plane + share, tl.sum(lanes_gx, 0), mask=in_c)


@triton.jit(do_not_specialize=VARYING)
def backward_apply_kernel(
    g_ptr, x_ptr, dx_ptr, partial_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
    d_weight_ptr, d_bias_ptr, d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr,
    N, G, C, L, m, splits, chunks,
    weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, BS: tl.constexpr, PRIOR: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, TO_BIAS: tl.constexpr, RELU: tl.constexpr, AT_POSTERIOR: tl.constexpr,
    AT_OBSERVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Streamed, second launch: the filter's backward and dx. The first program of a group stores its rows (G, C).

    With a residual and a ReLU, g is already masked.
    """
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.num_programs(0) - 1 - tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    mean, var, weight, observed_mean, observed_var, prior_mean, prior_var, q, d_0, d_1, d_2, d_3 = load_filter(
        group, channel, in_c, weight_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
        grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
        C, weight_row, prior_mean_row, prior_var_row, gain_step, PRIOR, WEIGHT, AT_POSTERIOR, AT_OBSERVATION,
    )  # fmt: skip
    rho = tl.rsqrt(var + eps)
    scale = rho * weight
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    plane = tl.full([], splits, tl.int64) * G * (C * K)
    shares_g = tl.zeros([BC, BS], tl.float32)
    shares_gx = tl.zeros([BC, BS], tl.float32)
    for first in tl.range(0, splits * K, BS):
        _, share, there = shares_at(first, group, channel, in_c, G, C, splits, K, BS)
        shares_g += tl.load(partial_ptr + share, mask=there, other=0.0)
        shares_gx += tl.load(partial_ptr + plane + share, mask=there, other=0.0)
    slope, constant = settle(
        tl.sum(shares_g, 1), tl.sum(shares_gx, 1),
        mean, rho, weight, observed_mean, observed_var, prior_mean, prior_var, q, d_0, d_1, d_2, d_3,
        group, channel, in_c & (column == channel) & (split == 0),
        d_weight_ptr, d_bias_ptr, d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr,
        N, C, rows * K, m, PRIOR, WEIGHT, TO_BIAS,
    )  # fmt: skip
    last = tl.cdiv(chunks - split, splits) - 1
    for turn in tl.range(0, last + 1, num_stages=STAGES):
        chunk = split + (last - turn) * splits
        start, within, valid = tile_at(chunk, group, column, N, columns, rows, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        away = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        g = gradient_at(g_ptr + start, within, mask, away, scale, bias, RELU)
        dx = scale[None, :] * g + (slope[None, :] * away + constant[None, :])
        tl.store(dx_ptr + start + within, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_rows(source_ptr, target_ptr, G, C, channel, BG: tl.constexpr, BC: tl.constexpr, GIVEN: tl.constexpr):
    """Sum one parameter's rows (G, C) in fixed order to (C,), in the dtype of the parameter."""
    if GIVEN:
        in_c = channel < C
        lanes = tl.zeros([BG, BC], tl.float32)
        for start in range(0, G, BG):
            group = start + tl.arange(0, BG)
            offset = group.to(tl.int64)[:, None] * C + channel[None, :]
            lanes += tl.load(source_ptr + offset, mask=(group < G)[:, None] & in_c[None, :], other=0.0)
        tl.store(target_ptr + channel, tl.sum(lanes, 0).to(target_ptr.dtype.element_ty), mask=in_c)


@triton.jit(do_not_specialize=VARYING)
def sum_over_groups_kernel(
    source_0, source_1, source_2, source_3, source_4, target_0, target_1, target_2, target_3, target_4,
    G, C, COUNT: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the rows of COUNT parameters over groups. Each parameter has its own programs."""
    await_previous(PDL)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    parameter = tl.program_id(1)
    if parameter == 0:
        sum_rows(source_0, target_0, G, C, channel, BG, BC, COUNT > 0)
    if parameter == 1:
        sum_rows(source_1, target_1, G, C, channel, BG, BC, COUNT > 1)
    if parameter == 2:
        sum_rows(source_2, target_2, G, C, channel, BG, BC, COUNT > 2)
    if parameter == 3:
        sum_rows(source_3, target_3, G, C, channel, BG, BC, COUNT > 3)
    if parameter == 4:
        sum_rows(source_4, target_4, G, C, channel, BG, BC, COUNT > 4)


settle_keys(globals())
