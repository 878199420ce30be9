"""Kernels of Moving Average Batch Norm: 3B forward and 5B backward, where B is the size of x in bytes.

    forward     observe (`triton_forward.py`), then y; then the past of x̄² is shifted
    backward    Σ g and Σ g x of shares (`triton_backward.py`), a merge to the means of g z, then dx; then their past
                is shifted

Every program averages the K rows of its window itself. They are the last rows of [past, rows of this batch] up to its
group. `aten_moving.py` has the same in PyTorch operations.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.moving import arguments
from kalmannorm._ops.normalize.triton_backward import store_row
from kalmannorm._ops.normalize.triton_forward import (
    VARYING,
    channel_at,
    channels_of,
    in_rows,
    load_row,
    place,
    shares_at,
    tile_at,
)
from kalmannorm._ops.triton_shared import await_previous, settle_keys

R_MAX = tl.constexpr(arguments.R_MAX)
CHANGING = [*VARYING, "window", "warmup_steps"]


@triton.jit
def load_rows(mean_ptr, rows_ptr, offset, mask, SQUARES: tl.constexpr):
    """Rows as they are, or with SQUARES mean squares, from means and variances."""
    rows = tl.load(rows_ptr + offset, mask=mask, other=0.0)
    if SQUARES:
        mean = tl.load(mean_ptr + offset, mask=mask, other=0.0)
        rows = tl.fma(mean, mean, rows)
    return rows


@triton.jit
def window_mean(
    past_ptr, mean_ptr, rows_ptr, group, channel, in_c, C, window,
    BC: tl.constexpr, BW: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """The average of the `window` rows up to this group. As in `shares_at`, channels are the first axis."""
    lanes = tl.zeros([BC, BW], tl.float32)
    for first in tl.range(0, window, BW):
        number = first + tl.arange(0, BW)
        joined = group + number  # the row in [past, rows]
        old = joined < window - 1
        there = (number < window)[None, :] & in_c[:, None]
        before = joined.to(tl.int64)[None, :] * C + channel[:, None]
        now = (joined - (window - 1)).to(tl.int64)[None, :] * C + channel[:, None]
        lanes += tl.load(past_ptr + before, mask=there & old[None, :], other=0.0)
        lanes += load_rows(mean_ptr, rows_ptr, now, there & ~old[None, :], SQUARES)
    return tl.sum(lanes, 1) / window


@triton.jit(do_not_specialize=CHANGING)
def moving_forward_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, seen_mean_ptr, seen_var_ptr, past_ptr, running_ptr, groups_ptr, batches_ptr,
    mean_ptr, moving_ptr, r_ptr, own_ptr,
    N, G, C, L, m, splits, chunks, window, warmup_steps, eps,
    BR: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y of a share. The first program of a group stores its rows, and the first of all whether groups are alone."""
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.num_programs(0) - 1 - tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    row = group.to(tl.int64) * C + channel
    batches = tl.load(batches_ptr)
    own = (tl.load(groups_ptr) < window) | (batches == 0)
    running = tl.load(running_ptr + channel, mask=in_c, other=1.0)
    weight = load_row(weight_ptr, channel, in_c, 1.0, WEIGHT)
    bias = load_row(bias_ptr, channel, in_c, 0.0, BIAS)
    alone = load_rows(seen_mean_ptr, seen_var_ptr, row, in_c, True)
    average = window_mean(past_ptr, seen_mean_ptr, seen_var_ptr, group, channel, in_c, C, window, BC, BW, True)
    moving = tl.where(own, alone, average)
    r = tl.sqrt(moving + eps) * tl.rsqrt(running + eps)
    r = tl.minimum(tl.maximum(r, 1.0 / R_MAX), R_MAX)
    r = tl.where(batches < warmup_steps - 1, 1.0, r)
    mine = in_c & (column == channel) & (split == 0)
    tl.store(mean_ptr + row, tl.zeros([BC], tl.float32), mask=mine)
    tl.store(moving_ptr + row, moving, mask=mine)
    tl.store(r_ptr + row, r, mask=mine)
    if tl.program_id(0) == 0:
        tl.store(own_ptr, own.to(tl.int32))
    step = weight * r * tl.rsqrt(moving + eps)
    last = tl.cdiv(chunks - split, splits) - 1
    for turn in tl.range(0, last + 1, num_stages=STAGES):
        chunk = split + (last - turn) * splits
        start, within, valid = tile_at(chunk, group, column, N, columns, rows, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        y = x * step[None, :] + bias[None, :]
        tl.store(y_ptr + start + within, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=CHANGING)
def moving_merge_kernel(
    partial_ptr, weight_ptr, moving_ptr, r_ptr, means_ptr, d_weight_ptr, d_bias_ptr,
    N, G, C, L, m, splits, eps,
    K: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From Σ g and Σ g x of a group's shares: the means of g z and the gradient rows of γ and β, each (G, C)."""
    await_previous(PDL)
    group, _alone, block = place(tl.program_id(0), C, 1, BC)
    channel, in_c = channels_of(block, C, BC, False)
    row = group.to(tl.int64) * C + channel
    weight = load_row(weight_ptr, channel, in_c, 1.0, WEIGHT)
    moving = tl.load(moving_ptr + row, mask=in_c, other=1.0)
    r = tl.load(r_ptr + row, mask=in_c, other=1.0)
    plane = tl.full([], splits, tl.int64) * G * (C * K)
    shares_g = tl.zeros([BC, BS], tl.float32)
    shares_gx = tl.zeros([BC, BS], tl.float32)
    for first in tl.range(0, splits * K, BS):
        _splits, share, there = shares_at(first, group, channel, in_c, G, C, splits, K, BS)
        shares_g += tl.load(partial_ptr + share, mask=there, other=0.0)
        shares_gx += tl.load(partial_ptr + plane + share, mask=there, other=0.0)
    scaled = r * tl.rsqrt(moving + eps) * tl.sum(shares_gx, 1)
    count = (tl.minimum(N - group * m, m) * L).to(tl.float32)
    tl.store(means_ptr + row, weight * scaled / count, mask=in_c)
    store_row(d_weight_ptr, row, scaled, in_c, WEIGHT)
    store_row(d_bias_ptr, row, tl.sum(shares_g, 1), in_c, BIAS)


@triton.jit(do_not_specialize=CHANGING)
def moving_backward_kernel(
    g_ptr, x_ptr, dx_ptr, weight_ptr, moving_ptr, r_ptr, own_ptr, means_ptr, past_ptr,
    N, G, C, L, m, splits, chunks, window, eps,
    BR: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, WEIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx of a share."""
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.num_programs(0) - 1 - tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    row = group.to(tl.int64) * C + channel
    weight = load_row(weight_ptr, channel, in_c, 1.0, WEIGHT)
    moving = tl.load(moving_ptr + row, mask=in_c, other=1.0)
    r = tl.load(r_ptr + row, mask=in_c, other=1.0)
    alone = tl.load(means_ptr + row, mask=in_c, other=0.0)
    average = window_mean(past_ptr, means_ptr, means_ptr, group, channel, in_c, C, window, BC, BW, False)
    average = tl.where(tl.load(own_ptr) != 0, alone, average)
    rho = tl.rsqrt(moving + eps)
    step = weight * r * rho
    slope = rho * rho * average
    last = tl.cdiv(chunks - split, splits) - 1
    for turn in tl.range(0, last + 1, num_stages=STAGES):
        chunk = split + (last - turn) * splits
        start, within, valid = tile_at(chunk, group, column, N, columns, rows, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        dx = g * step[None, :] - x * slope[None, :]
        tl.store(dx_ptr + start + within, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=CHANGING)
def moving_push_kernel(
    past_ptr, mean_ptr, rows_ptr, groups_ptr, G, C, window,
    BC: tl.constexpr, BW: tl.constexpr, BV: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Shift the past by G rows, if all rows of the batch are finite. With SQUARES, count these groups.

    Every program reads all rows, because none may write before all are known to be finite.
    """
    await_previous(PDL)
    bad = tl.zeros([BV], tl.int32)
    for first in tl.range(0, G * C, BV):
        value = first + tl.arange(0, BV)
        rows = load_rows(mean_ptr, rows_ptr, value, value < G * C, SQUARES)
        bad = tl.where(tl.abs(rows) < float("inf"), bad, 1)
    good = tl.max(bad, 0) == 0
    channel, in_c = channels_of(tl.program_id(0), C, BC, False)
    for first in tl.range(0, window - 1, BW):  # upwards, because a row moves down
        number = first + tl.arange(0, BW)
        joined = number + G
        there = (number < window - 1)[:, None] & in_c[None, :]
        old = (joined < window - 1)[:, None]
        before = joined.to(tl.int64)[:, None] * C + channel[None, :]
        now = (joined - (window - 1)).to(tl.int64)[:, None] * C + channel[None, :]
        moved = tl.load(past_ptr + before, mask=there & old, other=0.0)
        moved += load_rows(mean_ptr, rows_ptr, now, there & ~old, SQUARES)
        tl.debug_barrier()  # another thread may write below what this one has read
        tl.store(past_ptr + number.to(tl.int64)[:, None] * C + channel[None, :], moved, mask=there & good)
    if SQUARES:
        tl.store(groups_ptr, tl.load(groups_ptr) + tl.where(good, G, 0), mask=tl.program_id(0) == 0)


settle_keys(globals())
