"""Convolutions and linear layers of a bundle as Triton kernels: one pass over every weight, forward and backward.

A tile holds BK outputs × BC inputs × TP taps of a weight. Its last axis is the contiguous one in memory: taps, or
inputs (channels_last, or only one tap). Strides come from a table, so two flags tell the compiler about them. ONE: the
last axis has stride 1. WIDE: all other strides are multiples of four, and pointers are aligned to 16 bytes. The
equations are those of `moments/linear.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.propagate.triton_elementwise import (
    BIAS,
    COLUMNS,
    GEOMETRY,
    GRADIENT,
    GROUP_INPUTS,
    GROUP_OUTPUTS,
    INDEX,
    INPUTS,
    KINDS,
    MOVES,
    OUTPUTS,
    ROWS,
    SLOTS,
    START,
    STEP_GROUP,
    STEP_INPUT,
    STEP_OUTPUT,
    STEP_TAP,
    SUMS,
    TAPS,
    WANTED,
    WEIGHT,
    collect,
)
from kalmannorm._ops.triton_shared import await_previous, settle_keys, sum_of_products

STAGES = tl.constexpr(3)
"""Tiles of a weight that are on their way at the same time: one that is computed, and two that are loaded."""


@triton.jit
def along(BC: tl.constexpr, TP: tl.constexpr, TAPS_LAST: tl.constexpr):
    """Inputs and taps of a tile, [1, BC, 1] and [1, 1, TP], or with the last two axes swapped."""
    if TAPS_LAST:
        c, t = tl.arange(0, BC)[None, :, None], tl.arange(0, TP)[None, None, :]
    else:
        c, t = tl.arange(0, BC)[None, None, :], tl.arange(0, TP)[None, :, None]
    return c, t


@triton.jit
def strides_of(row, TAPS_LAST: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr):
    """Strides of a weight from input to input and from tap to tap."""
    step_input = 1 if ONE and not TAPS_LAST else tl.load(row + STEP_INPUT)
    step_tap = 1 if ONE and TAPS_LAST else multiple(row + STEP_TAP, WIDE)
    return step_input, step_tap


@triton.jit
def multiple(pointer, WIDE: tl.constexpr):
    value = tl.load(pointer)
    if WIDE:
        value = tl.multiple_of(value, 4)
    return value


@triton.jit
def weight_of(row, filters_ptr, TYPE: tl.constexpr, WIDE: tl.constexpr):
    address = tl.load(row + WEIGHT) + tl.load(row + MOVES) * filters_ptr.to(tl.int64)
    pointer = address.to(tl.pointer_type(TYPE))
    if WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["E"])
def layers_kernel(
    entries_ptr, sums_ptr, filters_ptr, table_ptr, work_ptr, index_ptr, geometry_ptr, E,
    BK: tl.constexpr, BC: tl.constexpr, TP: tl.constexpr,
    TAPS_LAST: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Means and variances of BK outputs of a layer. If there are several kinds of positions, sums by tap are kept."""
    await_previous(PDL)
    row = table_ptr + tl.load(work_ptr + 2 * tl.program_id(0)) * COLUMNS
    k = tl.load(work_ptr + 2 * tl.program_id(0) + 1) * BK + tl.arange(0, BK)
    weight_ptr = weight_of(row, filters_ptr, TYPE, WIDE)
    outputs, taps, kinds = tl.load(row + OUTPUTS), tl.load(row + TAPS), tl.load(row + KINDS)
    group_outputs, group_inputs = tl.load(row + GROUP_OUTPUTS), multiple(row + GROUP_INPUTS, WIDE)
    step_input, step_tap = strides_of(row, TAPS_LAST, ONE, WIDE)
    step_output = multiple(row + STEP_OUTPUT, WIDE)
    if GROUPED:
        group = (k // group_outputs)[:, None, None]
        line = group * multiple(row + STEP_GROUP, WIDE) + (k % group_outputs)[:, None, None] * step_output
    else:  # all outputs read the same inputs
        group = tl.zeros([1, 1, 1], tl.int32)
        line = k[:, None, None] * step_output
    listed = index_ptr + tl.load(row + INDEX) + group * group_inputs
    c, t = along(BC, TP, TAPS_LAST)
    in_k = (k < outputs)[:, None, None]
    if TAPS_LAST:
        sums = tl.zeros([BK, BC, TP], tl.float32)
        squares = tl.zeros([BK, BC, TP], tl.float32)
    else:
        sums = tl.zeros([BK, TP, BC], tl.float32)
        squares = tl.zeros([BK, TP, BC], tl.float32)
    for first in tl.range(0, group_inputs, BC, num_stages=STAGES):
        in_c = first + c < group_inputs
        listing = in_c & in_k if GROUPED else in_c
        entry = tl.load(listed + first + c, mask=listing, other=0)
        mean = tl.load(entries_ptr + entry, mask=listing, other=0.0)
        var = tl.load(entries_ptr + E + entry, mask=listing, other=0.0)
        offset = line + (first + c) * step_input + t * step_tap
        w = tl.load(weight_ptr + offset, mask=in_k & in_c & (t < taps), other=0.0).to(tl.float32)
        sums += w * mean
        squares += w * w * var
    by_tap = tl.sum(sums, 1 if TAPS_LAST else 2)  # [BK, TP]
    tap = tl.arange(0, TP)
    geometry = geometry_ptr + tl.load(row + GEOMETRY)
    share = tl.load(geometry + tap, mask=tap < taps, other=0.0)
    var = sum_of_products(tl.sum(squares, 1 if TAPS_LAST else 2), share[None, :], 1)
    mean = centre(by_tap, geometry, tap, taps, kinds)
    for kind in range(kinds):
        inside = tl.load(geometry + taps + kinds + kind * taps + tap, mask=tap < taps, other=0.0)
        away = sum_of_products(by_tap, inside[None, :], 1) - mean
        var += tl.load(geometry + taps + kind) * away * away
    kept = sums_ptr + tl.load(row + SUMS) + k[:, None] * taps + tap[None, :]
    tl.store(kept, by_tap, mask=(k < outputs)[:, None] & (tap < taps)[None, :] & (kinds > 1))
    bias = tl.load(row + BIAS)
    if bias != 0:
        mean += tl.load(bias.to(tl.pointer_type(TYPE)) + k, mask=k < outputs, other=0.0).to(tl.float32)
    start = tl.load(row + START)
    tl.store(entries_ptr + start + k, mean, mask=k < outputs)
    tl.store(entries_ptr + E + start + k, var, mask=k < outputs)


@triton.jit
def centre(by_tap, geometry, tap, taps, kinds):
    """The mean over kinds of positions [BK]."""
    mean = tl.zeros([by_tap.shape[0]], tl.float32)
    for kind in range(kinds):
        inside = tl.load(geometry + taps + kinds + kind * taps + tap, mask=tap < taps, other=0.0)
        mean += tl.load(geometry + taps + kind) * sum_of_products(by_tap, inside[None, :], 1)
    return mean


@triton.jit(do_not_specialize=["E", "S"])
def rows_backward_kernel(
    grad_ptr, sums_ptr, grad_sums_ptr, table_ptr, work_ptr, geometry_ptr, E,
    slots_ptr, S, first_ptr, start_ptr, step_ptr, count_ptr,
    BK: tl.constexpr, TP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients with respect to BK outputs, and with respect to their sums by tap."""
    await_previous(PDL)
    row = table_ptr + tl.load(work_ptr + 2 * tl.program_id(0)) * COLUMNS
    k = tl.load(work_ptr + 2 * tl.program_id(0) + 1) * BK + tl.arange(0, BK)
    outputs, taps, kinds = tl.load(row + OUTPUTS), tl.load(row + TAPS), tl.load(row + KINDS)
    in_k, entry = k < outputs, tl.load(row + START) + k
    grad_mean, grad_var = collect(slots_ptr, S, first_ptr, start_ptr, step_ptr, count_ptr, entry, in_k)
    tl.store(grad_ptr + entry, grad_mean, mask=in_k)
    tl.store(grad_ptr + E + entry, grad_var, mask=in_k)
    tap = tl.arange(0, TP)
    geometry = geometry_ptr + tl.load(row + GEOMETRY)
    kept = tl.load(row + SUMS) + k[:, None] * taps + tap[None, :]
    mask = in_k[:, None] & (tap < taps)[None, :]
    by_tap = tl.load(sums_ptr + kept, mask=mask & (kinds > 1), other=0.0)
    mean = centre(by_tap, geometry, tap, taps, kinds)
    grad_sums = tl.zeros([BK, TP], tl.float32)
    for kind in range(kinds):
        inside = tl.load(geometry + taps + kinds + kind * taps + tap, mask=tap < taps, other=0.0)
        away = sum_of_products(by_tap, inside[None, :], 1) - mean
        grad_kind = tl.load(geometry + taps + kind) * (grad_mean + 2.0 * grad_var * away)
        grad_sums += grad_kind[:, None] * inside[None, :]
    tl.store(grad_sums_ptr + kept, grad_sums, mask=mask)


@triton.jit(do_not_specialize=["E", "S"])
def layers_backward_kernel(
    entries_ptr, grad_ptr, grad_sums_ptr, gradient_ptr, slots_ptr, S, filters_ptr,
    table_ptr, work_ptr, index_ptr, geometry_ptr, E,
    BK: tl.constexpr, BC: tl.constexpr, TP: tl.constexpr,
    TAPS_LAST: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, DEPTHWISE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """For BC inputs of a group and a share of its outputs: the gradient of the weight, and a part of the inputs'.

    In depthwise layers each output has one input. Then BK is 1, and BC counts groups.
    """
    await_previous(PDL)
    work = work_ptr + 4 * tl.program_id(0)
    row = table_ptr + tl.load(work) * COLUMNS
    group, split = tl.load(work + 1), tl.load(work + 3)
    weight_ptr = weight_of(row, filters_ptr, TYPE, WIDE)
    taps, start, kept = tl.load(row + TAPS), tl.load(row + START), tl.load(row + SUMS)
    group_outputs, inputs = tl.load(row + GROUP_OUTPUTS), tl.load(row + INPUTS)
    group_inputs = multiple(row + GROUP_INPUTS, WIDE)
    step_group, step_output = multiple(row + STEP_GROUP, WIDE), multiple(row + STEP_OUTPUT, WIDE)
    step_input, step_tap = strides_of(row, TAPS_LAST, ONE, WIDE)
    stored = multiple(row + GRADIENT, WIDE)
    wanted = tl.load(row + WANTED) != 0
    column, t = along(BC, TP, TAPS_LAST)
    c = tl.load(work + 2) * BC + column
    in_c = c < (inputs if DEPTHWISE else group_inputs)
    entry = tl.load(index_ptr + tl.load(row + INDEX) + group * group_inputs + c, mask=in_c, other=0)
    mean = tl.load(entries_ptr + entry, mask=in_c, other=0.0)
    var = tl.load(entries_ptr + E + entry, mask=in_c, other=0.0)
    share = tl.load(geometry_ptr + tl.load(row + GEOMETRY) + t, mask=t < taps, other=0.0)
    if TAPS_LAST:
        to_mean = tl.zeros([BK, BC, TP], tl.float32)
        to_var = tl.zeros([BK, BC, TP], tl.float32)
    else:
        to_mean = tl.zeros([BK, TP, BC], tl.float32)
        to_var = tl.zeros([BK, TP, BC], tl.float32)
    begin = split * tl.load(row + ROWS)
    end = tl.minimum(begin + tl.load(row + ROWS), group_outputs)
    for first in tl.range(begin, end, BK, num_stages=STAGES):
        if DEPTHWISE:
            k = c
            in_k = in_c
            offset = c * step_group + t * step_tap
        else:
            k = (first + tl.arange(0, BK))[:, None, None]
            in_k = k < end
            offset = group * step_group + k * step_output + c * step_input + t * step_tap
            k = group * group_outputs + k
        there = in_k & in_c & (t < taps)
        w = tl.load(weight_ptr + offset, mask=there, other=0.0).to(tl.float32)
        grad_sum = tl.load(grad_sums_ptr + kept + k * taps + t, mask=in_k & (t < taps), other=0.0)
        grad_var = tl.load(grad_ptr + E + start + k, mask=in_k, other=0.0) * share
        change = grad_sum * mean + 2.0 * grad_var * w * var
        tl.store(gradient_ptr + stored + offset, change.to(TYPE), mask=there & wanted)
        to_mean += grad_sum * w
        to_var += grad_var * w * w
    slot = tl.load(row + SLOTS) + split * inputs + group * group_inputs + tl.load(work + 2) * BC + tl.arange(0, BC)
    in_slot = tl.load(work + 2) * BC + tl.arange(0, BC) < (inputs if DEPTHWISE else group_inputs)
    tl.store(slots_ptr + slot, tl.sum(tl.sum(to_mean, 2 if TAPS_LAST else 1), 0), mask=in_slot)
    tl.store(slots_ptr + S + slot, tl.sum(tl.sum(to_var, 2 if TAPS_LAST else 1), 0), mask=in_slot)


settle_keys(globals())
