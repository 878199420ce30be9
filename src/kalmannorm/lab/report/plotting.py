"""The same charts as image files, by matplotlib; always on white, in the page's light colours."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas

from kalmannorm.lab.report import palette
from kalmannorm.lab.report.charts import Bars, Chart, Curves, Heatmap, Scatter

_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a929c",
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
    "svg.hashsalt": "kalmannorm",
    "svg.fonttype": "none",
}
_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}
_MOST_LABELS = 14
_LETTER = 0.075
_EDGE = 0.05
"""Room around what is drawn, as a share of its height."""
_LONGEST = 48
"""Letters of a layer's name; of longer ones the end is shown, which tells layers apart."""


@dataclass(frozen=True)
class _Room:
    """Of one panel, in inches. Reckoned, not measured: matplotlib's own layout takes longer than the drawing."""

    width: float
    height: float
    left: float
    below: float

    @classmethod
    def of(cls, chart: Chart) -> _Room:
        if isinstance(chart, Bars):
            bars = [bar for group in chart.panels for bar in group.bars]
            most = max(len(group.bars) for group in chart.panels)
            return cls(2.4, 0.26 * most, 0.3 + _LETTER * max(len(bar.label) for bar in bars), 0.35)
        if isinstance(chart, Heatmap):
            rows = max((panel.rows for panel in chart.panels), key=len)
            height = min(2.0, max(0.7, 0.16 * len(rows)))
            return cls(2.2, height, 0.5 + _LETTER * min(max(map(len, rows)), _LONGEST), 0.55)
        names = chart.ticks if isinstance(chart, Curves) and _long(chart.ticks) else [""]
        return cls(2.7, 2.1, 0.75, 0.5 + _LETTER * min(max(map(len, names)), _LONGEST))


