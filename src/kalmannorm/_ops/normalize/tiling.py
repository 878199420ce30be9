"""How the Triton kernels are launched: which path, which tiles, how many programs share a group.

Only the shape decides, so equal inputs run the same way and give equal bits. The rules come from a sweep over tiles,
warps and shares on an H200, for the shapes of common networks (`benchmarks/launches.py`). For large tensors the sweep
also timed forward and backward together (`--both`). Thresholds are programs, or tiles of 64 × 64 values, per processor
of the GPU. Below 0.9 programs some processors are idle. From 1.8 on each has two.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm._groups import group_count, group_size
from kalmannorm._ops.grid import blocks_of, power
from kalmannorm._ops.normalize.lanes import FRESH

HELD = 512
"""Most positions of a group that one program holds in registers, in channels_last, unless wide tiles fill the GPU."""
LONGEST = 2048
"""Most positions of a group for one program alone, in channels_last, even if only half the GPU is busy then."""
SHORT = 16
"""Most chunks of a group for one program alone, in contiguous x, if there are few programs."""
SMALL = 128
"""Most positions of a group of a settled norm, in channels_last, that are read in tiles of 32 × 32 values."""
LARGE = 64
"""Tiles per processor. From this number on tensors are far larger than the cache."""
LEAST = 12800
"""Fewest values per program. With fewer values, fewer programs share a group."""
MOST_SPLITS = 256
"""Most shares of a group that one program merges."""
MOST_MERGED = 512
"""Most shares that one program merges, if each of the K positions in a row counts as one."""


class Shape(NamedTuple):
    """The shape of x for the kernels: N examples with C channels at L positions, in groups of m."""

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
    def size(self) -> int:
        return self.N * self.C * self.L

    def chunks(self, BR: int) -> int:
        """Number of chunks of BR positions in a group. In contiguous x no chunk crosses the end of an example."""
        return blocks_of(self.slab, BR) if self.channels_last else blocks_of(self.L, BR) * self.m

    @property
    def filling(self) -> int:
        """The number of positions whose channels fill whole tiles, 64 columns wide, in channels_last.

        It is 1 if an example would end inside such a row, and in contiguous x.
        """
        K = 64 // math.gcd(self.C, 64)
        return K if self.channels_last and self.L % K == 0 else 1

    def abreast(self, K: int) -> Shape:
        """The shape of channels_last x if K positions form one row."""
        return self._replace(C=self.C * K, L=self.L // K)

    @property
    def vector(self) -> int:
        """The largest power of two, up to 16, that divides the length of a row."""
        inner = self.C if self.channels_last else self.L
        return min(inner & -inner, 16)


class Launch(NamedTuple):
    """Tiles of BR rows × BC columns. `splits` programs share a group; 0: one program computes it alone.

    A row is a position, and a column is a channel. If groups are shared, K positions may form one row.
    """

    BR: int
    BC: int
    splits: int
    chunks: int
    warps: int = 4
    K: int = 1

    def even(self, shape: Shape) -> bool:
        """Whether full tiles cover every group exactly."""
        shape = shape.abreast(self.K)
        rest = shape.N % shape.m or shape.C % self.BC
        return not rest and (shape.slab if shape.channels_last else shape.L) % self.BR == 0

    @property
    def held(self) -> bool:
        """Whether one tile of one program holds a group."""
        return self.splits == 0 and self.chunks == 1

    @property
    def once(self) -> bool:
        """Whether the lanes of a program are merged only once. This lowers register pressure.

        Every program has a chunk, because `launch_of` makes no more shares than there are chunks.
        """
        return blocks_of(self.chunks, max(self.splits, 1)) <= FRESH

    @property
    def merged(self) -> int:
        """The number of shares of a group that a program loads at a time."""
        return min(power(self.splits * self.K), 32)

    @property
    def stages(self) -> int:
        """Pipeline stages of loops: the tile that is computed, and tiles that are copied into shared memory."""
        return 4 if self.splits else 3


def shape_of(x: Tensor, statistics_batch_size: int) -> Shape:
    return _shape(x.shape, x.is_contiguous(), statistics_batch_size)


@functools.lru_cache(maxsize=4096)
def _shape(sizes: torch.Size, contiguous: bool, statistics_batch_size: int) -> Shape:
    examples, channels = sizes[:2]
    positions = sizes[2:].numel()
    # With one position both layouts are the same in memory. Rows of channels vectorise.
    channels_last = positions == 1 or not contiguous
    size = min(group_size(examples, statistics_batch_size), examples)
    return Shape(examples, channels, positions, size, channels_last)


@functools.lru_cache(maxsize=4096)
def launch_for(
    shape: Shape, processors: int, *, backward: bool = False, residual: bool = False, wide: bool = False
) -> Launch:
    """The launch for a shape. `residual`: one more tensor is read or written. `wide`: float32, so half as much fits."""
    how = None
    if shape.channels_last:
        if not _ragged(shape, processors, backward):
            how = (_backward_alone if backward else _forward_alone)(shape, processors)
    elif shape.chunks(_alone_rows(shape)) <= SHORT or _programs(shape, 1) >= 16 * processors:
        how = _contiguous_alone(shape, processors, backward)
    if how is None:
        how = _shared(shape, processors, backward, residual)
    return _halved(shape, how) if wide else how


def observing(
    shape: Shape, processors: int, *, backward: bool = False, residual: bool = False, wide: bool = False
) -> Launch:
    """The launch of one pass: only to observe, or of a settled norm. Tiles are prefetched even for small groups."""
    how = _shared(shape, processors, backward, residual)
    how = _halved(shape, how) if wide and not how.held else how
    return how._replace(splits=max(how.splits, 1))


def settling(
    shape: Shape, processors: int, *, backward: bool = False, residual: bool = False, wide: bool = False
) -> Launch:
    """The launch of a settled norm. One program has a whole group, as far as that fills the GPU: it merges nothing."""
    how = None
    if shape.channels_last:
        if shape.slab <= SMALL and _programs(shape, 32) >= 1.8 * processors:
            how = launch_of(shape, min(power(shape.slab), 32), min(power(shape.C), 32), 1, 1 if backward else 2)
    elif (shape.L <= 256 or _tiles(shape, processors) < 8) and shape.chunks(_alone_rows(shape, 128)) <= SHORT:
        how = _contiguous_alone(shape, processors, backward, 128)
    if how is None:
        return observing(shape, processors, backward=backward, residual=residual, wide=wide)
    how = _halved(shape, how) if wide and not how.held else how
    return how._replace(splits=max(how.splits, 1))


def _forward_alone(shape: Shape, processors: int) -> Launch | None:
    """One program per group and block of channels, in channels_last. None if that would leave the GPU idle."""
    rows = power(shape.slab)
    if rows > LONGEST:
        return None
    many = shape.C >= 64 and _programs(shape, 64) >= 0.9 * processors
    if rows <= HELD:
        return launch_of(shape, 64, 64, 0) if many and rows == HELD else _held(shape, 32, 64)
    if many:
        return launch_of(shape, 128, 64, 0, 8)
    if _programs(shape, 16) > processors:
        return launch_of(shape, 128, min(power(shape.C), 32), 0)
    return _held(shape, 16, rows // 16) if _programs(shape, 16) >= 0.45 * processors else None


def _backward_alone(shape: Shape, processors: int) -> Launch | None:
    """As `_forward_alone`. If there are enough programs, long groups too: reading twice costs less than sharing."""
    rows = power(shape.slab)
    by_64, by_32, by_16 = (_programs(shape, BC) / processors for BC in (64, 32, 16))
    if rows < HELD:
        return _held(shape, 32, 64)
    if rows == HELD:
        if shape.C >= 64 and by_64 >= 1.3:
            return launch_of(shape, 64, 64, 0)
        return launch_of(shape, 64, 32, 0) if shape.C >= 32 and by_32 >= 1.8 else _held(shape, 32, 64)
    if shape.C >= 64 and by_64 >= 0.9:
        return launch_of(shape, 128, 64, 0, 8)
    if rows > LONGEST:
        return None
    if by_32 >= 1.8:
        return launch_of(shape, 128, min(power(shape.C), 32), 0)
    return _held(shape, 16, 64) if rows <= 1024 and by_16 >= 0.45 else None


def _alone_rows(shape: Shape, least: int = 64) -> int:
    """Positions of a tile in contiguous x: as long as a row, but short enough for prefetching."""
    BR = min(power(shape.L), 1024)
    while least < BR and 1 < shape.chunks(BR) < 8:
        BR //= 2
    return BR


def _contiguous_alone(shape: Shape, processors: int, backward: bool, least: int = 64) -> Launch | None:
    BR = _alone_rows(shape, least)
    if shape.chunks(BR) == 1:
        return launch_of(shape, BR, min(max(2048 // BR, 1), power(shape.C)), 0, 1)
    BC = min(max((1024 if backward else 2048) // BR, 1), max(512 // BR, 8), power(shape.C))
    while BC > 1 and _programs(shape, BC) < 1.8 * processors:
        BC //= 2
    if _programs(shape, BC) < 0.9 * processors:
        return None
    return launch_of(shape, BR, BC, 0, 2 if BR >= 256 else 1)


def _shared(shape: Shape, processors: int, backward: bool, residual: bool) -> Launch:
    """Several programs per group. Wide tiles read whole cache lines. Narrow tiles leave fewer shares to merge."""
    if not shape.channels_last:
        BR = min(power(shape.L), 256)
        if not backward and BR == 256 and 3 <= _tiles(shape, processors) < 8:
            BC = min(power(shape.C), 8)
            return launch_of(shape, BR, BC, min(max(2 * processors // _programs(shape, BC), 1), MOST_SPLITS))
        return _split(shape, BR, min((4096 if BR == 256 else 2048) // BR, 64), processors, each=8)
    if (how := _abreast(shape, processors, backward)) is not None:
        return how
    tiles, one = _tiles(shape, processors), shape.groups == 1
    if tiles < 8 or (tiles < 16 and (backward or shape.C < 256)):
        return _split(shape, 64, 32, processors, each=2)
    if tiles >= LARGE or (backward and one and not residual):
        return _large(shape, processors)
    if backward:
        return _split(shape, 32, 64, processors, each=2)
    # The cache use of a tile and its residual decides here. With many groups the choice is reversed.
    low = tiles < 16 or one == residual
    return _split(shape, 32 if low else 64, 64, processors, each=2 if one else 4)


def _abreast(shape: Shape, processors: int, backward: bool) -> Launch | None:
    """Several positions as one row, if the channels alone would leave tiles partly empty.

    None if they would not, or if merging would cost more than this saves. The fewer tiles a program has, the more
    programs must run on a processor, so that one computes while another merges.
    """
    K, tiles, one = shape.filling, _tiles(shape, processors), shape.groups == 1
    if K == 1 or tiles < (16 if one else 8):
        return None
    BR, programs = 64, _programs(shape.abreast(K), 64)
    if one:
        light = tiles < LARGE and not backward
        each, warps = 2 if light and programs >= K else 1, 4 if light else 8
        splits = each * processors // programs
        if programs * splits < 0.9 * processors:
            splits += 1
    elif tiles < LARGE:
        BR, warps = 32, 4
        splits = max(round(2 * processors / programs), 2 if programs < 2 * processors else 1)
    else:
        splits = max(6 * processors // programs, 2)
        warps = 8 if shape.abreast(K).chunks(BR) >= 16 * splits else 4
    splits = min(splits, MOST_SPLITS)
    # A program should merge at most twice as many values as it reads of x.
    most = min(MOST_MERGED, math.isqrt(shape.slab // 2))
    how = launch_of(shape, BR, 64, splits, warps, K)
    return how if how.K > 1 and splits * K <= most else None


def _large(shape: Shape, processors: int) -> Launch:
    """Wide tiles, even if channels leave them partly empty. If the groups fill the GPU, two programs share each."""
    BC = min(power(shape.C), 64)
    programs, each = _programs(shape, BC), 2 if shape.groups == 1 else 4
    splits = 2 if programs >= 0.9 * processors else min(each * processors // programs, MOST_SPLITS)
    return launch_of(shape, min(4096 // BC, power(shape.slab)), BC, splits, 8)


def _held(shape: Shape, BC: int, each: int) -> Launch:
    """One tile of BC channels holds a group. Each thread holds `each` values."""
    BC, rows = min(power(shape.C), BC), power(shape.slab)
    return launch_of(shape, rows, BC, 0, min(max(rows * BC // (32 * each), 1), 16))


def _halved(shape: Shape, how: Launch) -> Launch:
    """Half as many values per thread, or per tile if tiles are large."""
    if how.held:
        # Values that are loaded one by one need more registers.
        BC = max(how.BC // 2, 1) if shape.vector == 1 else how.BC
        return how._replace(BC=BC, warps=min(2 * how.warps, 16))
    return launch_of(shape, how.BR // 2, *how[1:3], how.warps, how.K) if how.BR * how.BC >= 2048 else how


def _tiles(shape: Shape, processors: int) -> float:
    return shape.size / 4096 / processors


def _ragged(shape: Shape, processors: int, backward: bool) -> bool:
    """Whether to share groups although they fill the GPU, because their last block of channels is not full."""
    tiles = _tiles(shape, processors)
    if shape.C % 64 == 0 or tiles < 16 or power(shape.slab) <= HELD:
        return False
    if _abreast(shape, processors, backward) is not None:
        return tiles >= LARGE or shape.slab > LONGEST
    return tiles >= LARGE and _programs(shape, 64) > processors and shape.C > 64


def _programs(shape: Shape, BC: int) -> int:
    return shape.groups * blocks_of(shape.C, BC)


def _split(shape: Shape, BR: int, BC: int, processors: int, *, each: int) -> Launch:
    """At most `each` programs per processor, unless there are more groups than that."""
    if shape.channels_last:
        values = BR * BC
        BC = min(32 if shape.C % 64 else BC, BC, power(shape.C))  # for C = 96, BC = 64 leaves half a tile empty
        BR = min(values // BC, power(shape.slab))
    else:
        BC = min(BC, power(shape.C))
    programs = _programs(shape, BC)
    while each > 1 and programs * shape.chunks(BR) * BR * BC < LEAST * each * processors:
        each //= 2
    return launch_of(shape, BR, BC, min(max(each * processors // programs, 1), MOST_SPLITS))


def launch_of(shape: Shape, BR: int, BC: int, splits: int, warps: int = 4, K: int = 1) -> Launch:
    chunks = shape.abreast(K).chunks(BR)
    if splits and chunks > 2:
        return Launch(BR, BC, min(splits, chunks), chunks, warps, K)
    return Launch(BR, BC, 0, shape.chunks(BR), warps)
