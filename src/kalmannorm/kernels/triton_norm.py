"""The op as Triton kernels; imported on the CUDA path only. The backward: `triton_gradient.py`.

x (N, C, L) is read in tiles of BR positions × BC channels, in the order it lies: channels_last tiles cross examples,
because the rows of a group follow each other in memory; contiguous ones stay inside an example. Each of a tile's BR
lanes keeps a running mean and sum of squared deviations (Welford), and lanes, tiles and programs are merged in fixed
order (Chan): nothing cancels where |mean| ≫ σ, and equal inputs give equal bits. Statistics and filter are float32.
Sizes are divided and multiplied by V, which divides them, so that the compiler knows how wide it may load.

    streamed    reduce -> filter and apply     many programs share a group: 3B forward, 5B backward
    on chip     one program per group and channel block: 2B and 3B, for its second look comes from the cache
    held        the same where a group's tile stays in registers: `triton_held.py`

Loops have STAGES of copies into shared memory under way, so that a few programs keep the memory busy.

With a ReLU, its mask is not stored: the backward computes x·scale + shift > 0 again. With a residual, which is added
before the ReLU, the sign of the saved output is the mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm.kernels.triton_turns import in_turn

VARYING = ["N", "G", "m", "splits", "chunks", "chunks_per_split"]
"""Sizes that change with the batch: a new value must not build a kernel anew."""


@triton.jit
def tile_at(chunk, group, channel, N, C, L, m, BR: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Offsets [BR, BC] into x of a group's chunk, and which of its lanes hold a value [BR]."""
    lane = tl.arange(0, BR)
    first = (group * m).to(tl.int64)
    if CHANNELS_LAST:
        row = chunk * BR + lane
        rows = tl.minimum(N - group * m, m) * L
        valid = row < rows
        offset = first * L * C + row.to(tl.int64)[:, None] * C + channel[None, :]
    else:
        per_example = tl.cdiv(L, BR)
        example = chunk // per_example
        position = (chunk % per_example) * BR + lane
        valid = (position < L) & (group * m + example < N)
        offset = ((first + example) * C + channel[None, :]) * L + position[:, None]
    return offset, valid


@triton.jit
def place(C, splits, BC: tl.constexpr):
    """Which group, share of its chunks and block of channels; on one axis, for the others end at 65535 programs."""
    program = tl.program_id(0)
    blocks = tl.cdiv(C, BC)
    return program // blocks // splits, program // blocks % splits, program % blocks


@triton.jit
def merge_lanes(count, mean, squares):
    """Lanes [BR], [BR, BC], [BR, BC] into one row: how many values, their mean, their sum of squared deviations."""
    total = tl.sum(count, 0)
    safe = tl.maximum(total, 1.0)
    merged = tl.sum(mean * count[:, None], 0) / safe
    away = mean - merged[None, :]
    return total, merged, tl.sum(squares + count[:, None] * away * away, 0)


@triton.jit
def welford(x, valid, count, mean, squares):
    """One more value for every valid lane."""
    count += valid.to(tl.float32)
    away = tl.where(valid[:, None], x - mean, 0.0)
    mean += away * (1.0 / tl.maximum(count, 1.0))[:, None]
    squares += tl.where(valid[:, None], away * (x - mean), 0.0)
    return count, mean, squares


@triton.jit
def update(mean, var, prior_mean, prior_var, q):
    """The filter: prior and observation fused."""
    p = 1.0 - q
    d = mean - prior_mean
    return prior_mean + q * d, p * prior_var + q * var + p * q * d * d


@triton.jit
def update_backward(at_mean, at_var, mean, var, prior_mean, prior_var, q):
    """Gradients at the observation, at the prior and at the gain, from those at the posterior."""
    p = 1.0 - q
    d = mean - prior_mean
    at_d = q * at_mean + 2.0 * q * p * d * at_var
    at_q = at_mean * d + at_var * (var - prior_var + (1.0 - 2.0 * q) * d * d)
    return at_d, q * at_var, at_mean - at_d, p * at_var, at_q


@triton.jit
def load_row(pointer, at, mask, fill: tl.constexpr, GIVEN: tl.constexpr):
    """Parameters as float32; `fill` where there are none."""
    if GIVEN:
        return tl.load(pointer + at, mask=mask, other=fill).to(tl.float32)
    return tl.full(at.shape, fill, tl.float32)


