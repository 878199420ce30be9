"""The variance gap: how far the variance used in training differs from the one used in inference.

    gap = (var - running) / (running + eps)        per channel and group of m examples, over the training set

`var` is the variance of the group's posterior. For batch norm that is the variance of the group itself. A second figure
uses the raw observation S instead, with its own running average. It shows the gap that this network would have without
a prior.

The running variance includes the variance of group means (`total_variance`), so groups of m are below it on average.
`spread`, the standard deviation over groups relative to their mean, does not have this offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm.lab.analysis.layers import numbers
from kalmannorm.lab.analysis.observing import Sight, observe, tracking_norms
from kalmannorm.lab.data.protocol import Batch, Data
from kalmannorm.lab.errors import LabError

MOST_CHANNELS, MOST_BATCHES = 64, 200
"""The most rows and columns of the heat map. The summaries use all of them."""


@dataclass(frozen=True)
class LayerGap:
    """One norm. `gap` has a row per channel and a column per group, reduced evenly.

    Without a prior the posterior is the observation, and the figures of both are equal.
    """

    name: str
    channels: int
    batches: int
    gap: list[list[float]]
    mean_abs: float
    spread: float
    observed_mean_abs: float
    observed_spread: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def overall(layers: Iterable[LayerGap]) -> dict[str, float]:
    """Averages over all channels of all layers, with equal weights."""
    found = list(layers)
    channels = sum(layer.channels for layer in found)
    names = ("mean_abs", "spread", "observed_mean_abs", "observed_spread")
    return {name: sum(getattr(layer, name) * layer.channels for layer in found) / channels for name in names}


def variance_gap(
    model: nn.Module, data: Data, statistics_batch: int, *, batch: int = 256, max_groups: int | None = None
) -> list[LayerGap]:
    """The gap of every norm that ran, in the order of the model. The model stays unchanged.

    The training set is divided into groups of `statistics_batch`. It is shuffled, because an image folder is ordered by
    class, and not augmented. About `batch` examples run at a time. `max_groups` limits the number of groups.
    """
    size, groups = whole_groups(data.train_size, statistics_batch, batch)
    if max_groups is not None:
        groups = min(groups, max_groups)
    columns = _evenly(groups, MOST_BATCHES)
    found: dict[str, _Layer] = {}

    def look(name: str, norm: GroupedNorm, sight: Sight) -> None:
        if name not in found:
            found[name] = _Layer(name, norm, columns, prior=sight.prior is not None)
        found[name].add(sight)

    observe(model, _first(data.train_batches(size, seed=0, epoch=0, augment=False), groups * statistics_batch), look)
    return [found[name].result() for name in tracking_norms(model) if name in found]


def whole_groups(examples: int, statistics_batch: int, batch: int) -> tuple[int, int]:
    """Examples per batch, and the number of all groups.

    Of the sizes from batch / 2 to batch it takes the one that omits the fewest examples. For most data sets these are
    only the ones that fill no group.
    """
    groups = examples // statistics_batch
    most = min(max(batch // statistics_batch, 1), groups)
    if most < 1:
        raise LabError(f"{examples} training examples do not fill a group of {statistics_batch}: analyse more of them")
    at_once = min(range(most, most // 2, -1), key=lambda count: groups % count)
    return at_once * statistics_batch, groups - groups % at_once


def _first(batches: Iterable[Batch], examples: int) -> Iterator[Tensor]:
    for images, _ in batches:
        yield images[:examples]
        examples -= len(images)
        if examples <= 0:
            return


def _evenly(count: int, most: int) -> list[int]:
    """At most `most` numbers of range(count), evenly spaced."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


class _Gap:
    """The gap of one variance to its running average: summaries of all groups, and the columns of the heat map."""

    def __init__(self, running: Tensor, eps: float, columns: list[int]) -> None:
        self.running, self.eps = running.detach().double(), eps
        self.rows = _evenly(len(running), MOST_CHANNELS)
        self.wanted = set(columns)
        self.kept: list[Tensor] = []
        self.groups = 0
        self.absolute, self.total, self.squares = (torch.zeros_like(self.running) for _ in range(3))

    def add(self, var_GC: Tensor) -> None:
        gap = (var_GC.double() - self.running) / (self.running + self.eps)
        self.absolute += gap.abs().sum(0)
        # Sums of the relative gap, not of the variance. It has order 1, so no digits cancel.
        self.total += gap.sum(0)
        self.squares += gap.square().sum(0)
        chosen = [g for g in range(len(gap)) if self.groups + g in self.wanted]
        if chosen:
            self.kept.append(gap[chosen][:, self.rows].T.cpu())
        self.groups += len(gap)

    def matrix(self) -> list[list[float]]:
        return [numbers(row) for row in torch.cat(self.kept, 1)]

    def mean_abs(self) -> float:
        return float(self.absolute.mean() / self.groups)

    def spread(self) -> float:
        mean = self.total / self.groups
        deviation = (self.squares / self.groups - mean.square()).clamp(min=0).sqrt()
        level = mean + self.running / (self.running + self.eps)  # the mean variance, in the same unit
        return float((deviation / level.clamp(min=torch.finfo(torch.float32).tiny)).mean())


class _Layer:
    def __init__(self, name: str, norm: GroupedNorm, columns: list[int], *, prior: bool) -> None:
        assert norm.running_var is not None
        self.name, self.channels = name, norm.num_features
        self.posterior = _Gap(norm.running_var, norm.eps, columns)
        self.observed: _Gap | None = None
        if prior:
            average = norm.running_var if norm.observed_var is None else norm.observed_var
            self.observed = _Gap(average, norm.eps, [])

    def add(self, sight: Sight) -> None:
        self.posterior.add(sight.posterior.var)
        if self.observed is not None:
            self.observed.add(sight.observation.var)

    def result(self) -> LayerGap:
        raw = self.observed or self.posterior
        return LayerGap(
            name=self.name,
            channels=self.channels,
            batches=self.posterior.groups,
            gap=self.posterior.matrix(),
            mean_abs=self.posterior.mean_abs(),
            spread=self.posterior.spread(),
            observed_mean_abs=raw.mean_abs(),
            observed_spread=raw.spread(),
        )
