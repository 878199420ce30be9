"""Triton kernels for parts of a training step that are slow in PyTorch in channels_last.

    max pooling     y, tap = max over the window; the backward gathers the gradients of the windows that chose a value
    joined ReLUs    out[:, a:b] = relu(x) for each branch of a concatenation, without a copy before or after
    shared input    x for several readers; the backward adds all their gradients in one pass
    mean            over the positions; the gradient of all positions of a channel is one number in memory

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
from torch.autograd.function import once_differentiable

MOST_READERS = 4
STRIP = 3, 1, 1
"""Size, stride and padding of the windows of CIFAR Inception."""
TILE = 2048
"""Values of a program."""
WIDEST = 64
"""The most columns of an image whose rows one program reads, of 32 channels."""


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
        total += tl.where(mine, tl.load(grad + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    tl.store(dx + row[:, None] * C + channel[None, :], total, mask=there)


@triton.jit
def _of_row(x, h, H, W, C, column, channel):
    """The maxima of three neighbours in row h, and which of the three it is. -inf beyond the image."""
    best = tl.full((column.shape[0], channel.shape[0]), float("-inf"), tl.float32)
    chosen = tl.zeros((column.shape[0], channel.shape[0]), tl.int32)
    for tap in tl.static_range(3):
        w = column + tap - 1
        inside = ((w >= 0) & (w < W))[:, None] & (channel < C)[None, :] & (h < H)
        value = tl.load(x + (h * W + w)[:, None] * C + channel[None, :], mask=inside, other=float("-inf"))
        value = value.to(tl.float32)
        better = (value > best) | (value != value)
        best, chosen = tl.where(better, value, best), tl.where(better, tap, chosen)
    return best, chosen


@triton.jit
def strip_forward_kernel(x, y, taps, H, W, C, BW: tl.constexpr, BC: tl.constexpr):
    """Windows of 3×3 with stride 1 and padding 1. A program goes down the rows of some channels of an image."""
    start = tl.program_id(0).to(tl.int64) * H * W * C
    channel, column = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BW)
    there = (column < W)[:, None] & (channel < C)[None, :]
    above = tl.full((BW, BC), float("-inf"), tl.float32)
    above_tap = tl.zeros((BW, BC), tl.int32)
    here, here_tap = _of_row(x + start, 0, H, W, C, column, channel)
    for h in range(H):
        below, below_tap = _of_row(x + start, h + 1, H, W, C, column, channel)
        better = (here > above) | (here != here)
        best, chosen = tl.where(better, here, above), tl.where(better, here_tap + 3, above_tap)
        better = (below > best) | (below != below)
        best, chosen = tl.where(better, below, best), tl.where(better, below_tap + 6, chosen)
        at = start + (h * W + column)[:, None] * C + channel[None, :]
        tl.store(y + at, best, mask=there)
        tl.store(taps + at, chosen, mask=there)
        above, above_tap, here, here_tap = here, here_tap, below, below_tap


@triton.jit
def strip_backward_kernel(grad, taps, dx, H, W, C, BW: tl.constexpr, BC: tl.constexpr):
    """Row h of the gradient is a part of the rows h - 1, h and h + 1 of dx."""
    start = tl.program_id(0).to(tl.int64) * H * W * C
    channel, column = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BW)
    there = (column < W)[:, None] & (channel < C)[None, :]
    above = tl.zeros((BW, BC), tl.float32)
    here = tl.zeros((BW, BC), tl.float32)
    for h in range(H):
        below = tl.zeros((BW, BC), tl.float32)
        for tap in tl.static_range(3):
            w = column + 1 - tap
            inside = ((w >= 0) & (w < W))[:, None] & (channel < C)[None, :]
            at = start + (h * W + w)[:, None] * C + channel[None, :]
            mine = tl.load(taps + at, mask=inside, other=-1).to(tl.int32)
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            above += tl.where(mine == tap, g, 0.0)
            here += tl.where(mine == tap + 3, g, 0.0)
            below += tl.where(mine == tap + 6, g, 0.0)
        at = start + ((h - 1) * W + column)[:, None] * C + channel[None, :]
        tl.store(dx + at, above, mask=there & (h > 0))
        above, here = here, below
    at = start + ((H - 1) * W + column)[:, None] * C + channel[None, :]
    tl.store(dx + at, above, mask=there)


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
def relu_backward_kernel(
    grad, out, dx, C, width, positions, by_image, by_position, rows, BR: tl.constexpr, BC: tl.constexpr
):
    """`by_image` and `by_position` are the strides of `grad`, whose channels are side by side."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    there = (row < rows)[:, None] & (channel < C)[None, :]
    of_grad = row // positions * by_image + row % positions * by_position
    value = tl.load(out + row[:, None] * width + channel[None, :], mask=there)
    g = tl.load(grad + of_grad[:, None] + channel[None, :], mask=there)
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


class MaxPool(torch.autograd.Function):
    """`F.max_pool2d` of square windows of at most 11 × 11.

    Values of -inf are not expected: they may choose a place outside the image.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
        x = _last(x)
        N, C, H, W = x.shape
        OH, OW = ((side + 2 * padding - size) // stride + 1 for side in (H, W))
        y = torch.empty((N, C, OH, OW), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        taps = torch.empty_like(y, dtype=torch.int8)
        if (size, stride, padding) == STRIP and W <= WIDEST:
            strip_forward_kernel[N, triton.cdiv(C, 32)](x, y, taps, H, W, C, triton.next_power_of_2(W), 32)
        else:
            grid, BR, BC = _tile(N * OH * OW, C)
            pool_forward_kernel[grid](x, y, taps, H, W, OH, OW, C, N * OH * OW, size, stride, padding, BR, BC)
        ctx.save_for_backward(taps)
        ctx.window, ctx.shape = (size, stride, padding), x.shape
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (taps,), (N, C, H, W), (OH, OW) = ctx.saved_tensors, ctx.shape, grad.shape[2:]
        grad = _last(grad)
        dx = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        if ctx.window == STRIP and W <= WIDEST:
            strip_backward_kernel[N, triton.cdiv(C, 32)](grad, taps, dx, H, W, C, triton.next_power_of_2(W), 32)
        else:
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
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        (out,) = ctx.saved_tensors
        N, width, H, W = out.shape
        if grad.stride(1) != 1 or (W > 1 and grad.stride(2) != W * grad.stride(3)):
            grad = _last(grad)
        strides = H * W, grad.stride(0), grad.stride(3 if W > 1 else 2)
        found = []
        for own_grad, own in zip(grad.split(ctx.widths, 1), out.split(ctx.widths, 1), strict=True):
            dx = torch.empty(own.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
            grid, BR, BC = _tile(N * H * W, own.shape[1])
            relu_backward_kernel[grid](own_grad, own, dx, own.shape[1], width, *strides, N * H * W, BR, BC)
            found.append(dx)
        return tuple(found)


class Shared(torch.autograd.Function):
    """The same tensor for each of 2 to 4 readers, none of which may write into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, readers: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(readers))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grads = tuple(_last(grad) for grad in grads)
        total = torch.empty_like(grads[0])
        given = [grads[number] if number < len(grads) else grads[0] for number in range(MOST_READERS)]
        add_kernel[(triton.cdiv(total.numel(), TILE),)](*given, total, total.numel(), len(grads), TILE)
        return total, None


class Mean(torch.autograd.Function):
    """`x.mean((2, 3))`. Its gradient is expanded from one value for each image and channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        positions = ctx.shape[2] * ctx.shape[3]
        return (grad / positions)[:, :, None, None].expand(ctx.shape)
