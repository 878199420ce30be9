"""The op as Triton kernels; imported on the CUDA path only. The backward: `triton_backward.py`.

x (N, C, L) is read in tiles of BR positions × BC channels, in the order it lies: channels_last tiles cross examples,
because the rows of a group follow each other in memory; contiguous ones stay inside an example. Streamed, K positions
may lie abreast in a row of a channels_last tile (`in_rows`). Each of a tile's BR
lanes sums how far so many values are from the first of them, and the squares of that; lanes, tiles and programs are
merged in fixed order (Chan): nothing cancels where |mean| ≫ σ, and equal inputs give equal bits. Statistics and filter
are float32.

    streamed    reduce -> filter and apply     many programs share a group: 3B forward, 5B backward
    on chip     one program per group and channel block: 2B and 3B, for its second look comes from the cache
    held        the same where a group's tile stays in registers: `triton_on_chip.py`

Loops have STAGES of copies into shared memory under way, so that a few programs keep the memory busy. Whatever looks a
second time goes the other way: what was read last is what the cache still has.

With a ReLU, its mask is not stored: the backward computes (x - mean)·scale + β > 0 again. With a residual, which is
added before the ReLU, the sign of the saved output is the mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.normalize import tiling
from kalmannorm._ops.triton_shared import await_previous, sum_of_products, update

VARYING = ["N", "G", "m", "splits", "chunks"]
"""Sizes that change with the batch: a new value must not build a kernel anew."""
FRESH = tl.constexpr(tiling.FRESH)


@triton.jit
def in_vectors(C, L, V: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """C and L as they are; but the compiler sees that V divides the one that a row of x is long, and loads as wide."""
    if CHANNELS_LAST:
        C = C // V * V
    else:
        L = L // V * V
    return C, L


@triton.jit
def in_rows(C, L, V: tl.constexpr, K: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """C, and x as tiles see it where K positions lie abreast in a row: columns of a row, and rows of an example.

    So channels that are no multiple of a tile's width fill all of it. What is found of a channel in each of its K
    columns is merged as if programs had shared it.
    """
    if K == 1:
        C, L = in_vectors(C, L, V, CHANNELS_LAST)
        return C, C, L
    columns, rows = in_vectors(C * K, L // K, V, CHANNELS_LAST)
    return C, columns, rows


@triton.jit
def channel_at(column, C, K: tl.constexpr):
    return column if K == 1 else column % C


@triton.jit
def channels_of(block, C, BC: tl.constexpr, EVEN: tl.constexpr):
    """The channels [BC] of a block, and which of them there are; where tiles are even, the compiler knows: all."""
    channel = block * BC + tl.arange(0, BC)
    return channel, tl.full([BC], 1, tl.int1) if EVEN else channel < C


@triton.jit
def tile_at(chunk, group, channel, N, C, L, m, BR: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr):
    """Where a group's chunk begins in x, offsets [BR, BC] from there, and which of its lanes hold a value [BR]."""
    lane = tl.arange(0, BR)
    first = (group * m).to(tl.int64)
    if CHANNELS_LAST:
        valid = chunk * BR + lane < tl.minimum(N - group * m, m) * L
        start = (first * L + chunk * BR) * C
        within = lane[:, None] * C + channel[None, :]
    else:
        per_example = tl.cdiv(L, BR)
        example = chunk // per_example
        position = (chunk % per_example) * BR
        valid = (position + lane < L) & (group * m + example < N)
        start = (first + example) * C * L + position
        within = channel.to(tl.int64)[None, :] * L + lane[:, None]
    return start, within, tl.full([BR], 1, tl.int1) if EVEN else valid


@triton.jit
def place(program, C, splits, BC: tl.constexpr):
    """Which group, share of its chunks and block of channels; on one axis, for the others end at 65535 programs.

    A share is every `splits`-th chunk, so that programs that run together read what lies together.
    """
    blocks = tl.cdiv(C, BC)
    return program // blocks // splits, program // blocks % splits, program % blocks


