"""The op as Triton kernels. It is imported on the CUDA path only. The backward is in `triton_backward.py`.

x (N, C, L) is read in tiles of BR positions × BC channels, in memory order. A channels_last tile may contain several
examples, because the rows of a group are adjacent in memory. A contiguous tile stays inside one example. On the
streamed path, K positions may form one row of a channels_last tile (`in_rows`). Each of the BR lanes of a tile sums
the differences of its values from its first value, and their squares. Lanes, tiles and programs are merged in fixed
order (Chan). So nothing cancels where |mean| ≫ σ, and equal inputs give equal bits. Statistics and filter are float32.

B is the size of x in bytes.

    streamed    reduce -> filter and apply     many programs share a group: 3B forward, 5B backward
    on chip     one program per group and channel block: 2B and 3B, because the second read comes from the cache
    held        the same, but a group's tile stays in registers: `triton_on_chip.py`

Loops prefetch tiles into shared memory in STAGES, so that a few programs keep the memory busy. The second read runs in
reverse order, because the values that were read last are still in the cache.

The mask of a ReLU is not stored. The backward computes (x - mean)·scale + β > 0 again. A residual is added before the
ReLU. Then the sign of the saved output is the mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.normalize import lanes
from kalmannorm._ops.triton_shared import await_previous, settle_keys, sum_of_products, update

VARYING = ["N", "G", "m", "splits", "chunks"]
"""Sizes that change with the batch. A new value must not recompile a kernel."""
FRESH = tl.constexpr(lanes.FRESH)


@triton.jit
def in_vectors(C, L, V: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """C and L, unchanged. The compiler sees that V divides the length of a row of x, and emits vector loads."""
    if CHANNELS_LAST:
        C = C // V * V
    else:
        L = L // V * V
    return C, L


@triton.jit
def in_rows(C, L, V: tl.constexpr, K: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """C, then the columns of a row and the rows of an example, if K positions form one row.

    So tiles are full even if the number of channels is no multiple of their width. The K columns of a channel are
    merged like shares of K programs.
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
    """The channels [BC] of a block, and the mask of those that exist. With even tiles the mask is a constant."""
    channel = block * BC + tl.arange(0, BC)
    return channel, tl.full([BC], 1, tl.int1) if EVEN else channel < C


@triton.jit
def tile_at(chunk, group, channel, N, C, L, m, BR: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr):
    """The start of a group's chunk in x, offsets [BR, BC] from it, and the mask of lanes with a value [BR]."""
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
    """The group, the share of its chunks and the block of channels of a program.

    The grid has one axis, because the others are limited to 65535 programs. A share is every `splits`-th chunk, so
    that programs that run at the same time read adjacent memory.
    """
    blocks = tl.cdiv(C, BC)
    return program // blocks // splits, program // blocks % splits, program % blocks


@triton.jit
def merge_lanes(count, mean, squares):
    """Merge lanes [BR], [BR, BC], [BR, BC] into one row: count, mean and sum of squared deviations."""
    total = tl.sum(count, 0)
    safe = tl.maximum(total, 1.0)
    merged = sum_of_products(mean, count[:, None], 0) / safe
    away = mean - merged[None, :]
    return total, merged, tl.sum(squares + count[:, None] * away * away, 0)


@triton.jit
def gather(x, valid, count, base, sums, squares, EVEN: tl.constexpr):
    """Add one value to every valid lane: its difference from the lane's first value, and the square of this."""
    if not EVEN:
        base = tl.where((count == 0.0)[:, None], x, base)
    away = tl.where(valid[:, None], x - base, 0.0)
    return count + valid.to(tl.float32), base, sums + away, squares + away * away


@triton.jit
def less(squares, part):
    """`squares - part`, but not below 0 because of rounding. NaN and infinity stay."""
    rest = squares - part
    return tl.where(squares < float("inf"), tl.where(rest < 0.0, 0.0, rest), squares)


@triton.jit
def merge_gathered(count, base, sums, squares):
    """Merge the results of `gather` into one row: count, mean and sum of squared deviations."""
    each = sums / tl.maximum(count, 1.0)[:, None]
    return merge_lanes(count, base + each, less(squares, each * sums))


@triton.jit
def merge_rows(count, mean, squares, other_count, other_mean, other_squares):
    """Merge two rows: count, mean and sum of squared deviations."""
    total = count + other_count
    share = other_count / tl.maximum(total, 1.0)
    away = other_mean - mean
    return total, mean + share * away, squares + other_squares + share * count * away * away


@triton.jit
def gathered(
    x_ptr, first, end, step, group, channel, in_c, N, C, L, m,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Count, mean and squared deviations of chunks from `first` to `end`. Lanes are merged once.

    The chunk `first` must exist.
    """
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
    """Count, mean and squared deviations of every `step`-th chunk of a group from `first` on.

    If a lane's first value is unlike the others, sums relative to it lose digits with every further value. So lanes
    are merged and restarted after FRESH chunks. ONCE: there are at most FRESH chunks.
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
    """A row of parameters as float32, or `fill` if there is no parameter."""
    if GIVEN:
        return tl.load(pointer + offset, mask=mask, other=fill).to(tl.float32)
    return tl.full(offset.shape, fill, tl.float32)


@triton.jit
def activated(z, RELU: tl.constexpr):
    """ReLU, if RELU. NaN stays NaN, as in `torch.relu`."""
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) if RELU else z


@triton.jit
def load_prior(
    prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c,
    prior_mean_row, prior_var_row, gain_step, PRIOR: tl.constexpr,
):  # fmt: skip
    """Prior mean and variance and the gain. Load them early, because their latency dominates."""
    wide = group.to(tl.int64)
    prior_mean = load_row(prior_mean_ptr, wide * prior_mean_row + channel, in_c, 0.0, PRIOR)
    prior_var = load_row(prior_var_ptr, wide * prior_var_row + channel, in_c, 1.0, PRIOR)
    return prior_mean, prior_var, load_row(gain_ptr, channel * gain_step, in_c, 0.5, PRIOR)


@triton.jit
def settle(
    total, mean, squared, prior_mean, prior_var, q, group, channel, mine,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR: tl.constexpr,
):  # fmt: skip
    """Store a group's observation and posterior where `mine` is true. Return the posterior."""
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
    """On chip: the whole forward for one group and BC channels."""
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
    """Streamed, first launch: mean and squared deviations (2, S, G, K, C) and row count (S, G) of a group's shares."""
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
    """BS shares of a group, K per split: their splits, offsets [BC, BS] in the partial sums, and the mask.

    Channels are the first axis, unlike in tiles of x. Otherwise the row that is summed over shares would impose its
    layout on x, and every tile of x would pass through shared memory before it is stored.
    """
    share = start + tl.arange(0, BS)
    split = share // K
    row = (split.to(tl.int64) * G + group) * K + share % K
    return split, row[None, :] * C + channel[:, None], (split < splits)[None, :] & in_c[:, None]


@triton.jit
def merge_shares(
    partial_ptr, count_ptr, group, channel, in_c, G, C, splits, K: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Merge a group's shares, BS at a time: count, mean and sum of squared deviations."""
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
    """After `reduce_kernel`, if nothing is normalized: the observation."""
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
    """Streamed, second launch: filter and y. All programs of a group compute the filter, and the first stores it."""
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


settle_keys(globals())
