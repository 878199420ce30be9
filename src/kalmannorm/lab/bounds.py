"""Ranges of numeric options, checked before any work. Error messages name the option as the user types it.

The ranges are wide. They exclude numbers that make no sense in any run, and numbers that overflow in the computation.
"""

from __future__ import annotations

import math
import reprlib
from typing import NamedTuple

from kalmannorm.lab.errors import LabError, option


class Bounds(NamedTuple):
    """A range from `least` to `most`, both included, and its description in words."""

    least: float
    most: float
    words: str

    def check(self, name: str, value: float) -> None:
        """Raise if the value is outside the range. NaN always is."""
        if not self.least <= value <= self.most:
            raise LabError(f"{option(name)} must be {self.words}, got {reprlib.repr(value)}")


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def positive(most: float) -> Bounds:
    return Bounds(math.ulp(0.0), most, f"a positive number of at most {_shown(most)}")


def up_to(most: float) -> Bounds:
    return Bounds(0.0, most, f"a number from 0 to {_shown(most)}")


def whole(least: int, most: int) -> Bounds:
    return Bounds(least, most, f"a whole number from {_shown(least)} to {_shown(most)}")


def at_least(least: int) -> Bounds:
    return Bounds(least, math.inf, f"at least {least}")


_BELOW_ONE = math.nextafter(1.0, 0.0)
SHARE = Bounds(0.0, _BELOW_ONE, "at least 0 and less than 1")
INSIDE = Bounds(math.ulp(0.0), _BELOW_ONE, "a number between 0 and 1")
IMAGE_SIZE = whole(1, 8192)
"""Pixels per side. Such a square has fewer pixels than the limit for image files in `data.decoding`."""
