"""Axes: the range of the numbers and the marks along it, computed once for the page and for the image files.

The image files set these limits and ticks on the axes of matplotlib. The page gets them as data, and its script only
turns numbers into pixels. Both drawings of a chart therefore have the same ranges, ticks and words.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kalmannorm.lab.words.wording import number

Tick = tuple[float, str]
"""A place on an axis and the words beside it."""

_TICKS = 7
"""Numbers along an axis, at most."""
_NAMES = 12
"""Names along an axis, at most. Twelve lines of text have room on a phone."""
_LINE = 34
"""Letters that have room side by side along the narrowest axis, on a phone. Longer rows of names are turned."""
_LONGEST = 20
_EDGE = 0.05
"""Room around the data, as a share of their range."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, linear or logarithmic."""

    label: str
    low: float
    high: float
    ticks: tuple[Tick, ...] = ()
    log: bool = False
    turned: bool = False
    """The names along the axis have no room side by side, and are drawn at an angle."""

    @property
    def length(self) -> float:
        return math.log(self.high / self.low) if self.log else self.high - self.low

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"label": self.label, "low": self.low, "high": self.high, "ticks": self.ticks}
        return made | ({"log": True} if self.log else {}) | ({"turned": True} if self.turned else {})


def around(label: str, values: Sequence[float], log: bool = False) -> Axis:
    """An axis with all of these values and a little room on both sides; a logarithmic one leaves out values up to 0."""
    known = [value for value in values if value > 0] if log else values
    low, high = (min(known), max(known)) if known else (0.1, 1.0)
    if log:
        factor = max((high / low) ** _EDGE, 1.02)
        low, high = low / factor, high * factor
        return Axis(label, low, high, decades(low, high), log=True)
    edge = _EDGE * (high - low) or max(0.5, 1e-9 * abs(high))
    return Axis(label, low - edge, high + edge, steps(low - edge, high + edge))


def without_outliers(values: Sequence[float], log: bool = False) -> list[float]:
    """The values that lie at most 1.5 interquartile ranges from the quartiles (the rule of Tukey's box plots)."""
    known = [value for value in values if value > 0] if log else list(values)
    if len(known) < 2:
        return known
    turned = [math.log(value) for value in known] if log else known
    first, _, third = statistics.quantiles(turned, n=4, method="inclusive")
    reach = 1.5 * (third - first)
    return [value for value, place in zip(known, turned, strict=True) if first - reach <= place <= third + reach]


def from_zero(label: str, values: Sequence[float], room: float = 0.02) -> Axis:
    """An axis from 0 to the largest value, with this share of room after it."""
    last = max(values, default=0.0) or 1.0
    return Axis(label, 0.0, (1 + room) * last, steps(0.0, last))


def of_names(label: str, names: Sequence[str]) -> Axis:
    """An axis with names at 0, 1, 2, …"""
    ticks = _every(names)
    turned = len(ticks) * max((len(words) for _, words in ticks), default=0) > _LINE
    return Axis(label, -0.35, len(names) - 0.65, ticks, turned=turned)


def of_rows(label: str, names: Sequence[str]) -> Axis:
    """The rows of a map, which are 1 high, with the middles at 0, 1, 2, …"""
    return Axis(label, -0.5, len(names) - 0.5, _every(names))


def of_columns(label: str, values: Sequence[float]) -> Axis:
    """The columns of a map, each with its value. The ticks of many columns are round values between them."""
    if len(values) < _TICKS:
        ticks = tuple((float(i), place_words(value)) for i, value in enumerate(values))
    else:
        ticks = tuple((_between(values, value), words) for value, words in steps(values[0], values[-1]))
    return Axis(label, -0.5, len(values) - 0.5, ticks)


def of_colours(label: str, low: float, high: float, cut: bool) -> Axis:
    """A colour scale with its ends and its middle; `cut` says that values lie beyond the ends."""
    middle = (low + high) / 2
    places = next((n for n in range(1, 6) if all(abs(round(v, n) - v) < 1e-9 for v in (low, middle, high))), 6)
    left, right = ("≤ ", "≥ +") if cut else ("", "")
    words = (left + number(low, places), number(middle, places), right + number(high, places))
    return Axis(label, low, high, tuple(zip((low, middle, high), words, strict=True)))


def place_words(value: float) -> str:
    """A place on an axis that counts epochs, steps or batches."""
    return number(float(value), 0 if value == int(value) else 2)


def steps(low: float, high: float) -> tuple[Tick, ...]:
    """Multiples of 1, 2 or 5 times a power of ten; as many as have room side by side."""
    if not high > low:
        return ((low, f"{low:g}".replace("-", "−")),)
    found: tuple[Tick, ...] = ()
    for count in range(10, 1, -1):
        found = _multiples(low, high, (high - low) / count)
        if len(found) <= _TICKS and (len(found) - 1) * (1 + max(len(words) for _, words in found)) <= _LINE:
            break
    return found


def _multiples(low: float, high: float, least: float) -> tuple[Tick, ...]:
    """Of the smallest round number that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [float(f"{i * step:.12g}") for i in range(first, min(last, first + 10) + 1)]
    most = max(abs(low), abs(high))
    if most >= 1e7 or step < 1e-6:
        digits = min(15, 1 + math.ceil(math.log10(most / step)))
        return tuple((value, f"{value:.{digits}g}".replace("-", "−")) for value in values)
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return tuple((value, number(value, places)) for value in values)


def decades(low: float, high: float) -> tuple[Tick, ...]:
    """Powers of ten, and where these are few, numbers between them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[Tick] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        marks = [(float(f"{factor}e{power}"), factor, power) for power in powers for factor in factors]
        found = [(value, _power_words(factor, power)) for value, factor, power in marks if low <= value <= high]
        if len(found) < _TICKS:
            break
    found = found[:: -(-len(found) // (_TICKS - 1)) or 1]
    return tuple(found) if len(found) > 1 else steps(low, high)


def _power_words(factor: int, power: int) -> str:
    return f"{float(f'{factor}e{power}'):g}" if abs(power) <= 4 else f"{factor}e{power}".replace("-", "−")


def _every(names: Sequence[str]) -> tuple[Tick, ...]:
    """As many of the names as have room, evenly spaced. Of a long name the end is kept, which tells layers apart."""
    stride = -(-len(names) // _NAMES) or 1
    short = [name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}" for name in names]
    return tuple((float(i), short[i]) for i in range(0, len(names), stride))


def _between(values: Sequence[float], wanted: float) -> float:
    """The place of a value among columns with increasing values."""
    after = min(max(1, bisect_left(values, wanted)), len(values) - 1)
    low, high = values[after - 1], values[after]
    share = (wanted - low) / ((high - low) or 1.0)
    return after - 1 + min(max(share, 0.0), 1.0)
