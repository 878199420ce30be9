"""Charts as image files, drawn by matplotlib on white, in the light colours of the page.

Ranges, ticks, points and words come from `charts`, as on the page. Only sizes in inches are chosen here.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas

from kalmannorm.lab.report import palette
from kalmannorm.lab.report.axes import Axis
from kalmannorm.lab.report.charts import Bars, Chart, Curves, Heatmap, Scatter

_QUIET, _WHISKER = "#8a929c", "#535457"
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _QUIET,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
    "svg.hashsalt": "kalmannorm",
    "svg.fonttype": "none",
}
"""The look, for `matplotlib.rc_context` around `drawing`."""
_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}
_LETTER = 0.075


@dataclass(frozen=True)
class _Room:
    """The size of one panel and of the text around it, in inches. Estimated from the number of letters: measuring them
    with matplotlib takes longer than the drawing."""

    width: float
    height: float
    left: float
    below: float
    right: float = 0.0

    @classmethod
    def of(cls, chart: Chart) -> _Room:
        if isinstance(chart, Bars):
            bars = [bar for group in chart.panels for bar in group.bars]
            most = max(len(group.bars) for group in chart.panels)
            left, right = max(len(bar.label) for bar in bars), max(len(bar.text) for bar in bars)
            return cls(1.8, 0.26 * most, 0.3 + _LETTER * left, 0.35, 0.15 + _LETTER * right)
        if isinstance(chart, Heatmap):
            height = min(2.0, max(0.7, 0.16 * max(len(panel.rows) for panel in chart.panels)))
            return cls(2.2, height, 0.5 + _LETTER * max(_letters(chart.down(panel)) for panel in chart.panels), 0.55)
        if isinstance(chart, Curves) and chart.across[0].turned:
            return cls(2.7, 2.1, 0.75, 0.5 + _LETTER * _letters(chart.across[0]))
        return cls(2.7, 2.1, 0.75, 0.5)


def images(chart: Chart, title: str) -> dict[str, bytes]:
    """The chart as PNG and SVG."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a letter that the font does not have becomes a box
        canvas, _ = drawing(chart, title)
        # savefig would draw twice per format.
        png, svg = io.BytesIO(), io.BytesIO()
        FigureCanvasAgg(canvas).print_png(png)  # type: ignore[no-untyped-call]
        FigureCanvasSVG(canvas).print_svg(svg, metadata={"Date": None})  # type: ignore[no-untyped-call]
        return {"png": png.getvalue(), "svg": svg.getvalue()}


def drawing(chart: Chart, title: str) -> tuple[Canvas, list[Axes]]:
    """The whole picture, and the axes of its panels."""
    canvas, axes = _laid(chart)
    if isinstance(chart, Curves):
        _curves(canvas, axes, chart)
    elif isinstance(chart, Heatmap):
        _heatmap(canvas, axes, chart)
    elif isinstance(chart, Scatter):
        _scatter(axes, chart)
    else:
        _bars(axes, chart)
    for ax, name in zip(axes, [panel.title for panel in chart.panels], strict=True):
        ax.set_title(_plain(name))
    width, height = canvas.get_size_inches()
    canvas.text(0.15 / width, 1 - 0.1 / height, _plain(title), fontsize=11, va="top")
    return canvas, axes


