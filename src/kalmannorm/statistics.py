"""Population statistics: moving averages that face the data as a fixed normalizer does.

A fixed normalizer meets E[var] *plus* the variance of the group means. So one forward pools its groups, weighted by
their examples (mean_b; var_b = average var + variance of the means), and then applies the filter's own update:

    Σ ← (1-α) Σ + α var_b + α (1-α) (mean_b - μ)²      μ ← μ + α (mean_b - μ)

With α = n / (values seen so far + n) this is exactly the pooled variance of all data, however it was split.
`total_variance=False` is Algorithm 1's plain average instead, Σ ← Σ + α (average var - Σ), with its signs mended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm.groups import group_sizes
from kalmannorm.moments import Moments


def average_groups(moments_GC: Tensor, examples: int, size: int) -> Tensor:
    """The average over groups, each weighted by its examples: (G, C) -> (C,)."""
    return (moments_GC * (group_sizes(examples, size, moments_GC) / examples)).sum(0)


def pool_batch(moments: Moments, examples: int, size: int, *, total_variance: bool) -> Moments:
    """One row (C,) for the whole batch, groups weighted by their examples."""
    mean, var = moments.mean, moments.var
    if moments.mean.shape[0] == 1:
        return Moments(mean[0], var[0])
    average = average_groups(mean, examples, size)
    if total_variance:
        var = var + (mean - average).square()
    return Moments(average, average_groups(var, examples, size))


def moved(mean: Tensor, var: Tensor, batch: Moments, alpha: Tensor | float, *, total_variance: bool) -> Moments:
    """Where the moving averages go after this batch."""
    step = batch.mean - mean
    target = batch.var + (1 - alpha) * step.square() if total_variance else batch.var
    return Moments(mean + alpha * step, var + alpha * (target - var))


def values_seen(values_tracked: Tensor, batches_tracked: Tensor, values: int) -> Tensor:
    """How many values per channel went into the statistics before this batch of `values`.

    A BatchNorm checkpoint says how many batches it saw but not how large they were: they count as this one.
    """
    return torch.where(values_tracked > 0, values_tracked, batches_tracked * values)
