"""The memory of the moments that the norms of a bundle share in a forward on the short way."""

from __future__ import annotations

from collections.abc import Sequence


class Layout:
    """Where the moments of each norm of a bundle are: four times (G, C) from `starts` on.

    With `prior` the moments of the prior follow, two times (G, C). With `settled`, what the backward of a settled norm
    needs of its running statistics, two times (C,). `places`: the number of each norm, by its start.
    """

    def __init__(
        self, groups: Sequence[int], channels: Sequence[int], prior: bool = False, settled: bool = False
    ) -> None:
        self.groups, self.starts, self.total = groups, list[int](), 0
        for size, count in zip(groups, channels, strict=True):
            self.starts.append(self.total)
            values = (6 if prior else 4) * size * count + (2 * count if settled else 0)
            self.total += -(-values // 4) * 4  # a multiple of 16 bytes
        self.places = {start: place for place, start in enumerate(self.starts)}
