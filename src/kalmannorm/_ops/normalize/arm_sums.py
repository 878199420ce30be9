"""Means and sums over the rows of (G, R, C) on ARM CPUs, for channels_last.

PyTorch's sum over R runs down all rows for a few columns at a time. This is slow on ARM, because it waits for memory.
x86 does not. The average pool of channels_last images adds whole rows in memory order. So R rows are viewed as images
with one column, C channels and a height that divides R. The images are pooled, and the results are pooled again.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor

ARM = platform.machine().lower() in ("aarch64", "arm64")
NARROWEST = 32
"""Channels. With fewer channels PyTorch's sum is as fast or faster."""
SMALLEST = 2**17
"""Values. Smaller tensors fit into a cache, and then the cost of one more call dominates."""
HIGHEST = 64
"""Most rows that are added one after the other. Sums in stages have smaller rounding errors."""
LOWEST = 8


def worthwhile(values: Tensor) -> bool:
    """Whether pooling is faster than PyTorch's sum for this channels_last x (N, C, *)."""
    return ARM and values.device.type == "cpu" and values.shape[1] >= NARROWEST and values.numel() >= SMALLEST


@functools.lru_cache(4096)
def heights(rows: int) -> tuple[int, ...]:
    """The window height of each stage. Stages leave one row, a few, or all if no height divides their number."""
    height = next((h for h in range(min(HIGHEST, rows), LOWEST - 1, -1) if rows % h == 0), None)
    return () if height is None else (height, *heights(rows // height))


def mean(values: Tensor) -> Tensor:
    """Mean over R, (G, R, C) without gaps -> (G, C), as a new tensor."""
    stages = heights(values.shape[1])
    for height in stages:
        values = _pool(values, height, height)
    return values.squeeze(1) if stages and values.shape[1] == 1 else values.mean(1)


def total(values: Tensor) -> Tensor:
    """Sum over R, (G, R, C) without gaps -> (G, C), as a new tensor."""
    stages = heights(values.shape[1])
    for height in stages:
        values = _pool(values, height, 1)
    return values.squeeze(1) if stages and values.shape[1] == 1 else values.sum(1)


def _pool(values: Tensor, height: int, divisor: int) -> Tensor:
    groups, rows, channels = values.shape[0], values.shape[1] // height, values.shape[2]
    images = values.as_strided((groups * rows, channels, height, 1), (height * channels, 1, channels, channels))
    pooled: Tensor = torch._C._nn.avg_pool2d(images, (height, 1), divisor_override=divisor)
    return pooled.view(groups, rows, channels)