@triton.jit
def merge_lanes(count, mean, squares):
    """Lanes [BR], [BR, BC], [BR, BC] into one row: how many values, their mean, their sum of squared deviations."""
    total = tl.sum(count, 0)
    safe = tl.maximum(total, 1.0)
    merged = sum_of_products(mean, count[:, None], 0) / safe
    away = mean - merged[None, :]
    return total, merged, tl.sum(squares + count[:, None] * away * away, 0)


@triton.jit
def gather(x, valid, count, base, sums, squares, EVEN: tl.constexpr):
    """One more value for every valid lane: how far it is from the lane's first one, and the square of that."""
    if not EVEN:
        base = tl.where((count == 0.0)[:, None], x, base)
    away = tl.where(valid[:, None], x - base, 0.0)
    return count + valid.to(tl.float32), base, sums + away, squares + away * away


@triton.jit
def less(squares, part):
    """Squares without a part of them, not below 0, as rounding might have it. A NaN stays one, and infinity too."""
    rest = squares - part
    return tl.where(squares < float("inf"), tl.where(rest < 0.0, 0.0, rest), squares)


@triton.jit
def merge_gathered(count, base, sums, squares):
    """What `gather` found, as one row: how many values, their mean, their sum of squared deviations."""
    each = sums / tl.maximum(count, 1.0)[:, None]
    return merge_lanes(count, base + each, less(squares, each * sums))


@triton.jit
def merge_rows(count, mean, squares, other_count, other_mean, other_squares):
    """Two rows as one: how many values, their mean, their sum of squared deviations."""
    total = count + other_count
    share = other_count / tl.maximum(total, 1.0)
    away = other_mean - mean
    return total, mean + share * away, squares + other_squares + share * count * away * away


