"""Triton kernels for parts of a training step that are slow in PyTorch in channels_last.

    max pooling     y, tap = max over the window; the backward gathers the gradients of the windows that chose a value
    joined ReLUs    out[:, a:b] = relu(x) for each branch of a concatenation, without a copy before or after
    shared input    x for several readers; the backward adds all their gradients in one pass

A tensor (N, C, H, W) in channels_last is (rows, C) in memory, with a row for each position of each image. The results
are those of PyTorch: window positions are compared in its order, and NaN is passed on. Sums of gradients are added in
float32 and rounded once, PyTorch rounds each sum of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_READERS = 4
TILE = 2048
"""Values of a program."""


@triton.jit
def pool_forward_kernel(
    x, y, taps, H, W, OH, OW, C, rows,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    image, top, left = row // (OH * OW), (row // OW) % OH * STRIDE - PADDING, row % OW * STRIDE - PADDING
    there = (row < rows)[:, None] & (channel < C)[None, :]
    best = tl.full((BR, BC), float("-inf"), tl.float32)
    chosen = tl.zeros((BR, BC), tl.int8)
    for tap in tl.static_range(SIZE * SIZE):
        h, w = top + tap // SIZE, left + tap % SIZE
        inside = there & ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
        at = ((image * H + h) * W + w)[:, None] * C + channel[None, :]
        value = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best, chosen = tl.where(better, value, best), tl.where(better, tap, chosen).to(tl.int8)
    at = row[:, None] * C + channel[None, :]
    tl.store(y + at, best, mask=there)
    tl.store(taps + at, chosen, mask=there)


@triton.jit
def pool_backward_kernel(
    grad, taps, dx, H, W, OH, OW, C, rows,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    image, below, right = row // (H * W), (row // W) % H + PADDING, row % W + PADDING
    there = (row < rows)[:, None] & (channel < C)[None, :]
    total = tl.zeros((BR, BC), tl.float32)
    for tap in tl.static_range(SIZE * SIZE):
        h, w = below - tap // SIZE, right - tap % SIZE
        whole = (h >= 0) & (w >= 0) & (h % STRIDE == 0) & (w % STRIDE == 0)
        inside = there & (whole & (h // STRIDE < OH) & (w // STRIDE < OW))[:, None]
        at = ((image * OH + h // STRIDE) * OW + w // STRIDE)[:, None] * C + channel[None, :]
        mine = tl.load(taps + at, mask=inside, other=-1) == tap
        total += tl.load(grad + at, mask=inside & mine, other=0.0).to(tl.float32)
    tl.store(dx + row[:, None] * C + channel[None, :], total, mask=there)


@triton.jit
def relu_into_kernel(x, out, C, width, rows, BR: tl.constexpr, BC: tl.constexpr):
    """`out` points at the first channel of this branch, in rows of `width` channels."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    there = (row < rows)[:, None] & (channel < C)[None, :]
    value = tl.load(x + row[:, None] * C + channel[None, :], mask=there)
    value = tl.where(value < 0, 0, value)  # NaN stays
    tl.store(out + row[:, None] * width + channel[None, :], value, mask=there)


@triton.jit
def relu_backward_kernel(grad, out, dx, C, width, rows, BR: tl.constexpr, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    there = (row < rows)[:, None] & (channel < C)[None, :]
    at = row[:, None] * width + channel[None, :]
    value, g = tl.load(out + at, mask=there), tl.load(grad + at, mask=there)
    tl.store(dx + row[:, None] * C + channel[None, :], tl.where(value <= 0, 0, g), mask=there)


@triton.jit
def add_kernel(a, b, c, d, out, count, READERS: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    there = at < count
    total = tl.load(a + at, mask=there).to(tl.float32) + tl.load(b + at, mask=there).to(tl.float32)
    if READERS > 2:
        total += tl.load(c + at, mask=there).to(tl.float32)
    if READERS > 3:
        total += tl.load(d + at, mask=there).to(tl.float32)
    tl.store(out + at, total, mask=there)


def _tile(rows: int, channels: int) -> tuple[tuple[int, int], int, int]:
    """The grid, and rows and channels of a program."""
    BC = min(triton.next_power_of_2(channels), 64)
    BR = TILE // BC
    return (triton.cdiv(rows, BR), triton.cdiv(channels, BC)), BR, BC


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


class MaxPool(torch.autograd.Function):
    """`F.max_pool2d` of square windows. Values of -inf are not expected: they may choose a place outside the image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
        x = _last(x)
        N, C, H, W = x.shape
        OH, OW = ((side + 2 * padding - size) // stride + 1 for side in (H, W))
        y = torch.empty((N, C, OH, OW), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        taps = torch.empty_like(y, dtype=torch.int8)
        grid, BR, BC = _tile(N * OH * OW, C)
        pool_forward_kernel[grid](x, y, taps, H, W, OH, OW, C, N * OH * OW, size, stride, padding, BR, BC)
        ctx.save_for_backward(taps)
        ctx.window, ctx.shape = (size, stride, padding), x.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (taps,), (N, C, H, W), (OH, OW) = ctx.saved_tensors, ctx.shape, grad.shape[2:]
        grad = _last(grad)
        dx = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        grid, BR, BC = _tile(N * H * W, C)
        pool_backward_kernel[grid](grad, taps, dx, H, W, OH, OW, C, N * H * W, *ctx.window, BR, BC)
        return dx, None, None, None


class JoinedReLUs(torch.autograd.Function):
    """`torch.cat([F.relu(x) for x in parts], 1)`."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        widths = [part.shape[1] for part in parts]
        N, _, H, W = parts[0].shape
        out = torch.empty(
            (N, sum(widths), H, W), dtype=parts[0].dtype, device=parts[0].device, memory_format=torch.channels_last
        )
        for part, own in zip(parts, out.split(widths, 1), strict=True):
            grid, BR, BC = _tile(N * H * W, part.shape[1])
            relu_into_kernel[grid](_last(part), own, part.shape[1], out.shape[1], N * H * W, BR, BC)
        ctx.save_for_backward(out)
        ctx.widths = widths
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        (out,), grad = ctx.saved_tensors, _last(grad)
        N, width, H, W = out.shape
        found = []
        for own_grad, own in zip(grad.split(ctx.widths, 1), out.split(ctx.widths, 1), strict=True):
            dx = torch.empty(own.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
            grid, BR, BC = _tile(N * H * W, own.shape[1])
            relu_backward_kernel[grid](own_grad, own, dx, own.shape[1], width, N * H * W, BR, BC)
            found.append(dx)
        return tuple(found)


class Shared(torch.autograd.Function):
    """The same tensor for each of 2 to 4 readers, none of which may write into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, readers: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grads = tuple(_last(grad) for grad in grads)
        total = torch.empty_like(grads[0])
        given = [grads[number] if number < len(grads) else grads[0] for number in range(MOST_READERS)]
        add_kernel[(triton.cdiv(total.numel(), TILE),)](*given, total, total.numel(), len(grads), TILE)
        return total, None
