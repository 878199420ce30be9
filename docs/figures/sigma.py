"""σ of a group against that of a large batch, by statistics batch: how wrong it is, and how much it varies."""

from __future__ import annotations

from look import MARKS, NAMES, Record, Theme, canvas, plain, records
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator, NullLocator, PercentFormatter

RECORDS = ("docs/figures/records/sigma.csv",)
METHODS = ("BN", "BKN learned", "BKN weights")


def by_size(rows: list[Record], method: str, figure: str) -> dict[int, float]:
    """Root mean square over the layers that have a prior, by m. The first layer has none: there the methods agree."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["method"] == method and row["layer"] > 1:
            found.setdefault(int(row["statistics_batch"]), []).append(row[figure] ** 2)
    return {m: (sum(squares) / len(squares)) ** 0.5 for m, squares in sorted(found.items())}


def lines(axes: Axes, theme: Theme, rows: list[Record], figure: str, headline: str, words: str) -> None:
    plain(axes, theme)
    for method in METHODS:
        found = by_size(rows, method, figure)
        axes.plot([*found], [*found.values()], color=theme.of(method), marker=MARKS[method], linewidth=2, markersize=7)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    sizes = [*by_size(rows, "BN", figure)]
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MultipleLocator(0.05))
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_xlabel("m, the examples that share their statistics")
    axes.text(0, 1.14, headline, transform=axes.transAxes, fontsize=14, fontweight="bold")
    axes.text(0, 1.05, words, transform=axes.transAxes, color=theme.quiet)


def draw(theme: Theme) -> Figure:
    rows = records(RECORDS[0])
    seeds, images = int(rows[0]["seeds"]), int(rows[0]["images"])
    figure = canvas(theme, 12, 4.6)
    left, right = figure.add_axes((0.05, 0.13, 0.43, 0.6)), figure.add_axes((0.55, 0.13, 0.43, 0.6))
    told = f"error against the σ of {images} images, as a root mean square"
    lines(left, theme, rows, "rms", "BKN's σ is farther from a large batch's σ …", told)
    told = "standard deviation of σ over groups ÷ mean of σ over groups"
    lines(right, theme, rows, "spread", "… and BKN's σ varies less between groups", told)
    for number, method in enumerate(METHODS):
        place = 0.065 + 0.15 * number
        figure.text(place, 0.945, NAMES[method], color=theme.of(method), fontweight="bold")
        figure.add_artist(Line2D([place - 0.01], [0.957], marker=MARKS[method], color=theme.of(method), markersize=7))
    words = f"digits, 5 convolutions, 15 epochs, mean of {seeds} seeds; layers 2 to 5"
    figure.text(0.98, 0.945, words, color=theme.quiet, fontsize=10, ha="right")
    return figure
