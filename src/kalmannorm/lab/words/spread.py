"""Mean and standard deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """`std` is the sample's standard deviation (divided by n - 1), None for a single seed."""

    mean: float
    std: float | None
    n: int

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "n": self.n}


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are not None. None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))
