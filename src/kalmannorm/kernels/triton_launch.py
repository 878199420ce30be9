"""How the Triton kernels are launched: which path, which tiles, how many programs share a group.

Chosen by shape alone, so that equal inputs run the same way and give equal bits; tuned on an H200.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm.groups import group_count, group_size

HELD = 512
"""Positions of a group that one program always holds in registers."""
LONGEST = 2048
"""Positions of a group that one program goes through twice, in channels_last; more are shared by several."""
ON_CHIP = 32768
"""Values of a slab that one program may read twice, in contiguous x: 64 KiB in half precision."""
STAGES = 3
"""Of loops: what is computed, and two tiles on their way into shared memory."""
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
    def slab(self) -> int:
        """Positions of a group."""
        return self.m * self.L

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
    warps: int = 4

    def even(self, shape: Shape) -> bool:
        """Whether tiles cover every group without rest."""
        rest = shape.N % shape.m or shape.C % self.BC
        return not rest and (shape.slab if shape.channels_last else shape.L) % self.BR == 0

    @property
    def held(self) -> bool:
        """Whether a group is one tile of one program."""
        return self.splits == 0 and self.chunks == 1

    @property
    def merged(self) -> int:
        """Shares of a group that a program loads at a time."""
        return min(power(self.splits), 32)


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
def launch_for(shape: Shape, processors: int, *, backward: bool = False, wide: bool = False) -> Launch:
    """`wide` is float32, of whose tiles half as much goes into shared memory."""
    if shape.channels_last:
        found = (_backward_last if backward else _forward_last)(shape, processors)
        if found is None:
            return _streamed_last(shape, processors)
        return launch_of(shape, found.BR // 2, *found[1:3], found.warps) if wide and not found.held else found
    BR = min(power(shape.L), 1024)
    BC = widest = min(max(2048 // BR, 1), power(shape.C), 16)
    while BC > 1 and _programs(shape, BC) < 1.8 * processors:
        BC //= 2
    programs = _programs(shape, BC)
    if programs >= 8 * processors or (programs >= 0.9 * processors and shape.slab * BC <= ON_CHIP):
        return launch_of(shape, BR, BC, 0)
    return _streamed(shape, BR, widest, processors, each=8, least=4, warps=4)


def observing(shape: Shape, processors: int) -> Launch:
    """For the first of the streamed launches alone: tiles that are copied ahead, however small a group is."""
    how = _streamed_last(shape, processors) if shape.channels_last else launch_for(shape, processors)
    return how._replace(splits=max(how.splits, 1))


def _streamed_last(shape: Shape, processors: int) -> Launch:
    BC = min(power(shape.C), 32)
    return _streamed(shape, min(2048 // BC, power(shape.slab)), BC, processors, each=4, least=8, warps=8)


def _forward_last(shape: Shape, processors: int) -> Launch | None:
    rows = power(shape.slab)
    if 128 < rows <= HELD and _programs(shape, 32) >= 2.9 * processors and shape.C >= 32:
        return launch_of(shape, 64, 32, 0)
    if rows <= HELD:
        return _held(shape, min(max(8192 // rows, 16), 64), 64)
    if rows <= LONGEST:
        if _programs(shape, 32) >= 0.9 * processors:
            return launch_of(shape, 128, min(power(shape.C), 32), 0)
        if _programs(shape, 16) >= 0.45 * processors:
            return _held(shape, 16, 64)
    return None


def _backward_last(shape: Shape, processors: int) -> Launch | None:
    rows, widest = power(shape.slab), power(shape.C)
    many, some = (_programs(shape, BC) >= 0.9 * processors for BC in (64, 32))
    if rows <= 128:
        return _held(shape, 32, 32)
    if rows <= HELD:
        return launch_of(shape, 64, 64, 0) if many and widest >= 64 else _held(shape, 32, 64)
    if rows <= LONGEST:
        if many and widest >= 64:
            return launch_of(shape, 128, 64, 0, 8)
        if some:
            return launch_of(shape, 128, min(widest, 32), 0)
        if _programs(shape, 16) >= 0.45 * processors:
            return _held(shape, 16, 64) if rows <= 1024 else launch_of(shape, 256, min(widest, 16), 0)
    return None


def _held(shape: Shape, BC: int, each: int) -> Launch:
    """A tile of BC channels, and threads that hold so many of its values each."""
    BC, rows = min(power(shape.C), BC), power(shape.slab)
    return launch_of(shape, rows, BC, 0, min(max(rows * BC // (32 * each), 1), 16))


def _programs(shape: Shape, BC: int) -> int:
    return shape.groups * -(-shape.C // BC)


def _streamed(shape: Shape, BR: int, BC: int, processors: int, *, each: int, least: int, warps: int) -> Launch:
    """So many programs for each processor, where they have at least so many chunks to do; but two in any case."""
    programs = _programs(shape, BC)
    chunks = launch_of(shape, BR, BC, 0).chunks
    splits = max(-(-2 * processors // programs), min(-(-each * processors // programs), chunks // least))
    return launch_of(shape, BR, BC, min(splits, MOST_SPLITS), warps)


def launch_of(shape: Shape, BR: int, BC: int, splits: int, warps: int = 4) -> Launch:
    per_example = shape.slab if shape.channels_last else shape.L
    chunks = -(-per_example // BR) * (1 if shape.channels_last else shape.m)
    return Launch(BR, BC, min(splits, chunks) if chunks > 2 else 0, chunks, warps)


def processors_of(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 1  # Triton's interpreter
    return _processors(x.device.index)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
