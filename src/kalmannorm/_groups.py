"""Groups of neighbouring examples that share their statistics, and moments of groups from moments of examples.

A batch of N examples has G = ceil(N / m) groups of m neighbouring examples. The last group may be smaller. With m = 0
the whole batch is one group. If the last group has one value per channel and no prior, it joins the group before it.
Then both have the same row of moments, and there are still G rows. So shares of groups stay the same too.

No function here depends on the values of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kalmannorm.moments import Moments


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Statistics and filter are float64 for float64 activations, and float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t.to(dtype)`. Skips the call if `t` already has this dtype."""
    return t if t.dtype == dtype else t.to(dtype)


def group_size(examples: int, statistics_batch_size: int | None) -> int:
    """Examples per group: the statistics batch, or the whole batch if no statistics batch is set."""
    return statistics_batch_size or examples


def group_count(examples: int, size: int) -> int:
    return (examples + size - 1) // size


def lone_last(x: Tensor, size: int) -> bool:
    """Whether the last of several groups has one value per channel, and only the last one. Its variance is 0."""
    examples, *positions = x.shape[0], *x.shape[2:]
    return size > 1 and all(n == 1 for n in positions) and examples % size == 1 and examples > size


def group_sizes(examples: int, size: int, like: Tensor) -> Tensor | int:
    """Examples in each group: one number if all groups have the same size, else (G, 1).

    The tensor has the dtype and the device of `like`.
    """
    if examples % size == 0:
        return size
    starts = torch.arange(group_count(examples, size), device=like.device, dtype=like.dtype) * size
    return (examples - starts).clamp(max=size).unsqueeze(1)


def _from_first(rows_GmC: Tensor) -> Tensor:
    """The mean, computed relative to the group's first example. A plain sum would lose digits where |mean| ≫ σ."""
    first = rows_GmC[:, :1]
    return first.squeeze(1) + (rows_GmC - first).mean(1)


def _average(rows_GmC: Tensor) -> Tensor:
    """The mean of variances. Some of them may be infinite."""
    return rows_GmC.mean(1)


def mean_groups(rows_NC: Tensor, size: int, mean: Callable[[Tensor], Tensor] = _from_first) -> Tensor:
    """Mean of the rows of each group: (N, C) -> (G, C)."""
    examples, channels = rows_NC.shape
    whole = examples - examples % size
    if size == 1:
        return rows_NC
    if whole == examples:
        return mean(rows_NC.reshape(-1, size, channels))
    last = mean(rows_NC[whole:].unsqueeze(0))
    return torch.cat([mean(rows_NC[:whole].reshape(-1, size, channels)), last]) if whole else last


def expand_groups(moments_GC: Tensor, examples: int, size: int) -> Tensor:
    """Repeat each group's row for its examples: (G, C) or (1, C) -> (N, C)."""
    groups, channels = moments_GC.shape
    if groups == 1:
        return moments_GC.expand(examples, channels)
    if size == 1:
        return moments_GC
    rows = moments_GC.unsqueeze(1).expand(groups, size, channels).reshape(groups * size, channels)
    return rows if groups * size == examples else rows[:examples]


def merge_examples(example: Moments, size: int) -> Moments:
    """Moments of each group from the moments of its examples: average variance plus variance of the means (Chan)."""
    if size == 1:
        return example
    mean = mean_groups(example.mean, size)
    spread_NC = example.mean - expand_groups(mean, example.mean.shape[0], size)
    return Moments(mean, mean_groups(example.var + spread_NC * spread_NC, size, _average))
