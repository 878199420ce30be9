"""The output of a norm once more, from x and the moments that the forward stored: 2B, and 3B with a residual.

    y = relu((x - mean)·scale + β + residual)

The expression is that of the forward kernels, so the bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.normalize.triton_forward import (
    VARYING,
    activated,
    channel_at,
    channels_of,
    in_rows,
    load_row,
    place,
    tile_at,
)
from kalmannorm._ops.triton_shared import await_previous, settle_keys


@triton.jit(do_not_specialize=VARYING)
def again_kernel(
    x_ptr, y_ptr, residual_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr,
    N, G, C, L, m, splits, chunks, weight_row, bias_row, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`splits` programs share a group. Each computes every `splits`-th chunk."""
    await_previous(PDL)
    C, columns, rows = in_rows(C, L, V, K, CHANNELS_LAST)
    group, split, block = place(tl.program_id(0), columns, splits, BC)
    column, in_c = channels_of(block, columns, BC, EVEN)
    channel = channel_at(column, C, K)
    row = group.to(tl.int64) * C + channel
    mean = tl.load(mean_ptr + row, mask=in_c, other=0.0)
    var = tl.load(var_ptr + row, mask=in_c, other=1.0)
    weight = load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    scale = tl.rsqrt(var + eps) * weight
    for chunk in tl.range(split, chunks, splits, num_stages=STAGES):
        start, within, valid = tile_at(chunk, group, column, N, columns, rows, m, BR, CHANNELS_LAST, EVEN)
        mask = valid[:, None] & in_c[None, :]
        x = tl.load(x_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        z = (x - mean[None, :]) * scale[None, :] + bias[None, :]
        if RESIDUAL:
            z += tl.load(residual_ptr + start + within, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + within, activated(z, RELU).to(y_ptr.dtype.element_ty), mask=mask)


settle_keys(globals())