def images(chart: Chart, title: str) -> dict[str, bytes]:
    """As PNG and SVG."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for a letter that the font does not have
        canvas, axes = _laid(chart)
        if isinstance(chart, Curves):
            _curves(canvas, axes, chart)
        elif isinstance(chart, Heatmap):
            _heatmap(canvas, axes, chart)
        elif isinstance(chart, Scatter):
            _scatter(axes, chart)
        else:
            _bars(axes, chart)
        canvas.text(
            0.15 / canvas.get_figwidth(), 1 - 0.1 / canvas.get_figheight(), _plain(title), fontsize=11, va="top"
        )
        # Not savefig, which draws twice per format.
        png, svg = io.BytesIO(), io.BytesIO()
        FigureCanvasAgg(canvas).print_png(png)  # type: ignore[no-untyped-call]
        FigureCanvasSVG(canvas).print_svg(svg, metadata={"Date": None})  # type: ignore[no-untyped-call]
        return {"png": png.getvalue(), "svg": svg.getvalue()}


def _laid(chart: Chart) -> tuple[Canvas, list[Axes]]:
    """An axis per panel, line by line, under the title; a margin for the legend below or the scale at the right."""
    room, above = _Room.of(chart), 0.3
    lines = -(-len(chart.panels) // (4 if isinstance(chart, Heatmap) else 3))
    columns = -(-len(chart.panels) // lines)
    foot, side = (0.35 if isinstance(chart, Curves) else 0.05), (0.95 if isinstance(chart, Heatmap) else 0.2)
    wide, tall = room.left + room.width, above + room.height + room.below
    width, height = max(columns * wide + side, 5.2), 0.35 + lines * tall + foot
    canvas = Canvas(figsize=(width, height), dpi=150)
    axes = []
    for i in range(len(chart.panels)):
        line, column = divmod(i, columns)
        x = (column * wide + room.left) / width
        y = (foot + (lines - line - 1) * tall + room.below) / height
        axes.append(canvas.add_axes((x, y, room.width / width, room.height / height)))
    return canvas, axes


def _long(names: Sequence[str]) -> bool:
    return max(map(len, names), default=0) > 8


def _plain(words: str) -> str:
    """A dollar sign would start a formula."""
    return words.replace("$", r"\$")


def _layer(name: str) -> str:
    """As much as has room beside an axis."""
    return _plain(name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}")


def _curves(canvas: Canvas, axes: list[Axes], chart: Curves) -> None:
    handles = {}
    for ax, panel in zip(axes, chart.panels, strict=False):
        for series in panel.series:
            colour, dash = palette.shade(series.colour), palette.dash(series.colour)
            style: Any = (0, [float(part) for part in dash.split()]) if dash else "-"
            marked = bool(chart.ticks) or len(series.x) == 1
            marker = _MARKERS[palette.marker(series.colour)] if marked else None
            inside = palette.filled(series.colour)
            y = [float("nan") if value is None else value for value in series.y]
            (line,) = ax.plot(series.x, y, color=colour, linestyle=style, linewidth=1.5, marker=marker, markersize=4)
            line.set_markerfacecolor(inside)
            line.set_clip_on(False)  # the axes hold all of it, but for half a marker at their edge
            handles[_plain(series.label)] = line
            if series.std:
                reach = [chart.reach(m, s) for m, s in zip(y, series.std, strict=True)]
                low, high = [low for low, _ in reach], [high for _, high in reach]
                if chart.aside:
                    ax.vlines(series.x, low, high, color=colour, linewidth=1)
                else:
                    ax.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.set(title=_plain(panel.title), xlabel=chart.x)
        if chart.log:
            ax.set_yscale("log")
        if chart.ticks:
            every = -(-len(chart.ticks) // _MOST_LABELS)
            names = [_layer(name) for name in chart.ticks[::every]]
            ax.set_xticks(range(0, len(chart.ticks), every), names, rotation=90 if _long(names) else 0)
            ax.set_xlim(-0.35, len(chart.ticks) - 0.65)
        else:
            ax.set_xlim(0, x_end(chart))
        ax.set_ylabel(chart.y)
        ax.set_ylim(y_range(chart))
    canvas.legend(handles.values(), handles.keys(), loc="lower center", ncols=6)


def x_end(chart: Curves) -> float:
    """Training starts at 0, and the axis ends a little after it; the page does the same."""
    last = max((x for panel in chart.panels for series in panel.series for x in series.x), default=0.0)
    return 1.02 * last or 1.0


def y_range(chart: Curves) -> tuple[float, float]:
    """All that is drawn, whiskers and bands too; the page does the same."""
    known: list[float] = []
    for panel in chart.panels:
        for series in panel.series:
            for i, y in enumerate(series.y):
                if y is not None:
                    known += chart.reach(y, series.std[i] if series.std else None)
    known = [value for value in known if value > 0] if chart.log else known
    low, high = (min(known), max(known)) if known else (0.1, 1.0)
    if chart.log:
        factor = max((high / low) ** _EDGE, 1.02)
        return low / factor, high * factor
    edge = _EDGE * (high - low) or 0.5
    return low - edge, high + edge


def _heatmap(canvas: Canvas, axes: list[Axes], chart: Heatmap) -> None:
    stops = (palette.DIVERGING if chart.diverging else palette.SEQUENTIAL)[0]
    shades = LinearSegmentedColormap.from_list("report", list(stops))
    shown = None
    for ax, panel in zip(axes, chart.panels, strict=False):
        values = [[float("nan") if value is None else value for value in row] for row in panel.values]
        shown = ax.imshow(values, cmap=shades, vmin=chart.low, vmax=chart.high, aspect="auto", interpolation="nearest")
        ax.set(title=_plain(panel.title), xlabel=chart.x, ylabel=chart.y)
        ax.grid(False)
        places = range(0, len(panel.columns), max(1, len(panel.columns) // 5))
        ax.set_xticks(list(places), [f"{panel.columns[i]:g}" for i in places])
        places = range(0, len(panel.rows), -(-len(panel.rows) // _MOST_LABELS))
        ax.set_yticks(list(places), [_layer(panel.rows[i]) for i in places])
    if shown is not None:
        width = canvas.get_figwidth()
        place = axes[0].get_position()
        bar = canvas.add_axes((1 - 0.75 / width, place.y0, 0.12 / width, place.height))
        canvas.colorbar(shown, cax=bar, label=chart.value, extend="both" if chart.diverging else "neither")


def _scatter(axes: list[Axes], chart: Scatter) -> None:
    for ax, panel in zip(axes, chart.panels, strict=False):
        ax.scatter(panel.x, panel.y, s=14, color=palette.shade(chart.colour), alpha=0.65, linewidth=0)
        both = [*panel.x, *panel.y]
        ax.plot([min(both), max(both)], [min(both), max(both)], color="#8a929c", linewidth=1)
        ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.log:
            ax.set(xscale="log", yscale="log")


def _bars(axes: list[Axes], chart: Bars) -> None:
    top = max(bar.value + (bar.std or 0) for group in chart.panels for bar in group.bars)
    for ax, group in zip(axes, chart.panels, strict=False):
        names = [_plain(bar.label) for bar in group.bars]
        drawn = ax.barh(
            names,
            [bar.value for bar in group.bars],
            color=[palette.filled(bar.colour) for bar in group.bars],
            edgecolor=[palette.shade(bar.colour) for bar in group.bars],
            height=0.6,
        )
        ax.errorbar(
            [bar.value for bar in group.bars],
            names,
            xerr=[bar.std or 0 for bar in group.bars],
            fmt="none",
            ecolor="#535457",
        )
        ax.bar_label(drawn, [bar.text for bar in group.bars], padding=6)
        ax.set(title=_plain(group.title), xlabel=chart.value, xticks=[])
        ax.set_xlim(0, (top or 1) * 1.35)
        ax.spines["bottom"].set_visible(False)
        ax.invert_yaxis()
        ax.grid(False)