def _laid(chart: Chart) -> tuple[Canvas, list[Axes]]:
    """Empty panels, line by line, under the title; with room for the legend below or the colour scale at the right."""
    room, above = _Room.of(chart), 0.3
    lines = -(-len(chart.panels) // (4 if isinstance(chart, Heatmap) else 3))
    columns = -(-len(chart.panels) // lines)
    foot, side = (0.35 if isinstance(chart, Curves) else 0.05), (0.95 if isinstance(chart, Heatmap) else 0.2)
    wide, tall = room.left + room.width + room.right, above + room.height + room.below
    width, height = max(columns * wide + side, 5.2), 0.35 + lines * tall + foot
    canvas = Canvas(figsize=(width, height), dpi=150)
    axes = []
    for i in range(len(chart.panels)):
        line, column = divmod(i, columns)
        x = (column * wide + room.left) / width
        y = (foot + (lines - line - 1) * tall + room.below) / height
        axes.append(canvas.add_axes((x, y, room.width / width, room.height / height)))
    return canvas, axes


def _letters(axis: Axis) -> int:
    """Of the longest words along it."""
    return max((len(words) for _, words in axis.ticks), default=0)


def _plain(words: str) -> str:
    """matplotlib takes a dollar sign for the start of a formula."""
    return words.replace("$", r"\$")


def _across(ax: Axes, axis: Axis) -> None:
    ax.set_xscale("log" if axis.log else "linear")
    ax.set_xticks([], minor=True)
    ax.set_xticks([x for x, _ in axis.ticks], [_plain(words) for _, words in axis.ticks])
    if axis.turned:
        ax.tick_params("x", labelrotation=90)
    ax.set(xlim=(axis.low, axis.high), xlabel=axis.label)


def _up(ax: Axes, axis: Axis, down: bool = False) -> None:
    ax.set_yscale("log" if axis.log else "linear")
    ax.set_yticks([], minor=True)
    ax.set_yticks([y for y, _ in axis.ticks], [_plain(words) for _, words in axis.ticks])
    ax.set(ylim=(axis.high, axis.low) if down else (axis.low, axis.high), ylabel=axis.label)


def _curves(canvas: Canvas, axes: list[Axes], chart: Curves) -> None:
    samples = {}
    for ax, panel in zip(axes, chart.panels, strict=True):
        _across(ax, chart.across[0])
        _up(ax, chart.up["whole"])
        ax.grid(visible=False, axis="x")
        for place, series in enumerate(panel.series):
            points, shift = chart.points(series), chart.shift(panel, place)
            x, low, high = [p.x + shift for p in points], [p.low for p in points], [p.high for p in points]
            colour, dash = palette.shade(series.colour), palette.dash(series.colour)
            style: Any = (0, [float(part) for part in dash.split()]) if dash else "-"
            marker = _MARKERS[palette.marker(series.colour)] if chart.marked(series) else None
            inside = palette.filled(series.colour)
            # The axes hold all of the line. Only half a marker at their edge lies outside, and is drawn.
            (samples[series.label],) = ax.plot(
                x,
                [p.y for p in points],
                color=colour,
                linestyle=style,
                linewidth=1.5,
                marker=marker,
                markersize=4,
                markerfacecolor=inside,
                markeredgecolor=colour,  # by itself it would be as transparent as the inside
                clip_on=False,
            )
            if chart.aside:
                ax.vlines(x, low, high, color=colour, linewidth=1)
            else:
                ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    canvas.legend([samples[label] for label in chart.legend], map(_plain, chart.legend), loc="lower center", ncols=6)


def _heatmap(canvas: Canvas, axes: list[Axes], chart: Heatmap) -> None:
    stops = (palette.DIVERGING if chart.diverging else palette.SEQUENTIAL)[0]
    shades, scale = LinearSegmentedColormap.from_list("report", list(stops)), chart.scale
    shown = None
    for ax, panel in zip(axes, chart.panels, strict=True):
        values = [[float("nan") if value is None else value for value in row] for row in panel.values]
        shown = ax.imshow(values, cmap=shades, vmin=scale.low, vmax=scale.high, aspect="auto", interpolation="nearest")
        _across(ax, chart.across(panel))
        _up(ax, chart.down(panel), down=True)
        ax.grid(False)
    if shown is not None:
        width = canvas.get_figwidth()
        place = axes[0].get_position()
        bar = canvas.add_axes((1 - 0.75 / width, place.y0, 0.12 / width, place.height))
        canvas.colorbar(shown, cax=bar, extend="both" if chart.diverging else "neither")
        _up(bar, scale)


def _scatter(axes: list[Axes], chart: Scatter) -> None:
    for ax, panel in zip(axes, chart.panels, strict=True):
        across, up = panel.ranges
        _across(ax, across)
        _up(ax, up)
        ax.plot([across.low, across.high], [up.low, up.high], color=_QUIET, linewidth=1)
        ax.scatter(panel.x, panel.y, s=14, color=palette.shade(chart.colour), alpha=0.65, linewidth=0)


def _bars(axes: list[Axes], chart: Bars) -> None:
    for ax, group in zip(axes, chart.panels, strict=True):
        places, values = range(len(group.bars)), [bar.value for bar in group.bars]
        colours = [bar.colour for bar in group.bars]
        inside, edges = [palette.filled(colour) for colour in colours], [palette.shade(colour) for colour in colours]
        ax.barh(places, values, color=inside, edgecolor=edges, height=0.6)
        for place, bar in enumerate(group.bars):
            low, high = bar.reach
            if bar.std:
                ax.hlines(place, low, high, color=_WHISKER, linewidth=1.5)
            ax.annotate(bar.text, (high, place), (5, 0), textcoords="offset points", va="center", annotation_clip=False)
        _across(ax, chart.across)
        ax.set_yticks(places, [_plain(bar.label) for bar in group.bars])
        ax.set_ylim(len(group.bars) - 0.5, -0.5)
        ax.spines["bottom"].set_visible(False)
        ax.grid(False)
