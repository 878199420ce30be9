"""The leaves of a bundle as Triton kernels: beliefs, given moments and gains, and their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.propagate.triton_elementwise import collect
from kalmannorm._ops.triton_shared import await_previous, settle_keys


@triton.jit(do_not_specialize=["SIZE"])
def collect_kernel(flat_ptr, addresses_ptr, owner_ptr, offset_ptr, SIZE, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Concatenate small float32 tensors. Value i of `flat` is value `offset[i]` of the tensor `owner[i]`.

    If `owner[i]` is -1, value i is left as it is.
    """
    await_previous(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.load(owner_ptr + i, mask=i < SIZE, other=-1)
    inside = owner >= 0
    start = tl.load(addresses_ptr + owner, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    value = tl.load(start + tl.load(offset_ptr + i, mask=inside, other=0), mask=inside, other=0.0)
    tl.store(flat_ptr + i, value, mask=inside)


@triton.jit(do_not_specialize=["E", "LEAVES", "BELIEFS", "CHANNELS"])
def leaves_kernel(
    flat_ptr, entries_ptr, gains_ptr, logits_ptr, E, LEAVES, BELIEFS, CHANNELS, margin, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write beliefs and given moments into their entries, and compute gains from logits.

    γ is squared. Given variances are copied. The gain of an infinite logit is exactly 1.
    """
    await_previous(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mean = tl.load(flat_ptr + i, mask=i < LEAVES, other=0.0).to(tl.float32)
    var = tl.load(flat_ptr + LEAVES + i, mask=i < LEAVES, other=0.0).to(tl.float32)
    tl.store(entries_ptr + i, mean, mask=i < LEAVES)
    tl.store(entries_ptr + E + i, tl.where(i < BELIEFS, var * var, var), mask=i < LEAVES)
    place = tl.load(logits_ptr + i, mask=i < CHANNELS, other=0)
    logit = tl.load(flat_ptr + 2 * LEAVES + place, mask=i < CHANNELS, other=0.0).to(tl.float32)
    gain = margin + (1.0 - 2.0 * margin) / (1.0 + tl.exp(-logit))
    tl.store(gains_ptr + i, tl.where(logit == float("inf"), 1.0, gain), mask=i < CHANNELS)


@triton.jit(do_not_specialize=["S", "LEAVES", "BELIEFS"])
def leaves_backward_kernel(
    flat_ptr, grads_ptr, rows_ptr, affine_ptr, slots_ptr, S, first_ptr, start_ptr, step_ptr, count_ptr,
    LEAVES, BELIEFS, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gradients in the order of `flat`. The gradients of γ and β from the norms themselves (`rows`) are added."""
    await_previous(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mean, var = collect(slots_ptr, S, first_ptr, start_ptr, step_ptr, count_ptr, i, i < LEAVES)
    scale = tl.load(flat_ptr + LEAVES + i, mask=i < BELIEFS, other=0.5).to(tl.float32)
    var = tl.where(i < BELIEFS, 2.0 * scale * var, var)
    if ROWS:
        bias = tl.load(affine_ptr + i, mask=i < BELIEFS, other=-1)
        weight = tl.load(affine_ptr + BELIEFS + i, mask=i < BELIEFS, other=-1)
        mean += tl.load(rows_ptr + bias, mask=bias >= 0, other=0.0)
        var += tl.load(rows_ptr + weight, mask=weight >= 0, other=0.0)
    tl.store(grads_ptr + i, mean, mask=i < LEAVES)
    tl.store(grads_ptr + LEAVES + i, var, mask=i < LEAVES)


@triton.jit(do_not_specialize=["first"])
def gains_backward_kernel(
    flat_ptr, grads_ptr, grad_ptr, gains_ptr, first, margin, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Gradients of the logits of one gain: one logit per channel, or one for all. Logits start at `first` in `flat`."""
    await_previous(PDL)
    row = gains_ptr + 4 * tl.program_id(0)
    logit, logits = first + tl.load(row), tl.load(row + 1)
    channel, channels = tl.load(row + 2), tl.load(row + 3)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, channels, BLOCK):
        i = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + channel + i, mask=i < channels, other=0.0).to(tl.float32)
        total += grad
        own = (i < channels) & (logits > 1)
        share = 1.0 / (1.0 + tl.exp(-tl.load(flat_ptr + logit + i, mask=own, other=0.0).to(tl.float32)))
        tl.store(grads_ptr + logit + i, grad * (1.0 - 2.0 * margin) * share * (1.0 - share), mask=own)
    if logits == 1:
        share = 1.0 / (1.0 + tl.exp(-tl.load(flat_ptr + logit).to(tl.float32)))
        tl.store(grads_ptr + logit, tl.sum(total, 0) * (1.0 - 2.0 * margin) * share * (1.0 - share))


settle_keys(globals())
