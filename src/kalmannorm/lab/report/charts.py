"""The description of a figure, apart from the drawing: the page, the image files and the CSV are made from it.

A figure holds one chart, or one for every choice that a reader can make (a way of inference, a layer). A chart is a row
of panels. Axes, drawn points and words are computed here, once. `plotting` draws them with matplotlib, and `to_json`
hands the same numbers and words to the script of the page.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from kalmannorm.lab.report import axes
from kalmannorm.lab.report.axes import Axis
from kalmannorm.lab.words.spread import Spread
from kalmannorm.lab.words.wording import number, plus_minus

Row = dict[str, Any]
_FEW = 4
_MOST_MARKERS = 40
_KEYS = "Arrow keys read the values."


def rounded(value: float | None) -> float | int | None:
    """Five digits, which are more than a screen shows; None for NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _word(name: str) -> str:
    """The name with only those letters that a file name can have."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()[:60]).strip("-")


def _short(values: Sequence[float | None]) -> list[float | int | None]:
    return [rounded(value) for value in values]


class Point(NamedTuple):
    """A drawn point of a series: the whisker or the band goes from `low` to `high`."""

    x: float
    step: int
    y: float
    std: float | None
    low: float
    high: float

    @property
    def text(self) -> str:
        """Mean and standard deviation in words."""
        return plus_minus(Spread(self.y, self.std, 0))


@dataclass(frozen=True)
class Series:
    """A line with its spread; `std` and `n` have one value per x."""

    label: str
    colour: int
    x: Sequence[float]
    y: Sequence[float | None]
    std: Sequence[float | None] = ()
    n: Sequence[int] = ()
    steps: Sequence[int] = ()
    """The same places as x, in optimizer steps."""


@dataclass(frozen=True)
class Lines:
    title: str
    series: list[Series]


@dataclass(frozen=True)
class Curves:
    panels: list[Lines]
    x: str
    y: str
    names: list[str] = field(default_factory=list)
    """Names of the places 0, 1, 2, … on the x axis. Empty where the x axis has numbers."""
    log: bool = False
    bounds: tuple[float, float] | None = None
    """The least and the largest possible y. Whiskers and bands end there."""
    aside: bool = False
    """Points with whiskers, those of several series side by side; else lines with bands."""
    settle: float = 0.0
    """A close-up ignores outliers, and this share of the x axis at its beginning: early epochs flatten the rest."""
    kind = "curves"

    def points(self, series: Series) -> list[Point]:
        """Without values that are missing, or that a logarithmic axis cannot show."""
        found = []
        for i, y in enumerate(series.y):
            if y is not None and math.isfinite(y) and (y > 0 or not self.log):
                std, step = series.std[i] if series.std else None, series.steps[i] if series.steps else 0
                found.append(Point(series.x[i], step, y, std, *self._reach(y, std)))
        return found

    def _reach(self, y: float, std: float | None) -> tuple[float, float]:
        """The ends of a whisker or a band; a logarithmic axis cannot show an end below 0."""
        low, high = y - (std or 0.0), y + (std or 0.0)
        if self.log:
            low = max(low, y / 10)
        if self.bounds is not None:
            low, high = max(low, min(y, self.bounds[0])), min(high, max(y, self.bounds[1]))
        return low, high

    @cached_property
    def _series(self) -> list[Series]:
        return [series for panel in self.panels for series in panel.series]

    @cached_property
    def across(self) -> list[Axis]:
        """The x axis. A chart of training has a second one, which counts steps."""
        if self.names:
            return [axes.of_names(self.x, self.names)]
        made = [axes.from_zero(self.x, [x for series in self._series for x in series.x])]
        if self._series and all(series.steps for series in self._series):
            made.append(axes.from_zero("step", [step for series in self._series for step in series.steps]))
        return made

    @cached_property
    def up(self) -> dict[str, Axis]:
        """The y axis, which all panels share: with everything that is drawn, and where it helps a close-up."""
        whole = axes.around(self.y, self._heights(0.0), self.log)
        typical = axes.without_outliers(self._heights(self.settle), self.log)
        close = axes.around(self.y, typical, self.log)
        helps = self.settle > 0 or close.length < whole.length / 2
        return {"whole": whole} | ({"close-up": close} if helps else {})

    def _heights(self, share: float) -> list[float]:
        found: list[float] = []
        for series in self._series:
            points = self.points(series)
            start = points[0].x + share * (points[-1].x - points[0].x) if points else 0.0
            found += [end for point in points if point.x >= start for end in (point.low, point.high)]
        return found

    def shift(self, panel: Lines, place: int) -> float:
        """How far to the right of its x a series is drawn."""
        count = len(panel.series)
        return (place - (count - 1) / 2) * min(0.06, 0.5 / count) if self.aside else 0.0

    def marked(self, series: Series) -> bool:
        return 0 < len(self.names) <= _MOST_MARKERS or len(self.points(series)) == 1

    @property
    def legend(self) -> dict[str, int]:
        """The look of every label."""
        return {series.label: series.colour for series in self._series}

    @property
    def _marked_labels(self) -> set[str]:
        return {series.label for series in self._series if self.marked(series)}

    def to_json(self) -> Row:
        places = [sorted({float(x) for series in self._series for x in series.x})]
        if len(self.across) > 1:
            places.append(sorted({float(step) for series in self._series for step in series.steps}))
        return {
            "kind": self.kind,
            "across": [self._across(axis, at) for axis, at in zip(self.across, places, strict=True)],
            "up": [{"name": name} | axis.to_json() for name, axis in self.up.items()],
            "whiskers": self.aside,
            "legend": [[label, colour, label in self._marked_labels] for label, colour in self.legend.items()],
            "panels": [
                {
                    "title": panel.title,
                    "spoken": f"{panel.title} {self.y}, lines over {self.x}. {_KEYS}",
                    "series": [
                        self._line(series, self.shift(panel, i), places) for i, series in enumerate(panel.series)
                    ],
                }
                for panel in self.panels
            ],
        }

    def _across(self, axis: Axis, places: list[float]) -> Row:
        """The axis, and the places at which a reader can read values."""
        names = [self.names[int(x)] if self.names else f"{axis.label} {axes.place_words(x)}" for x in places]
        return axis.to_json() | {"places": _short(places), "names": names}

    def _line(self, series: Series, shift: float, places: list[list[float]]) -> Row:
        points = self.points(series)
        ranks = [{value: i for i, value in enumerate(values)} for values in places]
        own = [[float(point.x) for point in points], [float(point.step) for point in points]]
        made: Row = {"label": series.label, "colour": series.colour, "marked": self.marked(series)}
        made |= {"at": [[rank[x] for x in values] for rank, values in zip(ranks, own, strict=False)]}
        made |= {"y": _short([point.y for point in points]), "text": [point.text for point in points]}
        if shift:
            made["shift"] = rounded(shift)
        if any(point.low < point.high for point in points):
            made |= {"low": _short([p.low for p in points]), "high": _short([p.high for p in points])}
        return made

    def rows(self) -> Iterator[Row]:
        for panel in self.panels:
            for series in panel.series:
                for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
                    row = {
                        "panel": panel.title,
                        "series": series.label,
                        self.x: self.names[int(x)] if self.names else x,
                    }
                    row |= {"step": series.steps[i]} if series.steps else {}
                    std = series.std[i] if series.std else None
                    yield row | {self.y: y, "std": std, "n": series.n[i] if series.n else None}


@dataclass(frozen=True)
class Map:
    """`values[row][column]`; `columns` are the places of the columns on the x axis."""

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

    @cached_property
    def scale(self) -> Axis:
        """The colours, from the lowest to the highest value. A diverging scale is cut at both ends."""
        return axes.of_colours(self.value, self.low, self.high, cut=self.diverging)

    def across(self, panel: Map) -> Axis:
        return axes.of_columns(self.x, panel.columns)

    def down(self, panel: Map) -> Axis:
        return axes.of_rows(self.y, panel.rows)

    def to_json(self) -> Row:
        panels = [
            {
                "title": panel.title,
                "spoken": f"{panel.title} {self.value}, {self.y} by {self.x}. {_KEYS}",
                "across": self.across(panel).to_json(),
                "down": self.down(panel).to_json(),
                "columns": [axes.place_words(value) for value in panel.columns],
                "rows": list(panel.rows),
                "packed": panel.packed(),
            }
            for panel in self.panels
        ]
        scale = {"scale": self.scale.to_json(), "colours": "diverging" if self.diverging else "sequential"}
        return {"kind": self.kind, "note": self.note, "panels": panels} | scale

    def rows(self) -> Iterator[Row]:
        for panel in self.panels:
            for name, values in zip(panel.rows, panel.values, strict=True):
                for column, value in zip(panel.columns, values, strict=True):
                    yield {"panel": panel.title, self.y: name, self.x: column, self.value: value}


@dataclass(frozen=True)
class Cloud:
    """Points, one per channel."""

    title: str
    x_label: str
    y_label: str
    log: bool
    x: Sequence[float]
    y: Sequence[float]
    channels: Sequence[int]

    @cached_property
    def ranges(self) -> tuple[Axis, Axis]:
        """The x and the y axis, with one range: on the diagonal both are equal."""
        values = [*self.x, *self.y]
        return axes.around(self.x_label, values, self.log), axes.around(self.y_label, values, self.log)

    def to_json(self) -> Row:
        """The points from left to right, in which order the arrow keys read them."""
        across, up = self.ranges
        points = sorted(zip(self.x, self.y, self.channels, strict=True))
        return {
            "title": self.title,
            "spoken": f"{up.label} over {across.label}, {len(points)} channels. {_KEYS}",
            "across": across.to_json(),
            "up": up.label,  # the rest is as in the x axis
            "x": _short([x for x, _, _ in points]),
            "y": _short([y for _, y, _ in points]),
            "point": "channel",
            "channels": [channel for _, _, channel in points],
            "text": [[number(float(x)), number(float(y))] for x, y, _ in points],
        }


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

    @property
    def reach(self) -> tuple[float, float]:
        """The ends of the whisker."""
        return max(0.0, self.value - (self.std or 0.0)), self.value + (self.std or 0.0)


@dataclass(frozen=True)
class BarGroup:
    title: str
    bars: list[Bar]


@dataclass(frozen=True)
class Bars:
    panels: list[BarGroup]
    value: str
    kind = "bars"

    @cached_property
    def across(self) -> Axis:
        """From 0 to the end of the longest bar and its whisker. It has no ticks: each bar has its value beside it."""
        ends = [bar.reach[1] for group in self.panels for bar in group.bars]
        return Axis(self.value, 0.0, max(ends, default=0.0) or 1.0)

    def to_json(self) -> Row:
        panels = [
            {
                "title": group.title,
                "spoken": f"{group.title} {self.value}, bars. {_KEYS}",
                "bars": [self._bar(bar, group) for bar in group.bars],
            }
            for group in self.panels
        ]
        return {"kind": self.kind, "across": self.across.to_json(), "panels": panels}

    def _bar(self, bar: Bar, group: BarGroup) -> Row:
        made: Row = {"label": bar.label, "colour": bar.colour, "value": rounded(bar.value), "text": bar.text}
        made |= {"reach": _short(bar.reach), "title": f"{bar.label} · {group.title}"}
        return made | {"read": list(self._read(bar, group).items())}

    def _read(self, bar: Bar, group: BarGroup) -> dict[str, str]:
        """The lines of the tooltip, with the value first."""
        told = {self.value: plus_minus(Spread(bar.value, bar.std, bar.n))}
        against = next((other.value for other in group.bars if other.label == "BN" and other is not bar), None)
        return told | ({"ratio to BN": number(bar.value / against, 2)} if against else {}) | {"seeds": str(bar.n)}

    def rows(self) -> Iterator[Row]:
        for group in self.panels:
            for bar in group.bars:
                yield {"panel": group.title, "series": bar.label, self.value: bar.value, "std": bar.std, "n": bar.n}


Chart = Curves | Heatmap | Scatter | Bars


@dataclass(frozen=True)
class Figure:
    """`choices` name the choices of the reader; every chart comes with the values that select it."""

    slug: str
    title: str
    caption: str
    charts: list[tuple[tuple[str, ...], Chart]]
    choices: tuple[str, ...] = ()
    start: int = 0
    """The chart that is shown first."""

    @property
    def images(self) -> dict[str, tuple[tuple[str, ...], Chart]]:
        """The charts that become image files, by file name. For layers, and for any choice with many values, only the
        value that is shown first has an image; the page and the CSV hold all."""
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
        return {"choices": list(self.choices), "start": self.start, "charts": charts}

    def rows(self) -> Iterator[Row]:
        """Every number of the figure, for the CSV."""
        for values, chart in self.charts:
            chosen = {name.lower(): value for name, value in zip(self.choices, values, strict=True)}
            for row in chart.rows():
                yield chosen | row


def spaced(count: int, most: int) -> list[int]:
    """At most `most` of the places 0 … count - 1, evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    if most < 2:
        return [0]
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
