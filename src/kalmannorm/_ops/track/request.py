"""A move: what one forward of a norm saw, and the buffers that it moves. How far is in `averages.py`."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from kalmannorm.moments import Moments

Kind: TypeAlias = Literal["total", "plain", "sigma"]
"""What running statistics average: total variances, plain variances, standard deviations."""


class TrackingRequest(NamedTuple):
    """Of groups of `size` neighbours among `examples`, with `values` values per channel.

    `counts` are values, batches and skipped batches so far. `arrived` is an int32 zero, which is one again afterwards;
    no two launches may share it at the same time.
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
        """What was seen: means and variances (G, C), twice where the observation has averages of its own."""
        moments = [self.posterior] if self.observation is None else [self.posterior, self.observation]
        return [rows for part in moments for rows in (part.mean, part.var)]

    def buffers(self) -> list[Tensor]:
        """What moves: averages (C,) as `rows` has them, and the counts."""
        return [*self.running, *(self.observed or ()), *self.counts]
