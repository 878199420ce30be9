"""How the Triton kernels are launched: which path, which tiles, how many programs share a group.

Chosen by shape alone, so that equal inputs run the same way and give equal bits; tuned on an H200.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm.groups import group_count, group_size

ON_CHIP = 32768
"""Values of a slab that one program may read twice: 64 KiB in half precision."""
MOST_SPLITS = 256
"""Shares of a group, which one program merges."""


class Shape(NamedTuple):
    """x as the kernels see it: N examples of C channels at L positions, in groups of m."""

    N: int
    C: int
    L: int
    m: int
    channels_last: bool

    @property
    def groups(self) -> int:
        return group_count(self.N, self.m)

    @property
    def vector(self) -> int:
        """Up to 16 neighbours, a power of two, that every row holds a whole number of times."""
        inner = self.C if self.channels_last else self.L
        return min(inner & -inner, 16)


class Launch(NamedTuple):
    """Tiles of BR positions × BC channels; `splits` programs share a group, 0 for one program that does all of it."""

    BR: int
    BC: int
    splits: int
    chunks: int

    @property
    def per_split(self) -> int:
        return -(-self.chunks // self.splits)

    @property
    def merge_channels(self) -> int:
        """Of a program that merges the shares of a group: about 2048 values."""
        return min(max(2048 // power(self.splits), 8), 32)


def shape_of(x: Tensor, statistics_batch_size: int) -> Shape:
    examples, channels = x.shape[:2]
    positions = x.numel() // max(examples * channels, 1)
    # With one position the two layouts are the same memory, and rows of channels are the ones that vectorise.
    channels_last = positions == 1 or not x.is_contiguous()
    size = min(group_size(examples, statistics_batch_size), examples)
    return Shape(examples, channels, positions, size, channels_last)


def power(n: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(maxsize=4096)
def launch_for(shape: Shape, processors: int) -> Launch:
    slab = shape.m * shape.L
    if shape.channels_last:
        for BC in (64, 32, 16, 8):  # the widest that leaves work for every processor, of slabs that the cache holds
            if power(shape.C) >= BC and _programs(shape, BC) >= 0.9 * processors and slab * BC <= ON_CHIP:
                return launch_of(shape, min(4096 // BC, power(slab)), BC, 0)
        BC = min(power(shape.C), 32)
        return _streamed(shape, min(4096 // BC, power(slab)), BC, processors, 4)
    BR = min(power(shape.L), 1024)
    BC = widest = min(max(2048 // BR, 1), power(shape.C), 16)
    while BC > 1 and _programs(shape, BC) < 1.8 * processors:
        BC //= 2
    programs = _programs(shape, BC)
    if programs >= 8 * processors or (programs >= 0.9 * processors and slab * BC <= ON_CHIP):
        return launch_of(shape, BR, BC, 0)
    return _streamed(shape, BR, widest, processors, 8)


def _programs(shape: Shape, BC: int) -> int:
    return shape.groups * -(-shape.C // BC)


def _streamed(shape: Shape, BR: int, BC: int, processors: int, each: int) -> Launch:
    """So many programs for each processor, where they have four chunks to do; at least two."""
    programs = _programs(shape, BC)
    chunks = launch_of(shape, BR, BC, 0).chunks
    splits = max(-(-2 * processors // programs), min(-(-each * processors // programs), chunks // 4))
    return launch_of(shape, BR, BC, min(splits, MOST_SPLITS))


def launch_of(shape: Shape, BR: int, BC: int, splits: int) -> Launch:
    per_example = shape.m * shape.L if shape.channels_last else shape.L
    chunks = -(-per_example // BR) * (1 if shape.channels_last else shape.m)
    return Launch(BR, BC, min(splits, chunks) if chunks > 2 else 0, chunks)


def processors_of(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 1  # Triton's interpreter
    return _processors(x.device.index)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