@triton.jit
def activated(z, RELU: tl.constexpr):
    """A NaN stays one, as in `torch.relu`."""
    return tl.where(z <= 0.0, 0.0, z) if RELU else z


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
    PRIOR: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """On chip: the whole forward of one group and BC channels."""
    in_turn(PDL)
    if CHANNELS_LAST:
        C = C // V * V
    else:
        L = L // V * V
    group = tl.program_id(0) % G
    channel = (tl.program_id(0) // G) * BC + tl.arange(0, BC)
    in_c = channel < C
    prior_mean, prior_var, q = load_prior(
        prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c, prior_mean_row, prior_var_row, gain_step, PRIOR
    )  # fmt: skip
    weight = load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    shift = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    count = tl.zeros([BR], tl.float32)
    means = tl.zeros([BR, BC], tl.float32)
    squares = tl.zeros([BR, BC], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        offset, valid = tile_at(chunk, group, channel, N, C, L, m, BR, CHANNELS_LAST)
        x = tl.load(x_ptr + offset, mask=valid[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        count, means, squares = welford(x, valid, count, means, squares)
    total, mean, squared = merge_lanes(count, means, squares)
    mean, var = settle(
        total, mean, squared, prior_mean, prior_var, q, group, channel, in_c,
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR,
    )  # fmt: skip
    scale = tl.rsqrt(var + eps) * weight
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        offset, valid = tile_at(chunk, group, channel, N, C, L, m, BR, CHANNELS_LAST)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        z = (x - mean[None, :]) * scale[None, :] + shift[None, :]
        if RESIDUAL:
            z += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offset, activated(z, RELU).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def reduce_kernel(
    x_ptr, partial_ptr, count_ptr, N, G, C, L, m, splits, chunks, chunks_per_split,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Streamed, first: mean and squared deviations (2, S, G, C) of a share of a group, and its count (S, G)."""
    in_turn(PDL)
    if CHANNELS_LAST:
        C = C // V * V
    else:
        L = L // V * V
    group, split, block = place(C, splits, BC)
    channel = block * BC + tl.arange(0, BC)
    in_c = channel < C
    count = tl.zeros([BR], tl.float32)
    means = tl.zeros([BR, BC], tl.float32)
    squares = tl.zeros([BR, BC], tl.float32)
    start = split * chunks_per_split
    for chunk in tl.range(start, tl.minimum(start + chunks_per_split, chunks), num_stages=STAGES):
        offset, valid = tile_at(chunk, group, channel, N, C, L, m, BR, CHANNELS_LAST)
        x = tl.load(x_ptr + offset, mask=valid[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        count, means, squares = welford(x, valid, count, means, squares)
    total, mean, squared = merge_lanes(count, means, squares)
    row = (split * G + group).to(tl.int64)
    plane = tl.full([1], splits, tl.int64) * G * C
    tl.store(partial_ptr + row * C + channel, mean, mask=in_c)
    tl.store(partial_ptr + plane + row * C + channel, squared, mask=in_c)
    if block == 0:
        tl.store(count_ptr + row, total)


@triton.jit
def merge_shares(partial_ptr, count_ptr, group, channel, in_c, G, C, splits, BS: tl.constexpr):
    """A group's shares, all loaded at once, as one: how many values, their mean, their sum of squared deviations."""
    split = tl.arange(0, BS)
    in_s = split < splits
    mask = in_s[:, None] & in_c[None, :]
    share = (split.to(tl.int64) * G + group)[:, None] * C + channel[None, :]
    count = tl.load(count_ptr + split * G + group, mask=in_s, other=0.0)
    means = tl.load(partial_ptr + share, mask=mask, other=0.0)
    squares = tl.load(partial_ptr + tl.full([1], splits, tl.int64) * G * C + share, mask=mask, other=0.0)
    return merge_lanes(count, means, squares)


@triton.jit(do_not_specialize=VARYING)
def observe_kernel(
    partial_ptr, count_ptr, mean_ptr, var_ptr, G, C, splits, BS: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """After `reduce_kernel`, where nothing is to be normalized: the observation."""
    in_turn(PDL)
    group = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = channel < C
    total, mean, squared = merge_shares(partial_ptr, count_ptr, group, channel, in_c, G, C, splits, BS)
    row = group.to(tl.int64) * C + channel
    tl.store(mean_ptr + row, mean, mask=in_c)
    tl.store(var_ptr + row, squared / total, mask=in_c)


@triton.jit(do_not_specialize=VARYING)
def apply_kernel(
    x_ptr, y_ptr, residual_ptr, partial_ptr, count_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    N, G, C, L, m, splits, chunks, chunks_per_split,
    weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BS: tl.constexpr, PRIOR: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Streamed, second: the filter, which all programs of a group compute and its first one stores, and y."""
    in_turn(PDL)
    if CHANNELS_LAST:
        C = C // V * V
    else:
        L = L // V * V
    group, split, block = place(C, splits, BC)
    channel = block * BC + tl.arange(0, BC)
    in_c = channel < C
    prior_mean, prior_var, q = load_prior(
        prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c, prior_mean_row, prior_var_row, gain_step, PRIOR
    )  # fmt: skip
    weight = load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    shift = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    total, mean, squared = merge_shares(partial_ptr, count_ptr, group, channel, in_c, G, C, splits, BS)
    mean, var = settle(
        total, mean, squared, prior_mean, prior_var, q, group, channel, in_c & (split == 0),
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR,
    )  # fmt: skip
    scale = tl.rsqrt(var + eps) * weight
    start = split * chunks_per_split
    for chunk in tl.range(start, tl.minimum(start + chunks_per_split, chunks), num_stages=STAGES):
        offset, valid = tile_at(chunk, group, channel, N, C, L, m, BR, CHANNELS_LAST)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        z = (x - mean[None, :]) * scale[None, :] + shift[None, :]
        if RESIDUAL:
            z += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offset, activated(z, RELU).to(y_ptr.dtype.element_ty), mask=mask)
