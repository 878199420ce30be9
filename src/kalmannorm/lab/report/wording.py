"""Numbers as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from kalmannorm.lab.report.spread import Spread


def decimals(value: float) -> int:
    """As many as give about three digits that mean something."""
    size = abs(value)
    if size == 0 or size >= 1000:
        return 0
    return max(0, min(6, 2 - math.floor(math.log10(size)))) if size < 10 else 1


def number(value: float, places: int | None = None) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and places is None:
        return f"{value:,}".replace("-", "−")
    if not math.isfinite(value):
        return "–"
    if value and abs(value) < 1e-4 and places is None:
        return f"{value:.1e}".replace("-", "−")
    return f"{value:,.{decimals(value) if places is None else places}f}".replace("-", "−")


def plus_minus(value: Spread, places: int | None = None) -> str:
    """Mean and standard deviation, to the same place."""
    if places is None:
        places = decimals(value.mean)
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
    """No line ends within "97.9 ± 0.2 %" or "(64, 1)"."""
    return re.sub(r"(?<=\d) (?=[±%])|(?<=±) |(?<=,) (?=\d+\))", "\u00a0", words)


def counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def option(name: str, value: Any) -> str:
    """A recipe's field in words: "learning rate 0.1", "no augment"."""
    words = "q₀" if name == "gain" else name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if value is None:
        return f"{words} by default"
    return f"{words} {value:g}" if isinstance(value, (int, float)) else f"{words} {value}"
