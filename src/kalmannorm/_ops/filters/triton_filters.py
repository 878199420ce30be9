"""The kernels that compute the filters of many convolutions in one launch, and their backward in another.

A row is the weight of one output channel. A program computes a block of rows of one layer: many short rows, or one long
row. Its layer and its block are in a list, and the sizes of layers are in a table. Weights and gradients are found by
their addresses, or in one tensor that contains them all. Sums are over at most 2048 lanes, in a fixed order, so every
run gives the same bits. A row gets the same bits whichever layers are computed with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.triton_shared import await_previous, settle_keys

COLUMNS = tl.constexpr(4)
START = tl.constexpr(0)  # of the layer in a tensor that contains all layers
STATISTICS = tl.constexpr(1)  # start of its means, and of its scales
ROWS = tl.constexpr(2)
LENGTH = tl.constexpr(3)

TILES = ((32, 64), (4, 512), (1, 2048))
"""Rows and columns of the tiles. A layer takes the first one that is as long as its rows, or else the last."""
SHORT, MIDDLE = tl.constexpr(64), tl.constexpr(512)


def rows_at_once(length: int) -> int:
    """How many rows of this length a program computes."""
    return next((rows for rows, columns in TILES if length <= columns), TILES[-1][0])


@triton.jit
def layer_at(memory_ptr, addresses_ptr, layer, start, TYPE: tl.constexpr, GATHERED: tl.constexpr):
    """Where the values of a layer begin."""
    return memory_ptr + start if GATHERED else tl.load(addresses_ptr + layer).to(tl.pointer_type(TYPE))


@triton.jit
def places(k, first, rows, length, BL: tl.constexpr):
    """Offsets of a tile in its layer, and which of them exist."""
    column = first + tl.arange(0, BL)
    offset = k.to(tl.int64)[:, None] * length + column[None, :]
    return offset, (k < rows)[:, None] & (column < length)[None, :]


@triton.jit
def filter_rows(
    weight_ptr, filter_ptr, mean_ptr, scale_ptr, block, rows, length, eps,
    BK: tl.constexpr, BL: tl.constexpr, STANDARDIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    k = block * BK + tl.arange(0, BK)
    sums = tl.zeros([BK, BL], tl.float32)
    for first in range(0, length, BL):
        offset, there = places(k, first, rows, length, BL)
        sums += tl.load(weight_ptr + offset, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 1) / length
    scale = tl.full([BK], 1.0, tl.float32)
    if STANDARDIZE:
        squares = tl.zeros([BK, BL], tl.float32)
        for first in range(0, length, BL):
            offset, there = places(k, first, rows, length, BL)
            w = tl.load(weight_ptr + offset, mask=there, other=0.0).to(tl.float32)
            away = tl.where(there, w - mean[:, None], 0.0)
            squares += tl.fma(away, away, 0.0)  # rounded before it is added, see `sum_of_products`
        total = tl.sum(squares, 1)
        scale = tl.rsqrt(total + eps * length if SCALE else total / length + eps)
        tl.store(mean_ptr + k, mean, mask=k < rows)
        tl.store(scale_ptr + k, scale, mask=k < rows)
    for first in range(0, length, BL):
        offset, there = places(k, first, rows, length, BL)
        w = tl.load(weight_ptr + offset, mask=there, other=0.0).to(tl.float32)
        made = (w - mean[:, None]) * scale[:, None]
        tl.store(filter_ptr + offset, made.to(filter_ptr.dtype.element_ty), mask=there)


@triton.jit
def filter_rows_backward(
    grad_ptr, weight_ptr, change_ptr, mean_ptr, scale_ptr, block, rows, length,
    BK: tl.constexpr, BL: tl.constexpr, STANDARDIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    k = block * BK + tl.arange(0, BK)
    if STANDARDIZE:
        mean = tl.load(mean_ptr + k, mask=k < rows, other=0.0)[:, None]
        scale = tl.load(scale_ptr + k, mask=k < rows, other=0.0)[:, None]
    sums = tl.zeros([BK, BL], tl.float32)
    products = tl.zeros([BK, BL], tl.float32)
    for first in range(0, length, BL):
        offset, there = places(k, first, rows, length, BL)
        grad = tl.load(grad_ptr + offset, mask=there, other=0.0).to(tl.float32)
        sums += grad
        if STANDARDIZE:
            w = tl.load(weight_ptr + offset, mask=there, other=0.0).to(tl.float32)
            products += tl.fma(grad, (w - mean) * scale, 0.0)
    average = (tl.sum(sums, 1) / length)[:, None]
    total = tl.sum(products, 1)[:, None]
    slope = total if SCALE else total / length
    for first in range(0, length, BL):
        offset, there = places(k, first, rows, length, BL)
        change = tl.load(grad_ptr + offset, mask=there, other=0.0).to(tl.float32) - average
        if STANDARDIZE:
            w = tl.load(weight_ptr + offset, mask=there, other=0.0).to(tl.float32)
            change = (change - (w - mean) * scale * slope) * scale
        tl.store(change_ptr + offset, change.to(change_ptr.dtype.element_ty), mask=there)


@triton.jit
def tile_of_rows(
    grad_ptr, weight_ptr, result_ptr, mean_ptr, scale_ptr, block, rows, length, eps,
    BACKWARD: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, STANDARDIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    if BACKWARD:
        filter_rows_backward(
            grad_ptr, weight_ptr, result_ptr, mean_ptr, scale_ptr, block, rows, length, BK, BL, STANDARDIZE, SCALE
        )  # fmt: skip
    else:
        filter_rows(
            weight_ptr, result_ptr, mean_ptr, scale_ptr, block, rows, length, eps, BK, BL, STANDARDIZE, SCALE
        )  # fmt: skip


@triton.jit
def block_of_rows(
    grad_ptr, weight_ptr, result_ptr, mean_ptr, scale_ptr, block, rows, length, eps,
    BACKWARD: tl.constexpr, STANDARDIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """With the tile for rows of this length. The forward reads no gradient, and the backward no eps."""
    if length <= SHORT:
        tile_of_rows(
            grad_ptr, weight_ptr, result_ptr, mean_ptr, scale_ptr, block, rows, length, eps,
            BACKWARD, 32, 64, STANDARDIZE, SCALE,
        )  # fmt: skip
    else:
        if length <= MIDDLE:
            tile_of_rows(
                grad_ptr, weight_ptr, result_ptr, mean_ptr, scale_ptr, block, rows, length, eps,
                BACKWARD, 4, 512, STANDARDIZE, SCALE,
            )  # fmt: skip
        else:
            tile_of_rows(
                grad_ptr, weight_ptr, result_ptr, mean_ptr, scale_ptr, block, rows, length, eps,
                BACKWARD, 1, 2048, STANDARDIZE, SCALE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def filters_kernel(
    weights_ptr, addresses_ptr, filters_ptr, statistics_ptr, table_ptr, work_ptr, R, eps,
    TYPE: tl.constexpr, GATHERED: tl.constexpr, STANDARDIZE: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Filters of all layers. If they are standardized or scaled, the mean and the scale of every row are kept."""
    await_previous(PDL)
    layer, block = tl.load(work_ptr + 2 * tl.program_id(0)), tl.load(work_ptr + 2 * tl.program_id(0) + 1)
    row = table_ptr + layer * COLUMNS
    start, rows, length = tl.load(row + START), tl.load(row + ROWS).to(tl.int32), tl.load(row + LENGTH).to(tl.int32)
    weight_ptr = layer_at(weights_ptr, addresses_ptr, layer, start, TYPE, GATHERED)
    filter_ptr = filters_ptr + start
    mean_ptr = statistics_ptr + tl.load(row + STATISTICS)
    scale_ptr = mean_ptr + R
    block_of_rows(
        weight_ptr, weight_ptr, filter_ptr, mean_ptr, scale_ptr, block, rows, length, eps, False, STANDARDIZE, SCALE
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def filters_backward_kernel(
    grads_ptr, grad_addresses_ptr, weights_ptr, addresses_ptr, changes_ptr, statistics_ptr, table_ptr, work_ptr, R,
    TYPE: tl.constexpr, GRADS_GATHERED: tl.constexpr, GATHERED: tl.constexpr, STANDARDIZE: tl.constexpr,
    SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights of all layers. A layer without a gradient has the address 0, and nothing is written."""
    await_previous(PDL)
    layer, block = tl.load(work_ptr + 2 * tl.program_id(0)), tl.load(work_ptr + 2 * tl.program_id(0) + 1)
    row = table_ptr + layer * COLUMNS
    start, rows, length = tl.load(row + START), tl.load(row + ROWS).to(tl.int32), tl.load(row + LENGTH).to(tl.int32)
    if not GRADS_GATHERED:
        rows = tl.where(tl.load(grad_addresses_ptr + layer) == 0, 0, rows)
    grad_ptr = layer_at(grads_ptr, grad_addresses_ptr, layer, start, TYPE, GRADS_GATHERED)
    weight_ptr = grad_ptr
    mean_ptr = statistics_ptr
    scale_ptr = statistics_ptr
    if STANDARDIZE:
        weight_ptr = layer_at(weights_ptr, addresses_ptr, layer, start, TYPE, GATHERED)
        mean_ptr = statistics_ptr + tl.load(row + STATISTICS)
        scale_ptr = mean_ptr + R
    change_ptr = changes_ptr + start
    block_of_rows(
        grad_ptr, weight_ptr, change_ptr, mean_ptr, scale_ptr, block, rows, length, 0.0, True, STANDARDIZE, SCALE
    )  # fmt: skip


settle_keys(globals())
