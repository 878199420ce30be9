"""Schemas of the records on disk. Values that do not fit are removed from the record and reported.

A file may have been edited, damaged, or written by another program. A shape is a function of a value, the value's place
in its record ("accuracy.population") and a list. It returns the value, the parts of it that fit, or None. It adds a
complaint to the list for everything else. So code that reads a fitted record never meets a wrong type, NaN, infinity, a
number whose square overflows, or a character that cannot be written to a file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shape = Callable[[Any, str, list[str]], Any]

LARGEST, SMALLEST = 1e60, 1e-60
"""Numbers in runs are float32, from 1e-45 to 1e39. Larger ones are refused, smaller ones become 0."""


def plain_text(words: str) -> str:
    """Escape control characters and lone surrogates: HTML, SVG and files cannot contain them."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", _escape, words)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _told(value: Any) -> str:
    return plain_text(reprlib.repr(value))


def _misfit(value: Any, place: str, wrong: list[str], wanted: str) -> Any:
    """Return None and add a complaint. null gets no complaint: NaN and missing measurements are written as null."""
    if value is not None:
        wrong.append(f"{place} is {_told(value)}, not {wanted}")
    return None


def text(value: Any, place: str, wrong: list[str]) -> Any:
    return plain_text(value) if isinstance(value, str) else _misfit(value, place, wrong, "a text")


def flag(value: Any, place: str, wrong: list[str]) -> Any:
    return value if isinstance(value, bool) else _misfit(value, place, wrong, "true or false")


def number(low: float = -LARGEST, high: float = LARGEST, *, whole: bool = False) -> Shape:
    wanted = "a whole number" if whole else "a number"
    if high < LARGEST:
        wanted += f" from {low:g} to {high:.4g}"
    elif low > -LARGEST:
        wanted += f" of at least {low:g}"

    def fit(value: Any, place: str, wrong: list[str]) -> Any:
        if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
            return _misfit(value, place, wrong, wanted)
        return value if abs(value) >= SMALLEST else 0

    return fit


def scalar(value: Any, place: str, wrong: list[str]) -> Any:
    """A string, a bool or a number."""
    if isinstance(value, (str, bool)):
        return text(value, place, wrong) if isinstance(value, str) else value
    return number()(value, place, wrong)


def choice(*words: str) -> Shape:
    def fit(value: Any, place: str, wrong: list[str]) -> Any:
        known = isinstance(value, str) and value in words
        return value if known else _misfit(value, place, wrong, " or ".join(words))

    return fit


def numbers(value: Any, place: str, wrong: list[str]) -> Any:
    """A list of numbers, in one pass, because lists are long. Other values in it become None."""
    if not isinstance(value, list):
        return _misfit(value, place, wrong, "a list of numbers")
    fitted = [
        (one if one >= SMALLEST or one <= -SMALLEST else 0)
        if type(one) in (int, float) and -LARGEST <= one <= LARGEST
        else None
        for one in value
    ]
    lost = [one for one, kept in zip(value, fitted, strict=True) if kept is None and one is not None]
    if lost:
        wrong.append(f"{place} holds {_told(lost[0])}, which is not a number")
    return fitted


def matrix(value: Any, place: str, wrong: list[str]) -> Any:
    """Rows of numbers, cut to the length of the shortest."""
    rows = several(numbers)(value, place, wrong)
    length = min(map(len, rows), default=0) if rows else 0
    if not length:
        return _misfit(value, place, wrong, "rows of numbers")
    return [row[:length] for row in rows]


def several(shape: Shape) -> Shape:
    """A list. Members that do not fit are removed."""

    def fit(value: Any, place: str, wrong: list[str]) -> Any:
        if not isinstance(value, list):
            return _misfit(value, place, wrong, "a list")
        fitted = [shape(one, f"{place}[{i}]", wrong) for i, one in enumerate(value)]
        return [one for one in fitted if one is not None]

    return fit


def each(shape: Shape) -> Shape:
    """An object with any keys. A null value stays, so that its key stays."""

    def fit(value: Any, place: str, wrong: list[str]) -> Any:
        if not isinstance(value, dict):
            return _misfit(value, place, wrong, "an object")
        return {plain_text(key): shape(one, _inside(place, plain_text(key)), wrong) for key, one in value.items()}

    return fit


def record(
    fields: Mapping[str, Shape],
    needed: Sequence[str] = (),
    check: Callable[[dict[str, Any]], str | None] | None = None,
) -> Shape:
    """An object with these fields. Other fields are dropped silently, because later versions may write more.

    The object does not fit if a `needed` field is missing, or if `check` returns a complaint.
    """

    def fit(value: Any, place: str, wrong: list[str]) -> Any:
        if not isinstance(value, dict):
            return _misfit(value, place, wrong, "an object")
        found = {
            name: shape(value[name], _inside(place, name), wrong) for name, shape in fields.items() if name in value
        }
        missing = [name for name in needed if found.get(name) is None]
        complaint = f"has no {missing[0]}" if missing else check(found) if check is not None else None
        if complaint is not None:
            wrong.append(f"{place} {complaint}".strip())
            return None
        return found

    return fit


