"""The op for small groups: all values of a group and a block of channels stay in registers and are read once.

One tile of BR positions holds a whole group. Arguments are those of `forward_kernel` and `backward_kernel`, which read
a group chunk by chunk. Here mean and deviations are exact two-pass sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.normalize import triton_backward as gradient
from kalmannorm._ops.normalize import triton_forward as norm
from kalmannorm._ops.normalize.triton_forward import (
    VARYING,
    activated,
    channels_of,
    in_vectors,
    load_prior,
    load_row,
    tile_at,
)
from kalmannorm._ops.triton_shared import await_previous, settle_keys, sum_of_products

settle = norm.settle
settle_gradient = gradient.settle
load_filter = gradient.load_filter


@triton.jit(do_not_specialize=VARYING)
def held_forward_kernel(
    x_ptr, y_ptr, residual_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    N, G, C, L, m, weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr,
    PRIOR: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    C, L = in_vectors(C, L, V, CHANNELS_LAST)
    group = tl.program_id(0) % G
    channel, in_c = channels_of(tl.program_id(0) // G, C, BC, EVEN)
    start, within, valid = tile_at(0, group, channel, N, C, L, m, BR, CHANNELS_LAST, EVEN)
    mask = valid[:, None] & in_c[None, :]
    held = tl.load(x_ptr + start + within, mask=mask, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + start + within, mask=mask, other=0.0)
    prior_mean, prior_var, q = load_prior(
        prior_mean_ptr, prior_var_ptr, gain_ptr, group, channel, in_c, prior_mean_row, prior_var_row, gain_step, PRIOR
    )  # fmt: skip
    weight = load_row(weight_ptr, group.to(tl.int64) * weight_row + channel, in_c, 1.0, WEIGHT)
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    total = (tl.minimum(N - group * m, m) * L).to(tl.float32)
    centre = tl.sum(held.to(tl.float32), 0) / total
    away = tl.where(mask, held.to(tl.float32) - centre[None, :], 0.0)
    mean, var = settle(
        total, centre, sum_of_products(away, away, 0), prior_mean, prior_var, q, group, channel, in_c,
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr, C, PRIOR,
    )  # fmt: skip
    scale = tl.rsqrt(var + eps) * weight
    z = (held.to(tl.float32) - mean[None, :]) * scale[None, :] + bias[None, :]
    if RESIDUAL:
        z += residual.to(tl.float32)
    tl.store(y_ptr + start + within, activated(z, RELU).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def held_backward_kernel(
    g_ptr, x_ptr, y_ptr, dx_ptr, d_residual_ptr, weight_ptr, bias_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
    grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
    d_weight_ptr, d_bias_ptr, d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr,
    N, G, C, L, m, weight_row, bias_row, prior_mean_row, prior_var_row, gain_step, eps,
    BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, CHANNELS_LAST: tl.constexpr, EVEN: tl.constexpr,
    PRIOR: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TO_BIAS: tl.constexpr,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr,
    AT_POSTERIOR: tl.constexpr, AT_OBSERVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    C, L = in_vectors(C, L, V, CHANNELS_LAST)
    group = tl.program_id(0) % G
    channel, in_c = channels_of(tl.program_id(0) // G, C, BC, EVEN)
    start, within, valid = tile_at(0, group, channel, N, C, L, m, BR, CHANNELS_LAST, EVEN)
    mask = valid[:, None] & in_c[None, :]
    held = tl.load(x_ptr + start + within, mask=mask, other=0.0)
    g = tl.load(g_ptr + start + within, mask=mask, other=0.0)
    if RESIDUAL:
        shut = tl.load(y_ptr + start + within, mask=mask, other=0.0).to(tl.float32) <= 0.0
    mean, var, weight, observed_mean, observed_var, prior_mean, prior_var, q, d_0, d_1, d_2, d_3 = load_filter(
        group, channel, in_c, weight_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
        mean_ptr, var_ptr, observed_mean_ptr, observed_var_ptr,
        grad_mean_ptr, grad_var_ptr, grad_observed_mean_ptr, grad_observed_var_ptr,
        C, weight_row, prior_mean_row, prior_var_row, gain_step, PRIOR, WEIGHT, AT_POSTERIOR, AT_OBSERVATION,
    )  # fmt: skip
    rho = tl.rsqrt(var + eps)
    scale = rho * weight
    bias = load_row(bias_ptr, group.to(tl.int64) * bias_row + channel, in_c, 0.0, BIAS)
    if RELU:
        shut = (held.to(tl.float32) - mean[None, :]) * scale[None, :] + bias[None, :] <= 0.0
    if RELU or RESIDUAL:
        g = tl.where(shut, 0.0, g.to(tl.float32)).to(g_ptr.dtype.element_ty)  # values of g or zero, so no rounding
    if RESIDUAL:
        tl.store(d_residual_ptr + start + within, g, mask=mask)
    slope, constant = settle_gradient(
        tl.sum(g.to(tl.float32), 0), sum_of_products(g.to(tl.float32), held.to(tl.float32) - mean[None, :], 0),
        mean, rho, weight, observed_mean, observed_var, prior_mean, prior_var, q, d_0, d_1, d_2, d_3,
        group, channel, in_c,
        d_weight_ptr, d_bias_ptr, d_prior_mean_ptr, d_prior_var_ptr, d_gain_ptr, N, C, L, m, PRIOR, WEIGHT, TO_BIAS,
    )  # fmt: skip
    x = held.to(tl.float32)
    dx = scale[None, :] * g.to(tl.float32) + (slope[None, :] * (x - mean[None, :]) + constant[None, :])
    tl.store(dx_ptr + start + within, dx.to(dx_ptr.dtype.element_ty), mask=mask)


settle_keys(globals())
