"""Running statistics: moving averages for a fixed normalizer.

The variance of the data around a fixed mean is E[var] *plus* the variance of the group means. So each forward pools its
groups, weighted by their examples: mean_b, and var_b = average var + variance of the means. Then it applies the update
of the filter:

    Σ ← (1-α) Σ + α var_b + α (1-α) (mean_b - μ)²      μ ← μ + α (mean_b - μ)

With α = n / (values so far + n) this is exactly the pooled variance of all data, for every split into batches.
`total_variance=False` is the plain average of Algorithm 1 with corrected signs: Σ ← Σ + α (average var - Σ).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm._groups import group_sizes
from kalmannorm.moments import Moments


class Groups(NamedTuple):
    """Moments of a batch's groups, (G, C), and each group's share of the values: one number, or (G, 1)."""

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
    """Groups of `size` examples of a batch with `examples` examples, weighted by their examples."""
    return Groups(moments, group_sizes(examples, size, moments.mean) / examples)


def updated(mean: Tensor, var: Tensor, batch: Moments, alpha: Tensor | float, *, total_variance: bool) -> Moments:
    """The moving averages after this batch."""
    step = batch.mean - mean
    # Multiply by 1 - α before squaring: the square may overflow, and with α = 1 it must count nothing.
    target = torch.addcmul(batch.var, (1 - alpha) * step, step) if total_variance else batch.var
    return Moments(mean + alpha * step, var + alpha * (target - var))


def hastened(share: Tensor, momentum: float) -> Tensor:
    """α of a slow average. At batch t it is 4 / (t + 3), until this falls to the momentum.

    `share` is the share of this batch in all values so far. With the momentum alone, the initial values would persist
    over the first epochs. A plain average would keep old statistics too long. Here a batch has a weight proportional to
    (its number / t)³, so the last quarter dominates.
    """
    return (4 * share / (1 + 3 * share)).clamp(min=momentum)


def values_seen(values_tracked: Tensor, batches_tracked: Tensor, values: Tensor | int) -> Tensor:
    """Number of values per channel in the statistics before this batch of `values`.

    A BatchNorm checkpoint contains the number of batches, but not their sizes. Each counts as large as this batch.
    """
    return torch.where(values_tracked > 0, values_tracked, batches_tracked * values)


class Pending:
    """Pooled statistics of the forwards since the last update: rows (C,) and the number of values per channel.

    `add` writes into fixed tensors, so compiled code and recorded CUDA graphs use the same tensors in every forward.
    Sums are float64 if the device supports it.
    """

    def __init__(self, like: Tensor, *, observes: bool) -> None:
        def row() -> Moments:
            return Moments(*(torch.zeros_like(like, dtype=precise_dtype(like)) for _ in range(2)))

        self.values = torch.zeros((), device=like.device, dtype=torch.long)
        self.population = row()
        self.observation = row() if observes else None

    def fits(self, like: Tensor, *, observes: bool) -> bool:
        """Whether it fits a norm with the running mean `like`."""
        mean = self.population.mean
        return (mean.shape, mean.device) == (like.shape, like.device) and observes == (self.observation is not None)

    def clear(self) -> None:
        for tensor in (self.values, *self.rows()):
            tensor.zero_()

    def rows(self) -> list[Tensor]:
        """The averages, each (C,)."""
        return [t for row in (self.population, self.observation) if row is not None for t in (row.mean, row.var)]

    def add(
        self,
        population: Moments,
        observation: Moments | None,
        values: Tensor | int,
        pool: Callable[[Groups], Moments],
    ) -> None:
        """Add a forward's rows. `pool` is the norm's pooling of posteriors. A NaN stays until `clear`."""
        total = self.values + values
        share = values / total.to(self.population.mean.dtype)
        shares = torch.stack([1 - share, share]).unsqueeze(1)

        def merge(row: Moments, new: Moments, pool: Callable[[Groups], Moments]) -> None:
            both = (torch.stack([a, b.to(a.dtype)]) for a, b in ((row.mean, new.mean), (row.var, new.var)))
            mean, var, _ = pool(Groups(Moments(*both), shares))
            row.mean.copy_(mean)
            row.var.copy_(var)

        merge(self.population, population, pool)
        if self.observation is not None and observation is not None:
            merge(self.observation, observation, pooled_values)
        self.values.copy_(total)


def pooled_values(groups: Groups) -> Moments:
    """The moments of the values of all groups."""
    return groups.pooled(total_variance=True)


def precise_dtype(like: Tensor) -> torch.dtype:
    """The dtype for long sums: float64 if the device supports it."""
    return torch.float32 if like.device.type == "mps" else torch.float64
