"""A setting, in the notation of the paper: (gradient batch, statistics batch)."""

from __future__ import annotations

import re
from typing import NamedTuple

from kalmannorm.lab.errors import LabError

MOST_EXAMPLES = 1_000_000
"""Limit for both numbers of a setting, and for other batch sizes."""


class Setting(NamedTuple):
    """(256, 4): an optimizer step uses 256 examples, in groups of 4 neighbours that share statistics."""

    gradient_batch: int
    statistics_batch: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Parse "128,2", "(128, 2)" or "128x2". The statistics batch must divide the gradient batch."""
        found = re.fullmatch(r"\(?\s*(\d{1,20})\s*[,x/]\s*(\d{1,20})\s*\)?", text.strip())
        if found is None:
            raise LabError(f"setting {text!r} is not understood: give gradient and statistics batch, such as 128,2")
        return cls(int(found[1]), int(found[2])).checked()

    def checked(self) -> Setting:
        gradient, statistics = self
        if not (1 <= gradient <= MOST_EXAMPLES and 1 <= statistics <= MOST_EXAMPLES):
            raise LabError(f"setting {self} must have positive numbers of at most {MOST_EXAMPLES:,}")
        if gradient % statistics:
            smaller = next(m for m in range(min(statistics, gradient), 0, -1) if gradient % m == 0)
            larger = -(-gradient // statistics) * statistics
            raise LabError(
                f"setting {self}: a statistics batch of {statistics} does not divide the gradient batch {gradient}; "
                f"try {Setting(gradient, smaller)} or {Setting(larger, statistics)}"
            )
        return self

    def __str__(self) -> str:
        return f"({self.gradient_batch}, {self.statistics_batch})"
