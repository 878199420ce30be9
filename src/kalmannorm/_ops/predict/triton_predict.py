"""The prior of a learned transition and the gain in one launch, their gradients in two launches.

    forward    mean_p = A mean    var_p = (A∘A) var + |r|    q = gain_of(logit)
    backward   dA = dmeanᵀ mean + 2 A ∘ (dvarᵀ var)    dmean A    dvar (A∘A)    Σ dvar    q' dq

The forward and the first launch of the backward each read A once. Sums over outputs are stored as shares, one per
block of outputs. The second launch of the backward adds the shares in fixed order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmannorm._filter import GAIN_MARGIN
from kalmannorm._ops.grid import blocks_of, power
from kalmannorm._ops.triton_launching import KEPT, Ready, launch_options
from kalmannorm._ops.triton_shared import await_previous, settle_keys, sum_of_products

MARGIN = tl.constexpr(GAIN_MARGIN)


@triton.jit
def load_rows(rows_ptr, row, rows, column, columns):
    """A tile of a contiguous matrix (rows, columns). Values outside are zero."""
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    return tl.load(rows_ptr + offset, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def store_rows(rows_ptr, row, rows, column, columns, values):
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(rows_ptr + offset, values, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def share_of(logit):
    return 1.0 / (1.0 + tl.exp(-logit))


@triton.jit
def predict_kernel(
    mean_ptr, var_ptr, matrix_ptr, noise_ptr, logit_ptr, prior_mean_ptr, prior_var_ptr, gain_ptr,
    G, C, P, gain_step,
    BG: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, GAIN: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BC outputs of BG groups. There is only one group if BG is 1. `GAIN`: whether to compute the gain too."""
    await_previous(PDL)
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1) * BG + tl.arange(0, BG)
    if BG == 1:
        sums = tl.zeros([BC, BP], tl.float32)
        squares = tl.zeros([BC, BP], tl.float32)
    else:
        sums = tl.zeros([BG, BC], tl.float32)
        squares = tl.zeros([BG, BC], tl.float32)
    for first in range(0, P, BP):
        p = first + tl.arange(0, BP)
        a = load_rows(matrix_ptr, c, C, p, P)
        mean, var = load_rows(mean_ptr, g, G, p, P), load_rows(var_ptr, g, G, p, P)
        if BG == 1:
            sums += a * mean
            squares += a * a * var
        else:
            sums = tl.dot(mean, tl.trans(a), sums, input_precision=PRECISION)
            squares = tl.dot(var, tl.trans(a * a), squares, input_precision=PRECISION)
    if BG == 1:
        prior_mean, prior_var = tl.sum(sums, 1)[None, :], tl.sum(squares, 1)[None, :]
    else:
        prior_mean, prior_var = sums, squares
    store_rows(prior_mean_ptr, g, G, c, C, prior_mean)
    store_rows(prior_var_ptr, g, G, c, C, prior_var + tl.abs(tl.load(noise_ptr)))
    if GAIN:
        mine = (c < C) & (tl.program_id(1) == 0)
        logit = tl.load(logit_ptr + c * gain_step, mask=mine, other=0.0)
        tl.store(gain_ptr + c, MARGIN + (1 - 2 * MARGIN) * share_of(logit), mask=mine)


