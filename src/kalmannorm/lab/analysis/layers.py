"""Prior, observation, posterior and running statistics of every norm, averaged over groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm.lab.analysis.observing import Sight, observe, tracking_norms
from kalmannorm.moments import Moments

Numbers = list[float]


@dataclass(frozen=True)
class LayerStatistics:
    """One norm, per channel. Without a prior, `gain` and all fields named prior_… are None."""

    name: str
    channels: int
    gain: float | None
    prior_mean: Numbers | None
    prior_var: Numbers | None
    observed_mean: Numbers
    observed_var: Numbers
    posterior_mean: Numbers
    posterior_var: Numbers
    running_mean: Numbers
    running_var: Numbers

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Average:
    """The plain average of rows (G, C), summed in float64."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rows = 0

    def add(self, rows_GC: Tensor) -> None:
        total = rows_GC.double().sum(0)
        self.total = total if self.total is None else self.total + total
        self.rows += len(rows_GC)

    def value(self) -> Numbers:
        assert self.total is not None
        return numbers(self.total / self.rows)


def layer_statistics(model: nn.Module, batches: Iterable[Tensor]) -> list[LayerStatistics]:
    """The statistics of every norm that ran, in the order of the model. `batches` are images, in whole groups as in
    training.

    Moments are averaged over groups. So a variance is that of a group or of its posterior, not the variance of all
    data. The model stays unchanged.
    """
    sums: dict[str, dict[str, Average]] = {}

    def look(name: str, norm: GroupedNorm, sight: Sight) -> None:
        kinds = {"prior": sight.prior, "observed": sight.observation, "posterior": sight.posterior}
        for kind, moments in kinds.items():
            for part, rows in _parts(moments):
                sums.setdefault(name, {}).setdefault(f"{kind}_{part}", Average()).add(rows)

    observe(model, batches, look)
    return [_layer(name, norm, sums[name]) for name, norm in tracking_norms(model).items() if name in sums]


def _parts(moments: Moments | None) -> list[tuple[str, Tensor]]:
    return [] if moments is None else [("mean", moments.mean), ("var", moments.var)]


def _layer(name: str, norm: GroupedNorm, sums: dict[str, Average]) -> LayerStatistics:
    gain = norm.gain if isinstance(norm, BatchKalmanNorm) and "prior_mean" in sums else None
    assert norm.running_mean is not None and norm.running_var is not None
    averages: dict[str, Any] = {"prior_mean": None, "prior_var": None}
    averages |= {kind: average.value() for kind, average in sums.items()}
    return LayerStatistics(
        name=name,
        channels=norm.num_features,
        gain=None if gain is None else float(gain.detach().mean()),
        running_mean=numbers(norm.running_mean),
        running_var=numbers(norm.running_var),
        **averages,
    )


def numbers(values: Tensor) -> Numbers:
    """A vector with six significant digits: enough for plots, in a third of the bytes."""
    return [float(f"{value:.6g}") for value in values.detach().to("cpu", torch.float64).tolist()]
