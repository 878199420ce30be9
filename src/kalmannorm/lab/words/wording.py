"""How numbers are written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from kalmannorm.lab.words.spread import Spread

MISSING = "–"


def decimals(value: float) -> int:
    """Decimals for about three significant digits."""
    size = abs(value)
    if size == 0 or size >= 1000:
        return 0
    return max(0, min(6, 2 - math.floor(math.log10(size)))) if size < 10 else 1


def number(value: float, places: int | None = None) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and places is None:
        return f"{value:,}".replace("-", "−")
    if not math.isfinite(value):
        return MISSING
    if value and abs(value) < 1e-4 and places is None:
        return f"{value:.1e}".replace("-", "−")
    return f"{value:,.{decimals(value) if places is None else places}f}".replace("-", "−")


def places_of(value: Spread) -> int:
    """Decimals that show the first digit of the spread, at least one. None for thousands.

    If the spread is unknown or zero, two significant digits.
    """
    if abs(value.mean) >= 1000:
        return 0
    if value.std:
        return next((places for places in range(1, 6) if round(value.std, places)), 6)
    size = abs(value.mean)
    return 1 if size >= 1 or not size else min(6, 1 - math.floor(math.log10(size)))


def plus_minus(value: Spread, places: int | None = None) -> str:
    """Mean and standard deviation, with the same decimals."""
    if places is None:
        places = places_of(value)
    tail = "" if value.std is None else f" ± {number(value.std, places)}"
    return number(value.mean, places) + tail


def accuracy(value: Spread) -> str:
    return plus_minus(value, 1)


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))


def unbroken(words: str) -> str:
    """Prevent line breaks within "97.9 ± 0.2 %", "(64, 1)" or "(64, –)"."""
    return re.sub(r"(?<=\d) (?=[±%])|(?<=±) |(?<=,) (?=(?:\d+|–)\))", "\u00a0", words)


def counted(count: float, one: str) -> str:
    """ "1 run", "2 runs", "0.5 epochs"."""
    return f"{count if isinstance(count, int) else f'{count:g}'} {one if count == 1 else one + 's'}"


def option(name: str, value: Any) -> str:
    """A recipe's field in words: "learning rate 0.1", "15 epochs", "no augment"."""
    if name == "epochs":
        return counted(value, "epoch")
    words = "q₀" if name == "gain" else name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if value is None:
        return "no closing phase" if name == "closing_start" else f"{words} by default"
    return f"{words} {value:g}" if isinstance(value, (int, float)) else f"{words} {value}"