@triton.jit
def predict_backward_kernel(
    grad_mean_ptr, grad_var_ptr, mean_ptr, var_ptr, matrix_ptr, grad_matrix_ptr, shares_ptr, noise_shares_ptr,
    G, C, P,
    BG: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, TO_MATRIX: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile BC × BP of A: its gradient, and these outputs' shares of the gradients of the previous moments."""
    await_previous(PDL)
    c, p = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1) * BP + tl.arange(0, BP)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    a = load_rows(matrix_ptr, c, C, p, P)
    to_mean, to_var = shares_ptr + block * G * P, shares_ptr + (blocks + block) * G * P
    of_mean = tl.zeros([BC, BP], tl.float32)
    of_var = tl.zeros([BC, BP], tl.float32)
    noise = tl.zeros([BC], tl.float32)
    for first in range(0, G, BG):
        g = first + tl.arange(0, BG)
        grad_mean, grad_var = load_rows(grad_mean_ptr, g, G, c, C), load_rows(grad_var_ptr, g, G, c, C)
        mean, var = load_rows(mean_ptr, g, G, p, P), load_rows(var_ptr, g, G, p, P)
        noise += tl.sum(grad_var, 0)
        if BG == 1:
            row_mean, row_var = tl.sum(grad_mean, 0)[:, None], tl.sum(grad_var, 0)[:, None]
            of_mean += row_mean * mean
            of_var += row_var * var
            store_rows(to_mean, g, G, p, P, sum_of_products(row_mean, a, 0)[None, :])
            store_rows(to_var, g, G, p, P, sum_of_products(row_var * a, a, 0)[None, :])
        else:
            of_mean = tl.dot(tl.trans(grad_mean), mean, of_mean, input_precision=PRECISION)
            of_var = tl.dot(tl.trans(grad_var), var, of_var, input_precision=PRECISION)
            store_rows(to_mean, g, G, p, P, tl.dot(grad_mean, a, input_precision=PRECISION))
            store_rows(to_var, g, G, p, P, tl.dot(grad_var, a * a, input_precision=PRECISION))
    if TO_MATRIX:
        store_rows(grad_matrix_ptr, c, C, p, P, of_mean + 2.0 * a * of_var)
    tl.store(noise_shares_ptr + block, tl.sum(noise, 0), mask=tl.program_id(1) == 0)


