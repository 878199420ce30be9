"""A tracking request: the statistics of one forward of a norm, and the buffers to update. See `averages.py`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from kalmannorm.moments import Moments

Kind: TypeAlias = Literal["total", "plain", "sigma", "first"]
"""The quantity that running statistics average: total variances, plain variances or standard deviations. "first": total
variances, and the first batch sets them."""


BUFFERS = (
    "running_mean", "running_var", "observed_mean", "observed_var",
    "values_tracked", "num_batches_tracked", "skipped_batches",
)  # fmt: skip
"""The names of a norm's buffers, in the order of `TrackingRequest.buffers`."""


class TrackingRequest(NamedTuple):
    """One update, for groups of `size` examples of a batch with `examples` examples and `values` values per channel.

    `counts` are values, batches and skipped batches so far. `arrived` is an int32 tensor. It is zero before and after a
    launch. No two launches may use it at the same time.
    """

    posterior: Moments
    observation: Moments | None
    running: tuple[Tensor, Tensor]
    observed: tuple[Tensor, Tensor] | None
    counts: tuple[Tensor, Tensor, Tensor]
    arrived: Tensor
    examples: int
    size: int
    values: int
    momentum: float | None
    observation_momentum: float
    eps: float
    kind: Kind

    def rows(self) -> list[Tensor]:
        """Means and variances (G, C) of the posterior, then of the observation if observed statistics exist."""
        moments = [self.posterior] if self.observation is None else [self.posterior, self.observation]
        return [rows for part in moments for rows in (part.mean, part.var)]

    def buffers(self) -> list[Tensor]:
        """The buffers to update: averages (C,) in the order of `rows`, then the counts."""
        return [*self.running, *(self.observed or ()), *self.counts]

    def slots(self) -> list[Tensor | None]:
        """The buffers in the order of `BUFFERS`, with None for observed statistics that the norm does not have."""
        return [*self.running, *(self.observed or (None, None)), *self.counts]


def unchanged(owners: Sequence[dict[str, Any]], slots: Sequence[Tensor | None]) -> bool:
    """Whether the norms with these buffers still have those of `slots`."""
    return all(map(operator.is_, [own[name] for own in owners for name in BUFFERS], slots))
