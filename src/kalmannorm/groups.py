"""Groups: which neighbouring examples share their statistics, and sums over them on small (N, C) tensors.

A batch of N examples holds G = ceil(N / m) groups of m neighbours; the last may be smaller. Every statistic is
first taken per example (N, C), where memory is read once in the order it lies, and then merged per group here, so
no layout has to be copied and a ragged last group costs nothing. m = 0 means the whole batch is one group.

Nothing here depends on the values of a tensor or branches on a symbolic batch size, so exports stay dynamic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kalmannorm.moments import Moments


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Statistics and filter are float32 whatever the activations are; float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def group_size(examples: int, statistics_batch_size: int | None) -> int:
    """Examples per group: the statistics batch, or the whole batch where none is set."""
    return statistics_batch_size or examples


def group_count(examples: int, size: int) -> int:
    return (examples + size - 1) // size


def group_sizes(examples: int, size: int, like: Tensor) -> Tensor:
    """Examples in each group, (G, 1), in the dtype and on the device of `like`."""
    starts = torch.arange(group_count(examples, size), device=like.device, dtype=like.dtype) * size
    return (examples - starts).clamp(max=size).unsqueeze(1)


def sum_groups(rows_NC: Tensor, size: int) -> Tensor:
    """Sum the rows of each group: (N, C) -> (G, C)."""
    examples, channels = rows_NC.shape
    if size == 1:
        return rows_NC
    groups = group_count(examples, size)
    return F.pad(rows_NC, (0, 0, 0, groups * size - examples)).view(groups, size, channels).sum(1)


def expand_groups(moments_GC: Tensor, examples: int, size: int) -> Tensor:
    """Give every example its group's row: (G, C) or (1, C) -> (N, C)."""
    groups, channels = moments_GC.shape
    if groups == 1:
        return moments_GC.expand(examples, channels)
    if size == 1:
        return moments_GC
    return moments_GC.unsqueeze(1).expand(groups, size, channels).reshape(groups * size, channels)[:examples]


def mean_groups(rows_NC: Tensor, size: int) -> Tensor:
    """Mean of the rows of each group: (N, C) -> (G, C)."""
    if size == 1:
        return rows_NC
    examples = rows_NC.shape[0]
    # Relative to each group's first example, or the sum of m means would round where |mean| ≫ σ.
    first = rows_NC[::size]
    offset_NC = rows_NC - expand_groups(first, examples, size)
    return first + sum_groups(offset_NC, size) / group_sizes(examples, size, rows_NC)


def merge_examples(example: Moments, size: int) -> Moments:
    """Moments of each group from those of its examples: average variance plus variance of the means (Chan)."""
    if size == 1:
        return example
    examples = example.mean.shape[0]
    mean = mean_groups(example.mean, size)
    spread_NC = example.mean - expand_groups(mean, examples, size)
    total = sum_groups(example.var + spread_NC * spread_NC, size)
    return Moments(mean, total / group_sizes(examples, size, total))
