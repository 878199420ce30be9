"""The kernels that update running statistics. `triton_one.py` and `triton_many.py` launch them.

Every program pools the groups of BC channels and computes their new averages. Programs count with an integer how many
have finished. The last one knows whether all averages are finite. If they are, it updates every buffer. Otherwise it
counts a skipped batch and updates nothing else.

The kernel for many norms finds each norm through a table of sizes and addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.triton_shared import await_previous, settle_keys, sum_of_products

TOTAL, PLAIN, SIGMA, FIRST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
KINDS = {"total": TOTAL, "plain": PLAIN, "sigma": SIGMA, "first": FIRST}
"""The quantity that is pooled and averaged: total variances, plain variances, or (Batch Renorm) standard deviations.
FIRST (Moving Average Batch Norm): total variances, and the first batch has a weight of 1."""
BAD = tl.constexpr(1 << 16)
"""A program that found a value that is not finite adds this to the count of finished programs."""


@triton.jit
def share_of(group, N, G, m):
    """The share of the examples in each group. 0 for groups that do not exist."""
    return tl.where(group < G, tl.minimum(N - group * m, m), 0).to(tl.float32) / N


@triton.jit
def load_groups(rows_ptr, group, G, C, channel):
    at = group.to(tl.int64)[:, None] * C + channel[None, :]
    return tl.load(rows_ptr + at, mask=(group < G)[:, None] & (channel < C)[None, :], other=0.0)


@triton.jit
def spread_of(mean, var, average, eps, KIND: tl.constexpr):
    """The quantity that is averaged for the variance."""
    if KIND == SIGMA:
        var = tl.sqrt(var + eps)
    elif KIND != PLAIN:
        away = mean - average[None, :]
        var += away * away
    return var


@triton.jit
def variance(spread, eps, KIND: tl.constexpr):
    return spread * spread - eps if KIND == SIGMA else spread


@triton.jit
def pool_tile(mean, var, share, eps, KIND: tl.constexpr):
    """Pool the groups of one tile to a row (C,), each weighted by its examples."""
    average = sum_of_products(mean, share[:, None], 0)
    spread = sum_of_products(spread_of(mean, var, average, eps, KIND), share[:, None], 0)
    return average, variance(spread, eps, KIND)


@triton.jit
def pool(mean_ptr, var_ptr, N, G, C, m, channel, eps, BG: tl.constexpr, BC: tl.constexpr, KIND: tl.constexpr):
    """Pool more groups than one tile holds to a row (C,)."""
    means = tl.zeros([BG, BC], tl.float32)
    for start in range(0, G, BG):
        group = start + tl.arange(0, BG)
        means += load_groups(mean_ptr, group, G, C, channel) * share_of(group, N, G, m)[:, None]
    average = tl.sum(means, 0)
    spreads = tl.zeros([BG, BC], tl.float32)
    for start in range(0, G, BG):
        group = start + tl.arange(0, BG)
        mean = load_groups(mean_ptr, group, G, C, channel)
        spread = spread_of(mean, load_groups(var_ptr, group, G, C, channel), average, eps, KIND)
        spreads += spread * share_of(group, N, G, m)[:, None]
    return average, variance(tl.sum(spreads, 0), eps, KIND)


@triton.jit
def updated(mean, var, new_mean, new_var, alpha, eps, KIND: tl.constexpr):
    """The new averages: `averages.updated`, or the rule of Batch Renorm."""
    step = new_mean - mean
    if KIND == SIGMA:
        sigma = tl.sqrt(var + eps)
        sigma += alpha * (tl.sqrt(new_var + eps) - sigma)
        to = sigma * sigma - eps
        return mean + alpha * step, tl.where(to < 0.0, 0.0, to)
    if KIND != PLAIN:
        new_var += (1.0 - alpha) * step * step
    return mean + alpha * step, var + alpha * (new_var - var)


@triton.jit
def broken(mean, var, mask):
    """1 if any of these values is NaN or Inf, else 0."""
    finite = (tl.abs(mean) < float("inf")) & (tl.abs(var) < float("inf"))
    return tl.max((mask & ~finite).to(tl.int32), 0)


@triton.jit
def copy_rows(source_ptr, mean_ptr, var_ptr, C, channel):
    """Copy two rows (C,). L1 caches are bypassed, because other programs wrote the rows."""
    in_c = channel < C
    tl.store(mean_ptr + channel, tl.load(source_ptr + channel, mask=in_c, cache_modifier=".cg"), mask=in_c)
    tl.store(var_ptr + channel, tl.load(source_ptr + C + channel, mask=in_c, cache_modifier=".cg"), mask=in_c)


@triton.jit
def track_block(
    block, blocks,
    mean_ptr, var_ptr, seen_mean_ptr, seen_var_ptr,
    running_mean_ptr, running_var_ptr, observed_mean_ptr, observed_var_ptr,
    values_ptr, batches_ptr, skipped_ptr, scratch_ptr, arrived_ptr,
    N, G, C, m, values, momentum, observation_momentum, eps,
    BG: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr, ONE_TILE: tl.constexpr, ALONE: tl.constexpr,
    KIND: tl.constexpr, CUMULATIVE: tl.constexpr, OBSERVES: tl.constexpr,
):  # fmt: skip
    """Update one of the `blocks` of BC channels of a norm. Each program runs one block."""
    channel = block * BC + tl.arange(0, BC)
    in_c = channel < C
    # Load everything first, because latency dominates here.
    seen = tl.load(values_ptr)
    batches = tl.load(batches_ptr)
    skipped = tl.load(skipped_ptr)
    mean = tl.load(running_mean_ptr + channel, mask=in_c, other=0.0)
    var = tl.load(running_var_ptr + channel, mask=in_c, other=0.0)
    if OBSERVES:
        observed_mean = tl.load(observed_mean_ptr + channel, mask=in_c, other=0.0)
        observed_var = tl.load(observed_var_ptr + channel, mask=in_c, other=0.0)
    if ONE_TILE:
        group = tl.arange(0, BG)
        share = share_of(group, N, G, m)
        means = load_groups(mean_ptr, group, G, C, channel)
        variances = load_groups(var_ptr, group, G, C, channel)
        if OBSERVES:
            seen_means = load_groups(seen_mean_ptr, group, G, C, channel)
            seen_variances = load_groups(seen_var_ptr, group, G, C, channel)
        new_mean, new_var = pool_tile(means, variances, share, eps, KIND)
        if OBSERVES:
            seen_mean, seen_var = pool_tile(seen_means, seen_variances, share, eps, TOTAL)
    else:
        new_mean, new_var = pool(mean_ptr, var_ptr, N, G, C, m, channel, eps, BG, BC, KIND)
        if OBSERVES:
            seen_mean, seen_var = pool(seen_mean_ptr, seen_var_ptr, N, G, C, m, channel, eps, BG, BC, TOTAL)

    total = tl.where(seen > 0, seen, batches * values) + values
    cumulative = (values * 1.0) / total.to(tl.float32)
    alpha = cumulative if CUMULATIVE else momentum
    if KIND == FIRST:
        alpha = tl.where(batches == 0, 1.0, alpha)
    mean, var = updated(mean, var, new_mean, new_var, alpha, eps, KIND)
    bad = broken(mean, var, in_c)
    if OBSERVES:
        slow = cumulative
        if not CUMULATIVE:  # as `averages.hastened`
            slow = tl.maximum(4.0 * cumulative / (1.0 + 3.0 * cumulative), observation_momentum)
        observed_mean, observed_var = updated(observed_mean, observed_var, seen_mean, seen_var, slow, eps, TOTAL)
        bad = tl.maximum(bad, broken(observed_mean, observed_var, in_c))

    tl.debug_barrier()
    if ALONE:
        good = in_c & (bad == 0)
        tl.store(running_mean_ptr + channel, mean, mask=good)
        tl.store(running_var_ptr + channel, var, mask=good)
        if OBSERVES:
            tl.store(observed_mean_ptr + channel, observed_mean, mask=good)
            tl.store(observed_var_ptr + channel, observed_var, mask=good)
        tl.store(values_ptr, tl.where(bad == 0, total, seen))
        tl.store(batches_ptr, batches + 1 - bad)
        tl.store(skipped_ptr, skipped + bad)
    else:
        tl.store(scratch_ptr + channel, mean, mask=in_c)
        tl.store(scratch_ptr + C + channel, var, mask=in_c)
        if OBSERVES:
            tl.store(scratch_ptr + 2 * C + channel, observed_mean, mask=in_c)
            tl.store(scratch_ptr + 3 * C + channel, observed_var, mask=in_c)
        tl.debug_barrier()  # this program's rows must be in memory before it counts as finished
        arrived = tl.atomic_add(arrived_ptr, 1 + bad * BAD, sem="acq_rel") + 1 + bad * BAD
        if arrived % BAD == blocks:
            tl.store(arrived_ptr, 0)
            if arrived < BAD:
                tl.store(values_ptr, total)
                tl.store(batches_ptr, batches + 1)
                for start in range(0, C, WIDE):
                    wide = start + tl.arange(0, WIDE)
                    copy_rows(scratch_ptr, running_mean_ptr, running_var_ptr, C, wide)
                    if OBSERVES:
                        copy_rows(scratch_ptr + 2 * C, observed_mean_ptr, observed_var_ptr, C, wide)
            else:
                tl.store(skipped_ptr, skipped + 1)


@triton.jit(do_not_specialize=["N", "G", "m", "values"])
def track_kernel(
    mean_ptr, var_ptr, seen_mean_ptr, seen_var_ptr,
    running_mean_ptr, running_var_ptr, observed_mean_ptr, observed_var_ptr,
    values_ptr, batches_ptr, skipped_ptr, scratch_ptr, arrived_ptr,
    N, G, C, m, values, momentum, observation_momentum, eps,
    BG: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr, ONE_TILE: tl.constexpr, ALONE: tl.constexpr,
    KIND: tl.constexpr, CUMULATIVE: tl.constexpr, OBSERVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    track_block(
        tl.program_id(0), tl.num_programs(0),
        mean_ptr, var_ptr, seen_mean_ptr, seen_var_ptr,
        running_mean_ptr, running_var_ptr, observed_mean_ptr, observed_var_ptr,
        values_ptr, batches_ptr, skipped_ptr, scratch_ptr, arrived_ptr,
        N, G, C, m, values, momentum, observation_momentum, eps,
        BG, BC, WIDE, ONE_TILE, ALONE, KIND, CUMULATIVE, OBSERVES,
    )  # fmt: skip


# Columns of the table.
COLUMNS = tl.constexpr(16)
EXAMPLES = tl.constexpr(0)
GROUPS = tl.constexpr(1)
CHANNELS = tl.constexpr(2)
SIZE = tl.constexpr(3)  # examples per group
VALUES = tl.constexpr(4)
BLOCKS = tl.constexpr(5)  # programs that share the norm
ROWS = tl.constexpr(6)  # start of its rows: means, variances, observed means, observed variances
SCRATCH = tl.constexpr(7)  # start of its new averages, until its last program stores them
COUNTS = tl.constexpr(8)  # addresses of values, batches and skipped batches
AVERAGES = tl.constexpr(11)  # addresses of running mean, running variance, observed mean, observed variance
OBSERVED = tl.constexpr(13)
RATES = tl.constexpr(15)  # two float32: momentum and observation momentum


@triton.jit
def integer(pointer):
    return tl.load(pointer).to(tl.int32)


@triton.jit
def address(pointer, TYPE: tl.constexpr):
    return tl.load(pointer).to(tl.pointer_type(TYPE))


@triton.jit
def track_many_kernel(
    rows_ptr, table_ptr, work_ptr, scratch_ptr, arrived_ptr,
    BG: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr, ONE_TILE: tl.constexpr,
    KIND: tl.constexpr, CUMULATIVE: tl.constexpr, OBSERVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    work = work_ptr + 2 * tl.program_id(0)
    number, block = tl.load(work), integer(work + 1)
    row = table_ptr + number * COLUMNS
    N, G, C, m = integer(row + EXAMPLES), integer(row + GROUPS), integer(row + CHANNELS), integer(row + SIZE)
    values = tl.load(row + VALUES)
    mean_ptr = rows_ptr + tl.load(row + ROWS)
    step = G.to(tl.int64) * C
    rates = (row + RATES).to(tl.pointer_type(tl.float32))
    counts, averages, observed = row + COUNTS, row + AVERAGES, row + OBSERVED
    track_block(
        block, integer(row + BLOCKS),
        mean_ptr, mean_ptr + step, mean_ptr + 2 * step, mean_ptr + 3 * step,
        address(averages, tl.float32), address(averages + 1, tl.float32),
        address(observed, tl.float32), address(observed + 1, tl.float32),
        address(counts, tl.int64), address(counts + 1, tl.int64), address(counts + 2, tl.int64),
        scratch_ptr + tl.load(row + SCRATCH), arrived_ptr + number,
        # eps is 0: only averages of standard deviations need it, and no norm with a wire uses them.
        N, G, C, m, values, tl.load(rates), tl.load(rates + 1), 0.0,
        BG, BC, WIDE, ONE_TILE, False, KIND, CUMULATIVE, OBSERVES,
    )  # fmt: skip


settle_keys(globals())