@triton.jit
def gathered(
    x_ptr, first, end, step, group, channel, in_c, N, C, L, m,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same of chunks up to `end`, the first of which is there, in sums that are merged once."""
    start, within, valid = tile_at(first, group, channel, N, C, L, m, BR, CHANNELS_LAST, EVEN)
    base = tl.load(x_ptr + start + within, mask=valid[:, None] & in_c[None, :], other=0.0).to(tl.float32)
    count = valid.to(tl.float32)
    sums = tl.zeros([BR, BC], tl.float32)
    squares = tl.zeros([BR, BC], tl.float32)
    for chunk in tl.range(first + step, end, step, num_stages=STAGES):
        start, within, valid = tile_at(chunk, group, channel, N, C, L, m, BR, CHANNELS_LAST, EVEN)
        x = tl.load(x_ptr + start + within, mask=valid[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        count, base, sums, squares = gather(x, valid, count, base, sums, squares, EVEN)
    return merge_gathered(count, base, sums, squares)


@triton.jit
def observed(
    x_ptr, first, step, group, channel, in_c, N, C, L, m, chunks,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """Every `step`-th chunk of a group from `first` on: how many values, their mean, their squared deviations.

    Sums relative to a lane's first value lose digits with every value more, where that one is unlike the others. So
    after FRESH chunks lanes are merged, and begin anew; ONCE tells that there are no more.
    """
    if ONCE:
        return gathered(
            x_ptr, first, chunks, step, group, channel, in_c, N, C, L, m, BR, BC, STAGES, CHANNELS_LAST, EVEN
        )
    total = 0.0
    mean = tl.zeros([BC], tl.float32)
    squared = tl.zeros([BC], tl.float32)
    for begin in range(first, chunks, step * FRESH):
        end = tl.minimum(chunks, begin + step * FRESH)
        other = gathered(x_ptr, begin, end, step, group, channel, in_c, N, C, L, m, BR, BC, STAGES, CHANNELS_LAST, EVEN)
        total, mean, squared = merge_rows(total, mean, squared, *other)
    return total, mean, squared


@triton.jit
def load_row(pointer, offset, mask, fill: tl.constexpr, GIVEN: tl.constexpr):
    """Parameters as float32; `fill` where there are none."""
    if GIVEN:
        return tl.load(pointer + offset, mask=mask, other=fill).to(tl.float32)
    return tl.full(offset.shape, fill, tl.float32)


@triton.jit
def activated(z, RELU: tl.constexpr):
    """A NaN stays one, as in `torch.relu`."""
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) if RELU else z


@triton.jit
def load_prior(
    prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c,
    prior_mean_row, prior_var_row, gain_step, PRIOR: tl.constexpr,
):  # fmt: skip
    """Prior mean and variance and the gain, to be asked for early: waiting for them is what takes time."""
    wide = group.to(tl.int64)
    prior_mean = load_row(prior_mean_ptr, wide * prior_mean_row + channel, in_c, 0.0, PRIOR)
    prior_var = load_row(prior_var_ptr, wide * prior_var_row + channel, in_c, 1.0, PRIOR)
    return prior_mean, prior_var, load_row(gain_ptr, channel * gain_step, in_c, 0.5, PRIOR)


@triton.jit
def settle(
    total, mean, squared, prior_mean, prior_var, q, group, channel, mine,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR: tl.constexpr,
):  # fmt: skip
    """A group's observation and, after the filter, its posterior, both stored where `mine`; returns the posterior."""
    var = squared / total
    row = group.to(tl.int64) * C + channel
    tl.store(observed_mean_ptr + row, mean, mask=mine)
    tl.store(observed_var_ptr + row, var, mask=mine)
    if PRIOR:
        mean, var = update(mean, var, prior_mean, prior_var, q)
    tl.store(mean_ptr + row, mean, mask=mine)
    tl.store(var_ptr + row, var, mask=mine)
    return mean, var


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    x_ptr, y_ptr, residual_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    N, G, C, L, m, chunks, weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    EVEN: tl.constexpr, ONCE: tl.constexpr, PRIOR: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """On chip: the whole forward of one group and BC channels."""
    await_previous(PDL)
    C, L = in_vectors(C, L, V, CHANNELS_LAST)
    group = tl.program_id(0) % G
    channel, in_c = channels_of(tl.program_id(0) // G, C, BC, EVEN)
    prior_mean, prior_var, q = load_prior(
        prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c, prior_mean_row, prior_var_row, gain_step, PRIOR
    )  # fmt: skip
    weight = load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    total, centre, squared = observed(
        x_ptr, 0, 1, group, channel, in_c, N, C, L, m, chunks, BR, BC, STAGES, CHANNELS_LAST, EVEN, ONCE
    )
    mean, var = settle(
        total, centre, squared, prior_mean, prior_var, q, group, channel, in_c,
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR,
    )  # fmt: skip
    scale = tl.rsqrt(var + eps) * weight
    for turn in tl.range(0, chunks, num_stages=STAGES):
        start, within, valid = tile_at(chunks - 1 - turn, group, channel, N, C, L, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        z = (x - mean[None, :]) * scale[None, :] + bias[None, :]
        if RESIDUAL:
            z += tl.load(residual_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + within, activated(z, RELU).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def reduce_kernel(
    x_ptr, partial_ptr, count_ptr, N, G, C, L, m, splits, chunks,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Streamed, first: mean and squared deviations (2, S, G, K, C) of a share of a group; rows of it (S, G)."""
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    total, mean, squared = observed(
        x_ptr, split, splits, group, column, in_c, N, columns, rows, m, chunks,
        BR, BC, STAGES, CHANNELS_LAST, EVEN, ONCE,
    )  # fmt: skip
    row = (split * G + group).to(tl.int64)
    plane = tl.full([1], splits, tl.int64) * G * columns
    tl.store(partial_ptr + row * columns + column, mean, mask=in_c)
    tl.store(partial_ptr + plane + row * columns + column, squared, mask=in_c)
    if block == 0:
        tl.store(count_ptr + row, total)


@triton.jit
def shares_at(start, group, channel, in_c, G, C, splits, K: tl.constexpr, BS: tl.constexpr):
    """BS shares of a group, K of each split: whose they are, offsets [BC, BS] in partial sums, which are there.

    Channels come first, across to x: a row summed over shares would otherwise bring its layout along, and every tile of
    x would go through shared memory to be stored.
    """
    share = start + tl.arange(0, BS)
    split = share // K
    row = (split.to(tl.int64) * G + group) * K + share % K
    return split, row[None, :] * C + channel[:, None], (split < splits)[None, :] & in_c[:, None]


@triton.jit
def merge_shares(
    partial_ptr, count_ptr, group, channel, in_c, G, C, splits, K: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """A group's shares as one, BS at a time: how many values, their mean, their sum of squared deviations."""
    base = tl.load(partial_ptr + group.to(tl.int64) * (C * K) + channel, mask=in_c, other=0.0)
    squares_ptr = partial_ptr + tl.full([], splits, tl.int64) * G * (C * K)
    counts = tl.zeros([BS], tl.float32)
    sums = tl.zeros([BC, BS], tl.float32)
    squares = tl.zeros([BC, BS], tl.float32)
    for start in tl.range(0, splits * K, BS):
        split, share, there = shares_at(start, group, channel, in_c, G, C, splits, K, BS)
        count = tl.load(count_ptr + split * G + group, mask=split < splits, other=0.0)
        away = tl.load(partial_ptr + share, mask=there, other=0.0) - base[:, None]
        squared = tl.load(squares_ptr + share, mask=there, other=0.0)
        counts += count
        sums += count[None, :] * away
        squares += squared + count[None, :] * away * away
    total, summed = tl.sum(counts, 0), tl.sum(sums, 1)
    missed = summed / total
    return total, base + missed, less(tl.sum(squares, 1), missed * summed)


@triton.jit(do_not_specialize=VARYING)
def observe_kernel(
    partial_ptr, count_ptr, mean_ptr, var_ptr, G, C, splits,
    K: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """After `reduce_kernel`, where nothing is to be normalized: the observation."""
    await_previous(PDL)
    group = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = channel < C
    total, mean, squared = merge_shares(partial_ptr, count_ptr, group, channel, in_c, G, C, splits, K, BC, BS)
    row = group.to(tl.int64) * C + channel
    tl.store(mean_ptr + row, mean, mask=in_c)
    tl.store(var_ptr + row, squared / total, mask=in_c)


@triton.jit(do_not_specialize=VARYING)
def apply_kernel(
    x_ptr, y_ptr, residual_ptr, partial_ptr, count_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    N, G, C, L, m, splits, chunks,
    weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, BS: tl.constexpr, PRIOR: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Streamed, second: the filter, which all programs of a group compute and its first one stores, and y."""
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.num_programs(0) - 1 - tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    prior_mean, prior_var, q = load_prior(
        prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c, prior_mean_row, prior_var_row, gain_step, PRIOR
    )  # fmt: skip
    weight = load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    total, centre, squared = merge_shares(partial_ptr, count_ptr, group, channel, in_c, G, C, splits, K, BC, BS)
    mean, var = settle(
        total, centre, squared, prior_mean, prior_var, q, group, channel, in_c & (column == channel) & (split == 0),
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR,
    )  # fmt: skip
    scale = tl.rsqrt(var + eps) * weight
    last = tl.cdiv(chunks - split, splits) - 1
    for turn in tl.range(0, last + 1, num_stages=STAGES):
        chunk = split + (last - turn) * splits
        start, within, valid = tile_at(chunk, group, column, N, columns, rows, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        z = (x - mean[None, :]) * scale[None, :] + bias[None, :]
        if RESIDUAL:
            z += tl.load(residual_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + within, activated(z, RELU).to(y_ptr.dtype.element_ty), mask=mask)
