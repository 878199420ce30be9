"""Ratios as bars: a panel for each value of one column, and in it a group of bars for each value of another."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from kalmannorm.lab.files.records import Record
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.report import palette

STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
TOP = 3.0
"""Longer bars are cut and labelled with their length. A bar ten times as long would flatten the rest."""
KNOWN = {"BatchNorm": "bn", "nn.BatchNorm": "bn", "GroupNorm": "gn", "BKN": "bkn"} | {name: name for name in METHODS}
"""The method of the report for each contender, by the first word of its name. It determines the colour."""


def draw(rows: Sequence[Record], title: str, *, panel: str, place: str, line: Sequence[str]) -> dict[str, bytes]:
    """The chart as PNG and SVG. The columns of `line` name a series; the first one is the contender."""
    series = {_name(row, line): KNOWN.get(str(row[line[0]]).replace(",", "").split()[0], "") for row in rows}
    colours = dict(zip(series, palette.colours(list(series.values())), strict=True))
    places = list(dict.fromkeys(str(row[place]) for row in rows))
    panels = list(dict.fromkeys(row[panel] for row in rows))
    with matplotlib.rc_context(STYLE):
        wide = max(3.5, 0.16 * len(places) * len(series) + 1)
        figure = Figure(figsize=(len(panels) * wide + 1.8, 3.6), dpi=150, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, value in zip(axes, panels, strict=True):
            own = [row for row in rows if row[panel] == value]
            _bars(ax, own, places, colours, place, line)
            ax.set_title(str(value))
        axes[0].set_ylabel("time / baseline")
        highest = max(row["ratio_p80"] for row in rows)
        axes[0].set_ylim(0, min(1.08 * highest, TOP))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
        figure.suptitle(title.replace("$", r"\$"), fontsize=10)
        png, svg = io.BytesIO(), io.BytesIO()
        FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def _bars(
    ax: Axes, rows: Sequence[Record], places: list[str], colours: dict[str, int], place: str, line: Sequence[str]
) -> None:
    width = 0.8 / len(colours)
    for number, (name, colour) in enumerate(colours.items()):
        own = [row for row in rows if _name(row, line) == name]
        aside = (number - (len(colours) - 1) / 2) * width
        x = [places.index(str(row[place])) + aside for row in own]
        y = [row["ratio"] for row in own]
        spread = [[row["ratio"] - row["ratio_p20"] for row in own], [row["ratio_p80"] - row["ratio"] for row in own]]
        edge, opacity = palette.filled(colour)
        ax.bar(
            x, y, width, label=name, color=edge if opacity == 1 else to_rgba(edge, opacity), edgecolor=edge,
            yerr=spread, error_kw={"elinewidth": 0.8, "ecolor": "#535457"},
        )  # fmt: skip
        for at, value in zip(x, y, strict=True):
            if value > TOP:
                ax.text(at, 0.97 * TOP, f"{value:.1f}", rotation=90, ha="center", va="top", fontsize=7, color="white")
    ax.axhline(1, color="#535457", linewidth=0.8)
    ax.set_xticks(range(len(places)), places, rotation=30, ha="right")


def _name(row: Record, line: Sequence[str]) -> str:
    return " ".join(str(row[column]) for column in line if row[column] not in (None, ""))
