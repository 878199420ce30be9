"""Kernels of a norm with running statistics: 2B forward, 3B backward, at any statistics batch. B is the size of x.

`aten_settled.py` has the formulas. All rows that y and dx need are known before the pass. So a program reads a tile
once, writes its result, and adds the tile to the moments or sums of its group. Tiles, lanes and shares are those of
`triton_forward.py`: `splits` programs share a group, and everything is merged in fixed order.

    forward     y, and mean and squared deviations of every share; then a launch that merges shares. If one program has
                a whole group, it also stores the moments, and there is no second launch.
    backward    dx, and Σ g and Σ g (x - m) of every share; then a launch that sums shares. If there is only one group,
                and one program has it whole, it also stores the gradients of γ and β: there is no second launch.

With a residual, one more tensor is read in the forward. With a ReLU after it, the backward reads y and writes the
gradient of the residual: 5B.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.normalize import lanes
from kalmannorm._ops.normalize.triton_backward import came_through, gradient_at, store_row, sum_rows
from kalmannorm._ops.normalize.triton_forward import (
    VARYING,
    activated,
    channel_at,
    channels_of,
    gather,
    in_rows,
    load_prior,
    load_row,
    merge_gathered,
    merge_rows,
    merge_shares,
    place,
    settle,
    shares_at,
    tile_at,
)
from kalmannorm._ops.triton_shared import await_previous, settle_keys, update_backward

FRESH = tl.constexpr(lanes.FRESH)


@triton.jit
def write(
    x, y_ptr, residual_ptr, start, within, mask, centre, scale, bias, RELU: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Store y of a tile. The expression is that of the other kernels."""
    z = (x - centre[None, :]) * scale[None, :] + bias[None, :]
    if RESIDUAL:
        z += tl.load(residual_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + within, activated(z, RELU).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def written(
    x_ptr, y_ptr, residual_ptr, first, end, step, group, column, in_c, centre, scale, bias, N, C, L, m,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """As `gathered` in `triton_forward.py`: moments of chunks from `first` to `end`. It also stores their y."""
    start, within, valid = tile_at(first, group, column, N, C, L, m, BR, CHANNELS_LAST, EVEN)
    mask = valid[:, None] & in_c[None, :]
    base = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
    write(base, y_ptr, residual_ptr, start, within, mask, centre, scale, bias, RELU, RESIDUAL)
    count = valid.to(tl.float32)
    sums = tl.zeros([BR, BC], tl.float32)
    squares = tl.zeros([BR, BC], tl.float32)
    for chunk in tl.range(first + step, end, step, num_stages=STAGES):
        start, within, valid = tile_at(chunk, group, column, N, C, L, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        write(x, y_ptr, residual_ptr, start, within, mask, centre, scale, bias, RELU, RESIDUAL)
        count, base, sums, squares = gather(x, valid, count, base, sums, squares, EVEN)
    return merge_gathered(count, base, sums, squares)


@triton.jit(do_not_specialize=VARYING)
def settled_forward_kernel(
    x_ptr, y_ptr, residual_ptr, partial_ptr, count_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    running_mean_ptr, running_var_ptr, centre_ptr, rho_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    N, G, C, L, m, splits, chunks, weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, WHOLE: tl.constexpr, PRIOR: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y of a share, and its moments: (2, S, G, K, C) and row counts (S, G). WHOLE: the share is the group.

    The first program of each channel keeps m and ρ for the backward.
    """
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    centre = tl.load(running_mean_ptr + channel, mask=in_c, other=0.0)
    rho = tl.rsqrt(tl.load(running_var_ptr + channel, mask=in_c, other=1.0) + eps)
    weight = tl.load(weight_ptr + group.to(tl.int64) * weight_row + channel, mask=in_c, other=1.0)
    bias = tl.load(bias_ptr + group.to(tl.int64) * bias_row + channel, mask=in_c, other=0.0)
    scale = rho * weight
    kept = in_c & (column == channel) & (group == 0) & (split == 0)
    tl.store(centre_ptr + channel, centre, mask=kept)
    tl.store(rho_ptr + channel, rho, mask=kept)
    if ONCE:
        total, mean, squared = written(
            x_ptr, y_ptr, residual_ptr, split, chunks, splits, group, column, in_c, centre, scale, bias,
            N, columns, rows, m, BR, BC, STAGES, CHANNELS_LAST, EVEN, RELU, RESIDUAL,
        )  # fmt: skip
    else:
        total = 0.0
        mean = tl.zeros([BC], tl.float32)
        squared = tl.zeros([BC], tl.float32)
        for begin in range(split, chunks, splits * FRESH):
            end = tl.minimum(chunks, begin + splits * FRESH)
            other = written(
                x_ptr, y_ptr, residual_ptr, begin, end, splits, group, column, in_c, centre, scale, bias,
                N, columns, rows, m, BR, BC, STAGES, CHANNELS_LAST, EVEN, RELU, RESIDUAL,
            )  # fmt: skip
            total, mean, squared = merge_rows(total, mean, squared, *other)
    if WHOLE:
        prior_mean, prior_var, q = load_prior(
            prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c,
            prior_mean_row, prior_var_row, gain_step, PRIOR,
        )  # fmt: skip
        settle(
            total, mean, squared, prior_mean, prior_var, q, group, channel, in_c,
            mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR,
        )  # fmt: skip
    else:
        row = (split * G + group).to(tl.int64)
        plane = tl.full([1], splits, tl.int64) * G * columns
        tl.store(partial_ptr + row * columns + column, mean, mask=in_c)
        tl.store(partial_ptr + plane + row * columns + column, squared, mask=in_c)
        if block == 0:
            tl.store(count_ptr + row, total)


@triton.jit(do_not_specialize=VARYING)
def settled_merge_kernel(
    partial_ptr, count_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    G, C, splits, prior_mean_row, prior_var_row, gain_step,
    K: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, PRIOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the shares of a group: observation and posterior."""
    await_previous(PDL)
    group, _alone, block = place(tl.program_id(0), C, 1, BC)
    channel, in_c = channels_of(block, C, BC, False)
    prior_mean, prior_var, q = load_prior(
        prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c, prior_mean_row, prior_var_row, gain_step, PRIOR
    )  # fmt: skip
    total, mean, squared = merge_shares(partial_ptr, count_ptr, group, channel, in_c, G, C, splits, K, BC, BS)
    settle(
        total, mean, squared, prior_mean, prior_var, q, group, channel, in_c,
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def settled_backward_kernel(
    g_ptr, x_ptr, y_ptr, dx_ptr, d_residual_ptr, partial_ptr,
    weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr, centre_ptr, rho_ptr, averages_ptr,
    observed_mean_ptr, observed_var_ptr,
    grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
    d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr, d_weight_ptr, d_bias_ptr, collected_ptr,
    N, G, C, L, m, splits, chunks, weight_row, bias_row, prior_mean_row, prior_var_row, gain_step,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, PRIOR: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr,
    AT_POSTERIOR: tl.constexpr, AT_OBSERVATION: tl.constexpr, TOTAL: tl.constexpr, ADDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dx of a share, and its Σ g and Σ g (x - m), (2, S, G, K, C). RESIDUAL: y is the mask, and g is also stored.

    The first program of a group stores the gradient rows (G, C) of the prior and the gain. TOTAL: the share is all of
    x, so its sums are what `settled_sums_kernel` makes of shares. ADDS: see there.
    """
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    row = group.to(tl.int64) * C + channel
    centre = tl.load(centre_ptr + channel, mask=in_c, other=0.0)
    rho = tl.load(rho_ptr + channel, mask=in_c, other=1.0)
    weight = tl.load(weight_ptr + group.to(tl.int64) * weight_row + channel, mask=in_c, other=1.0)
    bias = tl.load(bias_ptr + group.to(tl.int64) * bias_row + channel, mask=in_c, other=0.0)
    expected_g = tl.load(averages_ptr + channel * 3, mask=in_c, other=0.0)
    expected_gz = tl.load(averages_ptr + channel * 3 + 1, mask=in_c, other=0.0)
    observed_mean = tl.load(observed_mean_ptr + row, mask=in_c, other=0.0)
    grad_mean = load_row(grad_mean_ptr, row, in_c, 0.0, AT_POSTERIOR)
    grad_var = load_row(grad_var_ptr, row, in_c, 0.0, AT_POSTERIOR)
    scale = rho * weight
    examples = tl.minimum(N - group * m, m).to(tl.float32)
    share = examples / N
    grad_mean -= scale * (share * expected_g)
    grad_var -= 0.5 * scale * rho * (share * expected_gz)
    if PRIOR:
        observed_var = tl.load(observed_var_ptr + row, mask=in_c, other=1.0)
        prior_mean, prior_var, q = load_prior(
            prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c,
            prior_mean_row, prior_var_row, gain_step, PRIOR,
        )  # fmt: skip
        grad_mean, grad_var, grad_prior_mean, grad_prior_var, grad_gain = update_backward(
            grad_mean, grad_var, observed_mean, observed_var, prior_mean, prior_var, q
        )
        mine = in_c & (column == channel) & (split == 0)
        store_row(d_prior_mean_ptr, row, grad_prior_mean, mine, PRIOR)
        store_row(d_prior_var_ptr, row, grad_prior_var, mine, PRIOR)
        store_row(d_gain_ptr, row, grad_gain, mine, PRIOR)
    count = examples * (rows * K)
    slope = 2.0 * (grad_var + load_row(grad_observed_var_ptr, row, in_c, 0.0, AT_OBSERVATION)) / count
    constant = (grad_mean + load_row(grad_observed_mean_ptr, row, in_c, 0.0, AT_OBSERVATION)) / count
    lanes_g = tl.zeros([BR, BC], tl.float32)
    lanes_gx = tl.zeros([BR, BC], tl.float32)
    for chunk in tl.range(split, chunks, splits, num_stages=STAGES):
        start, within, valid = tile_at(chunk, group, column, N, columns, rows, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        away = x - centre[None, :]
        g = gradient_at(g_ptr + start, within, mask, away, scale, bias, RELU)
        if RESIDUAL:
            g = came_through(g, y_ptr + start, within, mask)
            tl.store(d_residual_ptr + start + within, g.to(d_residual_ptr.dtype.element_ty), mask=mask)
        lanes_g += g
        lanes_gx += g * away
        dx = scale[None, :] * g + (slope[None, :] * (x - observed_mean[None, :]) + constant[None, :])
        tl.store(dx_ptr + start + within, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    sum_g, sum_gx = tl.sum(lanes_g, 0), tl.sum(lanes_gx, 0)
    if TOTAL:
        store_sum_g(sum_g, channel, in_c, collected_ptr, d_bias_ptr, True, ADDS)
        store_sum_gz(rho * sum_gx, channel, in_c, collected_ptr, d_weight_ptr, True, ADDS)
    else:
        there = (split * G + group).to(tl.int64) * columns + column
        plane = tl.full([1], splits, tl.int64) * G * columns
        tl.store(partial_ptr + there, sum_g, mask=in_c)
        tl.store(partial_ptr + plane + there, sum_gx, mask=in_c)


@triton.jit
def store_sum_g(sum_g, channel, in_c, collected_ptr, d_bias_ptr, TO_BIAS: tl.constexpr, ADDS: tl.constexpr):
    if collected_ptr is not None:
        collect(collected_ptr + channel * 3, sum_g, in_c, ADDS)
        collect(collected_ptr + channel * 3 + 2, tl.full([sum_g.shape[0]], 1.0, tl.float32), in_c, ADDS)
    store_row(d_bias_ptr, channel, sum_g, in_c, TO_BIAS)


@triton.jit
def store_sum_gz(sum_gz, channel, in_c, collected_ptr, d_weight_ptr, TO_WEIGHT: tl.constexpr, ADDS: tl.constexpr):
    if collected_ptr is not None:
        collect(collected_ptr + channel * 3 + 1, sum_gz, in_c, ADDS)
    store_row(d_weight_ptr, channel, sum_gz, in_c, TO_WEIGHT)


@triton.jit
def collect(there, values, in_c, ADDS: tl.constexpr):
    if ADDS:
        values += tl.load(there, mask=in_c, other=0.0)
    tl.store(there, values, mask=in_c)


@triton.jit
def total_of(source_ptr, rows, C, channel, in_c, BG: tl.constexpr, BC: tl.constexpr):
    """The sum of all rows, in fixed order."""
    lanes = tl.zeros([BG, BC], tl.float32)
    for start in range(0, rows, BG):
        row = start + tl.arange(0, BG)
        offset = row.to(tl.int64)[:, None] * C + channel[None, :]
        lanes += tl.load(source_ptr + offset, mask=(row < rows)[:, None] & in_c[None, :], other=0.0)
    return tl.sum(lanes, 0)


@triton.jit(do_not_specialize=VARYING)
def settled_sums_kernel(
    partial_ptr, rho_ptr, d_weight_ptr, d_bias_ptr, collected_ptr,
    source_0, source_1, source_2, target_0, target_1, target_2, G, C, splits,
    K: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, COUNT: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr, BIAS_ROWS: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the shares: over all groups for the probe, γ and β, and the rows of COUNT other parameters.

    ADDS: what the probe gets is added to what is there, as autograd adds gradients.

    The first two jobs are Σ g and Σ g z. COUNT jobs follow, and then one for every group if γ or β has rows of groups.
    Without `collected_ptr` nobody needs sums over all groups.
    """
    await_previous(PDL)
    job, _alone, block = place(tl.program_id(0), C, 1, BC)
    channel, in_c = channels_of(block, C, BC, False)
    rho = tl.load(rho_ptr + channel, mask=in_c, other=1.0)
    plane = tl.full([], splits, tl.int64) * G * (C * K)
    if job == 0 and collected_ptr is not None:
        sum_g = total_of(partial_ptr, splits * G * K, C, channel, in_c, BG, BC)
        store_sum_g(sum_g, channel, in_c, collected_ptr, d_bias_ptr, not BIAS_ROWS, ADDS)
    if job == 1 and collected_ptr is not None:
        sum_gz = rho * total_of(partial_ptr + plane, splits * G * K, C, channel, in_c, BG, BC)
        store_sum_gz(sum_gz, channel, in_c, collected_ptr, d_weight_ptr, not WEIGHT_ROWS, ADDS)
    if job == 2:
        sum_rows(source_0, target_0, G, C, channel, BG, BC, COUNT > 0)
    if job == 3:
        sum_rows(source_1, target_1, G, C, channel, BG, BC, COUNT > 1)
    if job == 4:
        sum_rows(source_2, target_2, G, C, channel, BG, BC, COUNT > 2)
    if WEIGHT_ROWS or BIAS_ROWS:
        group = job - 2 - COUNT
        if group >= 0:
            shares_g = tl.zeros([BC, BS], tl.float32)
            shares_gx = tl.zeros([BC, BS], tl.float32)
            for first in tl.range(0, splits * K, BS):
                _splits, share, there = shares_at(first, group, channel, in_c, G, C, splits, K, BS)
                shares_g += tl.load(partial_ptr + share, mask=there, other=0.0)
                shares_gx += tl.load(partial_ptr + plane + share, mask=there, other=0.0)
            row = group.to(tl.int64) * C + channel
            store_row(d_bias_ptr, row, tl.sum(shares_g, 1), in_c, BIAS_ROWS)
            store_row(d_weight_ptr, row, rho * tl.sum(shares_gx, 1), in_c, WEIGHT_ROWS)


settle_keys(globals())
