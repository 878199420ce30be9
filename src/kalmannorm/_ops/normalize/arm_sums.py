"""Means and sums over the rows of (G, R, C) on ARM's CPUs, where channels lie last.

PyTorch's sum over R goes down a few columns at a time, once for every few. ARM waits for the memory then, x86 does not.
The average pool of channels_last images adds whole rows, in the order in which they lie. So R rows are seen as images
of one column, C channels and a height that divides R, pooled, and what is left pooled again.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor

ARM = platform.machine().lower() in ("aarch64", "arm64")
NARROWEST = 32
"""Channels. Shorter rows are not worth a loop each; there PyTorch's sum is as fast or faster."""
SMALLEST = 2**17
"""Values. Of smaller tensors the sum finds all in a cache, and one call less counts."""
HIGHEST = 64
"""Rows added one after the other, at most: what is summed in stages rounds less."""
LOWEST = 8


def worthwhile(values: Tensor) -> bool:
    """Of x (N, C, *), whose channels lie last."""
    return ARM and values.device.type == "cpu" and values.shape[1] >= NARROWEST and values.numel() >= SMALLEST


@functools.lru_cache(4096)
def heights(rows: int) -> tuple[int, ...]:
    """Of the windows of each stage. They leave one row, a few, or all of them where no window divides their number."""
    height = next((h for h in range(min(HIGHEST, rows), LOWEST - 1, -1) if rows % h == 0), None)
    return () if height is None else (height, *heights(rows // height))


def mean(values: Tensor) -> Tensor:
    """(G, R, C) without gaps -> (G, C), in memory of its own."""
    stages = heights(values.shape[1])
    for height in stages:
        values = _pool(values, height, height)
    return values.squeeze(1) if stages and values.shape[1] == 1 else values.mean(1)


def total(values: Tensor) -> Tensor:
    """(G, R, C) without gaps -> (G, C), in memory of its own."""
    stages = heights(values.shape[1])
    for height in stages:
        values = _pool(values, height, 1)
    return values.squeeze(1) if stages and values.shape[1] == 1 else values.sum(1)


def _pool(values: Tensor, height: int, divisor: int) -> Tensor:
    groups, rows, channels = values.shape[0], values.shape[1] // height, values.shape[2]
    images = values.as_strided((groups * rows, channels, height, 1), (height * channels, 1, channels, channels))
    pooled: Tensor = torch._C._nn.avg_pool2d(images, (height, 1), divisor_override=divisor)
    return pooled.view(groups, rows, channels)
