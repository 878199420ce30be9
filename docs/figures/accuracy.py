"""Accuracy against the statistics batch m, one panel for each inference and data set.

`DATA` names the records. A line of a record has `method`, `statistics_batch`, `seed` and `accuracy` by inference. More
sizes, methods, seeds or data sets are drawn as soon as their records are there.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from look import MARKS, NAMES, Record, Theme, canvas, plain, records
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

INFERENCES = ("population", "batch", "example")
METHODS = ("BN", "BKN learned", "BKN weights")


@dataclass(frozen=True)
class Data:
    name: str
    files: tuple[str, ...]
    lowest: float
    """The panels begin here. Lower results are written at the bottom."""
    group_norm: str


DATA = (
    Data("CIFAR-10", ("docs/figures/records/cifar10.jsonl",), 78, "GN warmed up"),
    Data("digits", ("docs/figures/records/digits-by-size.jsonl", "docs/figures/records/accuracy.jsonl"), 91, "GN"),
)
RECORDS = tuple(file for data in DATA for file in data.files)


def scores(rows: list[Record], method: str, inference: str) -> dict[int, list[float]]:
    """One for each seed, by m."""
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["method"] == method and inference in row["accuracy"]:
            found.setdefault(row["statistics_batch"], {}).setdefault(row["seed"], row["accuracy"][inference])
    return {m: list(by_seed.values()) for m, by_seed in sorted(found.items())}


def panel(axes: Axes, theme: Theme, data: Data, rows: list[Record], inference: str) -> None:
    plain(axes, theme)
    sizes = sorted({m for method in METHODS for m in scores(rows, method, inference)})
    for number, method in enumerate(METHODS):
        found = scores(rows, method, inference)
        means = {m: statistics.mean(values) for m, values in found.items()}
        errors = {m: statistics.stdev(values) for m, values in found.items()}
        inside = [m for m in means if means[m] >= data.lowest]
        axes.errorbar(
            [m * 2 ** (0.06 * (number - 1)) for m in inside],  # side by side where they meet
            [means[m] for m in inside],
            [errors[m] for m in inside],
            color=theme.of(method),
            marker=MARKS[method],
            linestyle="-" if len(found) > 2 else "none",  # two sizes say nothing about those between
            linewidth=1.8,
            elinewidth=1.2,
            markersize=7,
        )
        for m in set(means) - set(inside):
            words = f"↓ {means[m]:.1f}"
            axes.text(m, data.lowest, words, color=theme.of(method), ha="center", va="bottom", fontweight="bold")
    group_norm = [value for values in scores(rows, data.group_norm, inference).values() for value in values]
    if group_norm:  # its statistics are those of one image, in every inference
        level = statistics.mean(group_norm)
        axes.axhline(level, color=theme.quiet, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(sizes[-1] * 1.3, level, "group norm", color=theme.quiet, ha="right", va="bottom", fontsize=9.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    axes.set_ylim(bottom=data.lowest)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)


def draw(theme: Theme) -> Figure:
    tall = 1.2 + 2.75 * len(DATA)  # inches
    figure = canvas(theme, 12, tall)
    for line, data in enumerate(DATA):
        rows = [row for file in data.files for row in records(file)]
        bottom = tall - 0.95 - 2.75 * (line + 1) + 0.55
        panels = []
        for column, inference in enumerate(INFERENCES):
            axes = figure.add_axes((0.065 + 0.315 * column, bottom / tall, 0.285, 2.15 / tall))
            panel(axes, theme, data, rows, inference)
            panels.append(axes)
            if line == 0:
                axes.set_title(f"{inference} inference", fontsize=13, fontweight="bold", pad=10)
            if line == len(DATA) - 1:
                axes.set_xlabel("m, the examples that share their statistics")
        highest = max(axes.get_ylim()[1] for axes in panels)
        for axes in panels:
            axes.set_ylim(data.lowest, highest)
        for axes in panels[1:]:
            axes.tick_params(labelleft=False)
        panels[0].set_ylabel(f"{data.name}: accuracy, %", fontweight="bold")
    for number, method in enumerate(METHODS):
        place, height = 0.09 + 0.16 * number, 1 - 0.3 / tall
        figure.text(place, height, NAMES[method], color=theme.of(method), fontweight="bold", va="center")
        figure.add_artist(Line2D([place - 0.012], [height], marker=MARKS[method], color=theme.of(method), markersize=7))
    told = "mean ± standard deviation over seeds"
    figure.text(0.95, height, told, color=theme.quiet, ha="right", va="center", fontsize=10)
    return figure
