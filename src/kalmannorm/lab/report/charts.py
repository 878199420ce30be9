"""What a figure shows, apart from how it is drawn: the page, the image files and the CSV are made from one description.

A figure holds one chart, or one for every choice that a reader can make (a way of inference, a layer). A chart is a row
of panels that share their axes.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
_FEW = 4


def rounded(value: float | None) -> float | int | None:
    """Five digits are more than a screen shows; what is no number is left out."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _word(name: str) -> str:
    """What a file name can hold of it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()[:60]).strip("-")


def _short(values: Sequence[float | None]) -> list[float | int | None]:
    return [rounded(value) for value in values]


@dataclass(frozen=True)
class Series:
    """A line with its spread; `std` and `n` run along x."""

    label: str
    colour: int
    x: Sequence[float]
    y: Sequence[float | None]
    std: Sequence[float | None] = ()
    n: Sequence[int] = ()
    steps: Sequence[int] = ()
    """The same places as x, counted in optimizer steps."""

    def to_json(self) -> Row:
        made: Row = {"label": self.label, "colour": self.colour, "x": _short(self.x), "y": _short(self.y)}
        if any(value is not None for value in self.std):
            made["std"] = _short(self.std)
        if self.n:
            made["n"] = self.n[0] if len(set(self.n)) == 1 else list(self.n)
        if self.steps:
            made["steps"] = list(self.steps)
        return made


@dataclass(frozen=True)
class Lines:
    title: str
    series: list[Series]

    def to_json(self) -> Row:
        return {"title": self.title, "series": [series.to_json() for series in self.series]}


@dataclass(frozen=True)
class Curves:
    panels: list[Lines]
    x: str
    y: str
    ticks: list[str] = field(default_factory=list)
    """Names of the places 0, 1, 2, … on the x axis, where it counts things."""
    log: bool = False
    bounds: tuple[float, float] | None = None
    """What y cannot leave: axes, whiskers and bands end there."""
    aside: bool = False
    """Points with whiskers, those of several series beside one another; else lines with bands."""
    settle: float = 0.0
    """A close-up leaves out this share of the x axis, at its beginning: early epochs flatten the rest."""
    kind = "curves"

    def to_json(self) -> Row:
        made: Row = {"kind": self.kind, "x": self.x, "y": self.y, "panels": [panel.to_json() for panel in self.panels]}
        if self.ticks:
            made["ticks"] = self.ticks
        return made | {"log": self.log, "bounds": self.bounds, "aside": self.aside, "settle": self.settle}

    def reach(self, y: float, std: float | None) -> tuple[float, float]:
        """Where a whisker or a band ends; a logarithmic axis cannot show what is below 0."""
        low, high = y - (std or 0.0), y + (std or 0.0)
        if self.log:
            low = max(low, y / 10)
        if self.bounds is not None:
            low, high = max(low, min(y, self.bounds[0])), min(high, max(y, self.bounds[1]))
        return low, high

    def rows(self) -> Iterator[Row]:
        for panel in self.panels:
            for series in panel.series:
                for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
                    row = {
                        "panel": panel.title,
                        "series": series.label,
                        self.x: self.ticks[int(x)] if self.ticks else x,
                    }
                    row |= {"step": series.steps[i]} if series.steps else {}
                    std = series.std[i] if series.std else None
                    yield row | {self.y: y, "std": std, "n": series.n[i] if series.n else None}


@dataclass(frozen=True)
class Map:
    """`values[row][column]`; `columns` are where the columns lie on the x axis."""

    title: str
    values: Sequence[Sequence[float | None]]
    columns: Sequence[float]
    rows: Sequence[str]

    def packed(self) -> str:
        """Thousandths as 16-bit integers, in a third of the space of digits; -32768 is no number."""
        flat = [
            max(-32767, min(32767, round(value * 1000))) if value is not None and math.isfinite(value) else -32768
            for row in self.values
            for value in row
        ]
        return base64.b64encode(struct.pack(f"<{len(flat)}h", *flat)).decode()


@dataclass(frozen=True)
class Heatmap:
    panels: list[Map]
    x: str
    y: str
    value: str
    low: float
    high: float
    diverging: bool
    note: str = ""
    kind = "heatmap"

    def to_json(self) -> Row:
        panels = [
            {"title": m.title, "columns": _short(m.columns), "rows": list(m.rows), "packed": m.packed()}
            for m in self.panels
        ]
        scale = {"low": self.low, "high": self.high, "diverging": self.diverging, "note": self.note}
        return {"kind": self.kind, "x": self.x, "y": self.y, "value": self.value, "panels": panels} | scale

    def rows(self) -> Iterator[Row]:
        for panel in self.panels:
            for name, values in zip(panel.rows, panel.values, strict=True):
                for column, value in zip(panel.columns, values, strict=True):
                    yield {"panel": panel.title, self.y: name, self.x: column, self.value: value}


@dataclass(frozen=True)
class Cloud:
    """Points, each of one channel."""

    title: str
    x_label: str
    y_label: str
    log: bool
    x: Sequence[float]
    y: Sequence[float]
    channels: Sequence[int]

    def to_json(self) -> Row:
        labels = {"title": self.title, "x_label": self.x_label, "y_label": self.y_label, "log": self.log}
        return labels | {"x": _short(self.x), "y": _short(self.y), "channels": list(self.channels)}


@dataclass(frozen=True)
class Scatter:
    panels: list[Cloud]
    colour: int
    note: str = ""
    kind = "scatter"

    def to_json(self) -> Row:
        panels = [panel.to_json() for panel in self.panels]
        return {"kind": self.kind, "colour": self.colour, "note": self.note, "panels": panels}

    def rows(self) -> Iterator[Row]:
        for panel in self.panels:
            for channel, x, y in zip(panel.channels, panel.x, panel.y, strict=True):
                yield {"panel": panel.title, "channel": channel, "x": x, "y": y}


@dataclass(frozen=True)
class Bar:
    label: str
    colour: int
    value: float
    std: float | None
    n: int
    text: str
    """The value as it is written beside the bar."""


@dataclass(frozen=True)
class BarGroup:
    title: str
    bars: list[Bar]


@dataclass(frozen=True)
class Bars:
    panels: list[BarGroup]
    value: str
    kind = "bars"

    def to_json(self) -> Row:
        panels = [
            {
                "title": group.title,
                "bars": [vars(bar) | {"value": rounded(bar.value), "std": rounded(bar.std)} for bar in group.bars],
            }
            for group in self.panels
        ]
        return {"kind": self.kind, "value": self.value, "panels": panels}

    def rows(self) -> Iterator[Row]:
        for group in self.panels:
            for bar in group.bars:
                yield {"panel": group.title, "series": bar.label, self.value: bar.value, "std": bar.std, "n": bar.n}


Chart = Curves | Heatmap | Scatter | Bars


@dataclass(frozen=True)
class Figure:
    """`choices` name what the reader chooses; every chart comes with the values it is the chart of."""

    slug: str
    title: str
    caption: str
    charts: list[tuple[tuple[str, ...], Chart]]
    choices: tuple[str, ...] = ()
    start: int = 0
    """The chart that is shown first."""

    @property
    def images(self) -> dict[str, tuple[tuple[str, ...], Chart]]:
        """The charts that become image files, by file name. Of layers, and of any choice with many values, only that
        of the chart that is shown first; the page and the CSV hold all."""
        if not self.choices:
            return {self.slug: self.charts[0]}
        shown = self.charts[self.start][0]
        counts = [len({values[i] for values, _ in self.charts}) for i in range(len(self.choices))]
        many = [i for i, name in enumerate(self.choices) if name == "Layer" or counts[i] > _FEW]
        few = [pair for pair in self.charts if all(pair[0][i] == shown[i] for i in many)]
        return {"-".join([self.slug, *filter(None, map(_word, values))]): (values, chart) for values, chart in few}

    @property
    def files(self) -> list[str | None]:
        """The image file of every chart, without its ending; None where it has none."""
        names = {values: name for name, (values, _) in self.images.items()}
        return [names.get(values) for values, _ in self.charts]

    def to_json(self) -> Row:
        charts = [
            {"for": list(values), "file": file, **chart.to_json()}
            for (values, chart), file in zip(self.charts, self.files, strict=True)
        ]
        return {"title": self.title, "choices": list(self.choices), "start": self.start, "charts": charts}

    def rows(self) -> Iterator[Row]:
        """Every number of the figure, for the CSV."""
        for values, chart in self.charts:
            chosen = {name.lower(): value for name, value in zip(self.choices, values, strict=True)}
            for row in chart.rows():
                yield chosen | row


def spaced(count: int, most: int) -> list[int]:
    """At most so many of the places 0 … count - 1, evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    if most < 2:
        return [0]
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