@triton.jit
def predict_sum_kernel(
    shares_ptr, noise_shares_ptr, noise_ptr, logit_ptr, grad_gain_ptr,
    to_mean_ptr, to_var_ptr, to_noise_ptr, to_logit_ptr,
    blocks, values, C, gain_step,
    BS: tl.constexpr, BV: tl.constexpr, TO_GAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum the shares, BV values per program. The first program also computes the gradients of noise and gain."""
    await_previous(PDL)
    offset = tl.program_id(0) * BV + tl.arange(0, BV)
    to_mean = tl.zeros([BV], tl.float32)
    to_var = tl.zeros([BV], tl.float32)
    for block in range(blocks):
        to_mean += tl.load(shares_ptr + block * values + offset, mask=offset < values, other=0.0)
        to_var += tl.load(shares_ptr + (blocks + block) * values + offset, mask=offset < values, other=0.0)
    tl.store(to_mean_ptr + offset, to_mean, mask=offset < values)
    tl.store(to_var_ptr + offset, to_var, mask=offset < values)
    if tl.program_id(0) == 0:
        share = tl.arange(0, BS)
        total = tl.sum(tl.load(noise_shares_ptr + share, mask=share < blocks, other=0.0), 0)
        noise = tl.load(noise_ptr)
        tl.store(to_noise_ptr, tl.where(noise > 0, total, tl.where(noise < 0, -total, 0.0)))
        if TO_GAIN:
            sums = tl.zeros([BV], tl.float32)
            for first in range(0, C, BV):
                one = first + tl.arange(0, BV)
                trust = share_of(tl.load(logit_ptr + one * gain_step, mask=one < C, other=0.0))
                change = (1 - 2 * MARGIN) * trust * (1 - trust) * tl.load(grad_gain_ptr + one, mask=one < C, other=0.0)
                sums += change
                tl.store(to_logit_ptr + one, change, mask=(one < C) & (gain_step != 0))
            if gain_step == 0:
                tl.store(to_logit_ptr, tl.sum(sums, 0))


@functools.cache
def roomy(device: torch.device) -> bool:
    """Whether pipelined tiles of 64 × 64 fit into shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 2**17


@functools.cache
def precision_on(device: torch.device) -> str:
    """Precision of matrix products. Three TF32 products on tensor cores are as exact as one in float32, and faster."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "ieee"
    return "tf32x3"


class Launches(NamedTuple):
    """Three launches, prepared: the prior, then both of the backward, and the number of blocks of outputs there."""

    forward: Ready
    backward: Ready
    summing: Ready
    blocks: int


@functools.lru_cache(maxsize=KEPT)
def launches_of(
    G: int, C: int, P: int, device: torch.device, *, gain: int | None, to_matrix: bool, to_gain: bool
) -> Launches:
    """The launches for G groups, C outputs and P inputs. `gain`: the step from logit to logit, None for no gain."""
    options, precision = launch_options(device), precision_on(device)
    BG = 1 if G == 1 else min(max(power(G), 16), 64)
    BC, BP = 16, min(max(power(P), 16), 256 if BG == 1 else 64)
    tile = {"BG": BG, "BC": BC, "BP": BP, "GAIN": gain is not None, "PRECISION": precision}
    grid = blocks_of(C, BC), blocks_of(G, BG)
    forward = Ready(predict_kernel, grid, (G, C, P, gain or 0), tile | options)

    BG = 1 if G == 1 else min(max(power(G), 16), 32)
    wide = C * P >= 64 * 64 * 132 and roomy(device)
    BC, BP = (min(max(power(size), 16), 64 if wide else 32) for size in (C, P))
    blocks, BV = blocks_of(C, BC), 256
    tile = {"BG": BG, "BC": BC, "BP": BP, "TO_MATRIX": to_matrix, "PRECISION": precision}
    backward = Ready(predict_backward_kernel, (blocks, blocks_of(P, BP)), (G, C, P), tile | options)
    tile = {"BS": power(blocks), "BV": BV, "TO_GAIN": to_gain}
    numbers = blocks, G * P, C, gain or 0
    summing = Ready(predict_sum_kernel, (blocks_of(G * P, BV),), numbers, tile | options)
    return Launches(forward, backward, summing, blocks)


def _launches(mean: Tensor, matrix: Tensor, logit: Tensor, to_matrix: bool, to_gain: bool) -> Launches:
    (G, P), C, gain = mean.shape, matrix.shape[0], int(logit.numel() > 1)
    return launches_of(G, C, P, mean.device, gain=gain, to_matrix=to_matrix, to_gain=to_gain)


def forward(mean: Tensor, var: Tensor, matrix: Tensor, noise: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prior mean and variance (G, C) from moments (G, P) and A (C, P), and the gain (C,) from one logit or C logits."""
    G, C = mean.shape[0], matrix.shape[0]
    prior_mean, prior_var, gain = mean.new_empty((G, C)), mean.new_empty((G, C)), mean.new_empty(C)
    launches = _launches(mean, matrix, logit, True, True)
    launches.forward(mean, var, matrix, noise, logit, prior_mean, prior_var, gain)
    return prior_mean, prior_var, gain


def backward(
    grad_mean: Tensor,
    grad_var: Tensor,
    grad_gain: Tensor | None,
    mean: Tensor,
    var: Tensor,
    matrix: Tensor,
    noise: Tensor,
    logit: Tensor,
    to_matrix: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients with respect to mean, var, A (if `to_matrix`), noise, and logit (if `grad_gain` exists)."""
    launches = _launches(mean, matrix, logit, to_matrix, grad_gain is not None)
    shares, noise_shares = mean.new_empty((2, launches.blocks, *mean.shape)), mean.new_empty(launches.blocks)
    grad_matrix = torch.empty_like(matrix) if to_matrix else None
    launches.backward(grad_mean, grad_var, mean, var, matrix, grad_matrix, shares, noise_shares)
    to_mean, to_var, to_noise = torch.empty_like(mean), torch.empty_like(var), torch.empty_like(noise)
    to_logit = None if grad_gain is None else torch.empty_like(logit)
    launches.summing(shares, noise_shares, noise, logit, grad_gain, to_mean, to_var, to_noise, to_logit)
    return to_mean, to_var, grad_matrix, to_noise, to_logit


settle_keys(globals())
