"""Whether two accuracies differ by more than chance: by more than seeds vary, and by more than test images vary.

Seeds: Welch's t-test at 95 %,

    |a - b| > t(ν) √(s_a²/n_a + s_b²/n_b)        ν by Welch and Satterthwaite

The test is not paired by seed. A seed fixes the initial weights and the order of the images, but different norms
diverge from each other within a few steps. Pairing would halve the degrees of freedom and gain little.

Test images: all seeds are tested on the same N images. Other images would give other accuracies, and more seeds do not
average that out. With p̃ = (hits + 1) / (N + 2), as in Agresti and Caffo, so that 100 % has an error too,

    |a - b| > 1.96 √(p̃_a(1 - p̃_a)/(N + 2) + p̃_b(1 - p̃_b)/(N + 2))

Both rows see the same images, so their errors are correlated and the true margin is smaller. This test may miss a small
difference. If the largest of k differences was picked, the 5 % are divided by k (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

from kalmannorm.lab.words.spread import Spread
from kalmannorm.lab.words.wording import counted, number

_LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """A difference in accuracy, and the differences that chance explains, in %."""

    size: float
    seeds: float | None
    """None if it is unknown, because there is a single seed."""
    images: float | None
    """None if the number of test images is unknown."""
    counts: tuple[int, int, int | None]
    """Number of seeds on each side, and of test images."""

    @property
    def beyond_chance(self) -> bool | None:
        """None if unknown: there is a single seed, and the difference is larger than test images explain."""
        margins = [margin for margin in (self.seeds, self.images) if margin is not None]
        if not self.size or any(self.size <= margin for margin in margins):
            return False
        return None if self.seeds is None else True

    @property
    def level(self) -> bool:
        """Whether chance explains the difference. Also False if there are only too few seeds to know."""
        return self.beyond_chance is False and (self.images is None or self.size <= self.images)

    @property
    def reason(self) -> str:
        """Which margin is too wide, and how wide: "2 seeds leave ± 12.3 points"."""
        one, other, images = self.counts
        if self.seeds is not None and (self.images is None or self.seeds > self.images):
            who, margin = counted(one, "seed") if one == other else f"{one} and {other} seeds", self.seeds
        else:
            assert self.images is not None and images is not None
            who, margin = f"{number(images)} test images", self.images
        return f"{who} leave ± {number(margin, 1)} points"


def difference(one: Spread, other: Spread, images: int | None, among: int = 1) -> Difference:
    """`images` is the number of test images. `among` is the number of differences from which this one was picked."""
    share = 1 - _LEVEL / (2 * max(among, 1))
    return Difference(
        abs(one.mean - other.mean),
        _by_seeds(one, other, share),
        None if images is None else float(ndtri(share)) * math.hypot(*(_image_error(s, images) for s in (one, other))),
        (one.n, other.n, images),
    )


def _by_seeds(one: Spread, other: Spread, share: float) -> float | None:
    if one.std is None or other.std is None:
        return None
    a, b = one.std**2 / one.n, other.std**2 / other.n
    if a + b == 0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (one.n - 1) + b**2 / (other.n - 1))
    return float(stdtrit(freedom, share)) * math.sqrt(a + b)


def _image_error(value: Spread, images: int) -> float:
    hits = (value.mean / 100 * images + 1) / (images + 2)
    return 100 * math.sqrt(max(hits * (1 - hits), 0.0) / (images + 2))