def _inside(place: str, name: str) -> str:
    name = name if len(name) <= 40 else f"{name[:40]}…"
    return f"{place}.{name}" if place else name


_MEASURED = number()
_POSITIVE = number(0)
_COUNT = number(0, 1e15, whole=True)
_SHARE = number(0, 100.001)  # in %: float32 sums of 100 may round up
_GAINS = each(number(0, 1))
_PLACE: dict[str, Shape] = {"step": _COUNT, "epoch": number(0, 1e9)}

RESULT = record(
    {
        "accuracy": each(_SHARE),
        "loss": each(_MEASURED),
        "steps": _COUNT,
        "epochs": _POSITIVE,
        "seconds": _POSITIVE,
        "images_per_second": _POSITIVE,
        "parameters": _COUNT,
        "peak_memory": _COUNT,
        "gains": _GAINS,
        "diverged": flag,
        "test_images": number(1, 1e15, whole=True),
    }
)
CIRCUMSTANCES = record({"origin": each(scalar), "execution": each(scalar)})
"""The parts of recipe.json besides the recipe."""
EVENTS: dict[str, Shape] = {
    "train": record(
        {
            **_PLACE,
            "steps": _COUNT,
            "loss": _MEASURED,
            "accuracy": _SHARE,
            "learning_rate": _POSITIVE,
            "images_per_second": _POSITIVE,
            "seconds": _POSITIVE,
        },
        needed=tuple(_PLACE),
    ),
    "evaluate": record(
        {**_PLACE, "modes": each(record({"accuracy": _SHARE, "top5": _SHARE, "loss": _MEASURED}))},
        needed=tuple(_PLACE),
    ),
    "gains": record({**_PLACE, "gains": _GAINS}, needed=tuple(_PLACE)),
}


def _same_channels(layer: dict[str, Any]) -> str | None:
    """Every list of a layer must have one number per channel."""
    lengths = {len(values) for values in layer.values() if isinstance(values, list)}
    return "has lists of different lengths" if len(lengths) > 1 else None


_PER_CHANNEL = ("prior_mean", "prior_var", "observed_mean", "observed_var")
_LAYER = record({"name": text, "gain": number(0, 1), **dict.fromkeys(_PER_CHANNEL, numbers)}, ("name",), _same_channels)
_GAP = record({"name": text, "gap": matrix, "mean_abs": _POSITIVE}, needed=("name", "gap"))
ANALYSES: dict[str, Shape] = {
    "layers": record({"layers": several(_LAYER)}, needed=("layers",)),
    "variance-gap": record({"layers": several(_GAP)}, needed=("layers",)),
}

_OVER_SEEDS = record({"mean": _MEASURED, "std": _POSITIVE, "n": number(1, 1e6, whole=True)}, needed=("mean",))


def _cell(value: Any, place: str, wrong: list[str]) -> Any:
    """A table cell: a string, a number, or mean and standard deviation over seeds."""
    return (_OVER_SEEDS if isinstance(value, dict) else scalar)(value, place, wrong)


def _cells(value: Any, place: str, wrong: list[str]) -> Any:
    """A table row. A cell that does not fit stays, as an empty one."""
    if not isinstance(value, list):
        return _misfit(value, place, wrong, "a list of cells")
    return [_cell(one, f"{place}[{i}]", wrong) for i, one in enumerate(value)]


def _headings(value: Any, place: str, wrong: list[str]) -> Any:
    """Table headings. If one does not fit, all are refused: cells would be in the wrong columns."""
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        return _misfit(value, place, wrong, "a list of texts")
    return [plain_text(one) for one in value]


_TABLE = record(
    {"title": text, "note": text, "columns": _headings, "rows": several(_cells)}, needed=("columns", "rows")
)
_FIGURE = record(
    {
        "kind": text,
        "title": text,
        "mode": choice("population", "batch", "example"),
        "y": choice("accuracy", "loss"),
        "groups": several(record({"label": text, "runs": several(text)}, needed=("label", "runs"))),
        "runs": several(record({"label": text, "run": text}, needed=("label", "run"))),
    }
)
EXPERIMENT = record(
    {
        **dict.fromkeys(("name", "title", "question", "dataset"), text),
        "budget": _POSITIVE,
        "stand_in": flag,
        "warnings": several(text),
        "notes": several(text),
        "tables": several(_TABLE),
        "figures": several(_FIGURE),
    }
)
