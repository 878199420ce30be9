"""Population statistics: moving averages that face the data as a fixed normalizer does.

A fixed normalizer meets E[var] *plus* the variance of the group means. So one forward pools its groups, weighted by
their examples (mean_b; var_b = average var + variance of the means), and then applies the filter's own update:

    Σ ← (1-α) Σ + α var_b + α (1-α) (mean_b - μ)²      μ ← μ + α (mean_b - μ)

With α = n / (values seen so far + n) this is exactly the pooled variance of all data, however it was split.
`total_variance=False` is Algorithm 1's plain average instead, Σ ← Σ + α (average var - Σ), with its signs mended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm._groups import group_sizes
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


def updated(mean: Tensor, var: Tensor, batch: Moments, alpha: Tensor | float, *, total_variance: bool) -> Moments:
    """Where the moving averages go after this batch."""
    step = batch.mean - mean
    # In this order: with α = 1 the square, which may overflow, counts nothing.
    target = torch.addcmul(batch.var, (1 - alpha) * step, step) if total_variance else batch.var
    return Moments(mean + alpha * step, var + alpha * (target - var))


def hastened(share: Tensor, momentum: float) -> Tensor:
    """α of a slow average, `share` being what this batch is of all so far: at batch t it is 4 / (t + 3), until that
    falls to the momentum.

    The start values would outlast the first epochs at the momentum alone, and a plain average keeps what the net has
    long unlearnt; here a batch weighs as (its number / t)³, so that the last quarter rules.
    """
    return (4 * share / (1 + 3 * share)).clamp(min=momentum)


def values_seen(values_tracked: Tensor, batches_tracked: Tensor, values: Tensor | int) -> Tensor:
    """How many values per channel went into the statistics before this batch of `values`.

    A BatchNorm checkpoint says how many batches it saw but not how large they were: they count as this one.
    """
    return torch.where(values_tracked > 0, values_tracked, batches_tracked * values)


class Pending:
    """What the forwards since the last move saw together: one row (C,) of each kind, and how many values it rests on.

    Tensors of fixed places that `add` writes to: compiled code meets the same ones at every forward, and a recorded
    CUDA graph too. Sums run in float64, where the device has it.
    """

    def __init__(self, like: Tensor, *, observes: bool) -> None:
        def row() -> Moments:
            return Moments(*(torch.zeros_like(like, dtype=precise_dtype(like)) for _ in range(2)))

        self.values = torch.zeros((), device=like.device, dtype=torch.long)
        self.population = row()
        self.observation = row() if observes else None

    def fits(self, like: Tensor, *, observes: bool) -> bool:
        """Whether it can serve a norm whose running mean is this."""
        mean = self.population.mean
        return (mean.shape, mean.device) == (like.shape, like.device) and observes == (self.observation is not None)

    def clear(self) -> None:
        for tensor in (self.values, *self.rows()):
            tensor.zero_()

    def rows(self) -> list[Tensor]:
        """The averages, (C,) each."""
        return [t for row in (self.population, self.observation) if row is not None for t in (row.mean, row.var)]

    def add(
        self,
        population: Moments,
        observation: Moments | None,
        values: Tensor | int,
        pool: Callable[[Groups], Moments],
    ) -> None:
        """Take in a forward's rows, the posterior's by the norm's own way to pool; what is NaN once stays it."""
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
    """The moments of all groups' values together."""
    return groups.pooled(total_variance=True)


def precise_dtype(like: Tensor) -> torch.dtype:
    """In which to sum much: float64, where the device has it."""
    return torch.float32 if like.device.type == "mps" else torch.float64
