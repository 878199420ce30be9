"""Population statistics: moving averages that face the data as a fixed normalizer does.

A fixed normalizer meets E[var] *plus* the variance of the group means. So one forward pools its groups, weighted by
their examples (mean_b; var_b = average var + variance of the means), and then applies the filter's own update:

    Σ ← (1-α) Σ + α var_b + α (1-α) (mean_b - μ)²      μ ← μ + α (mean_b - μ)

With α = n / (values seen so far + n) this is exactly the pooled variance of all data, however it was split.
`total_variance=False` is Algorithm 1's plain average instead, Σ ← Σ + α (average var - Σ), with its signs mended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm.groups import group_sizes
from kalmannorm.moments import Moments


class Groups(NamedTuple):
    """Moments of a batch's groups, (G, C), and the share of its values that each holds: a number, or (G, 1)."""

    moments: Moments
    shares: Tensor | float

    def average(self, rows_GC: Tensor) -> Tensor:
        """The average over groups, each weighted by its share: (G, C) -> (C,)."""
        return (rows_GC * self.shares).sum(0)

    def pooled(self, *, total_variance: bool) -> Moments:
        """One row (C,) for the whole batch."""
        mean, var = self.moments.mean, self.moments.var
        if mean.shape[0] == 1:
            return Moments(mean[0], var[0])
        average = self.average(mean)
        if total_variance:
            var = var + (mean - average).square()
        return Moments(average, self.average(var))


def groups_of(moments: Moments, examples: int, size: int) -> Groups:
    """Groups of `size` neighbours among `examples`, weighted by their examples."""
    return Groups(moments, group_sizes(examples, size, moments.mean) / examples)


def among_average(example: Moments, average: Moments, size: int) -> Moments:
    """A virtual group for each example, (N, C): itself, with weight 1/m, among m - 1 average ones."""
    a = 1 / size
    mean = a * example.mean + (1 - a) * average.mean
    var = a * (example.var + (example.mean - mean).square()) + (1 - a) * (average.var + (average.mean - mean).square())
    return Moments(mean, var)


def moved(mean: Tensor, var: Tensor, batch: Moments, alpha: Tensor | float, *, total_variance: bool) -> Moments:
    """Where the moving averages go after this batch."""
    step = batch.mean - mean
    target = batch.var + (1 - alpha) * step.square() if total_variance else batch.var
    return Moments(mean + alpha * step, var + alpha * (target - var))


def values_seen(values_tracked: Tensor, batches_tracked: Tensor, values: Tensor | int) -> Tensor:
    """How many values per channel went into the statistics before this batch of `values`.

    A BatchNorm checkpoint says how many batches it saw but not how large they were: they count as this one.
    """
    return torch.where(values_tracked > 0, values_tracked, batches_tracked * values)
