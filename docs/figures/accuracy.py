"""Accuracy against the statistics batch m in population inference, a panel for each network and data set.

The chart is one of the lab (`kalmannorm.lab.report`). Its points come from the records that exist: those of the trials
(`trials/evidence.py`), where the best setting on held-out images is shown by its score on test images, and those of the
lab on digits and CIFAR-10. CIFAR-10 of the lab has two values of m. Its panel disappears when the trials have records
of CIFAR-10. `missing` says what has no record yet.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from look import LIGHT, ROOT, Record, Theme, records
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from kalmannorm.lab.report import axes as ranges
from kalmannorm.lab.report import palette, plotting
from kalmannorm.lab.report.charts import Curves, Lines, Series

sys.path.append(str(ROOT))
from trials import chosen, table
from trials.chosen import LAB, LABELS
from trials.evidence import SINGLE

FIRST_WORDS, WORDS = 3, 10
"""Words below a panel: how far the first line is above the axis, and the height of a line, in points."""
COLUMNS = 4
"""The most columns of a legend."""
Scores = Mapping[tuple[str, int], list[float]]
"""Accuracies by method and m, one for each seed. A method without groups has m = 0."""
LAB_FILES = {
    "digits": ("docs/figures/records/digits-by-size.jsonl", "docs/figures/records/accuracy.jsonl"),
    "cifar10": ("docs/figures/records/cifar10.jsonl",),
}
LAB_METHODS = {
    "BN": "groups",
    "BKN learned": "BKN learned",
    "BKN weights": "BKN",
    "BRN": "renorm",
    "GN": "group",
    "GN warmed up": "group",
    "BKN, recipe": "BKN, recipe",
    "BN, recipe": "groups, recipe",
    "MABN": "moving",
}
TITLES = {
    "cifar10": "CIFAR Inception on CIFAR-10",
    "cifar10-resnet32": "ResNet-32 on CIFAR-10",
    "cifar100": "CIFAR Inception on CIFAR-100",
    "tiny100": "ResNet-18 on Tiny-ImageNet (100 classes)",
}
RECORDS = tuple(
    str(path.relative_to(ROOT))
    for path in (
        *(table.RECORDS / f"{name}.jsonl" for name in chosen.BY_SIZE),
        *(ROOT / name for files in LAB_FILES.values() for name in files),
    )
    if path.is_file()
)


@dataclass(frozen=True)
class Panel:
    title: str
    scores: Scores

    @property
    def sizes(self) -> list[int]:
        return sorted({m for _, m in self.scores if m})


def of_trials(cell: str, rows: list[Record] | None = None) -> Panel:
    found = chosen.points(cell, rows)
    scores = {
        (name, 0 if name in SINGLE else m): list(point.tested().values())
        for (name, m), point in found.items()
        if point is not None
    }
    return Panel(TITLES[cell], {key: own for key, own in scores.items() if own})


def of_lab(title: str, rows: list[Record], group_norm: str) -> Panel:
    """The first record of a seed counts."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        method = row["method"]
        if method in LAB_METHODS and (LAB_METHODS[method] != "group" or method == group_norm):
            key = LAB_METHODS[method], 0 if method == group_norm else row["statistics_batch"]
            found.setdefault(key, {}).setdefault(row["seed"], row["accuracy"]["population"])
    return Panel(title, {key: list(by_seed.values()) for key, by_seed in found.items()})


def panels(rows: list[Record] | None = None, read: Callable[[str], list[Record]] = records) -> list[Panel]:
    cells = chosen.cells(rows)
    found = [of_trials(cell, rows) for cell in cells]
    if "cifar10" not in cells:
        own = [row for name in LAB_FILES["cifar10"] for row in read(name)]
        found.append(of_lab("CIFAR Inception on CIFAR-10 (8 epochs)", own, "GN warmed up"))
    own = [row for name in LAB_FILES["digits"] for row in read(name)]
    found.append(of_lab("digits-net on digits", own, "GN"))
    return [panel for panel in found if panel.sizes]


def missing(rows: list[Record] | None = None) -> dict[str, tuple[int, int]]:
    """By cell: how many of the runs of the round `sizes` have no record, and how many there are."""
    return chosen.missing("sizes", rows)


def lowest(panel: Panel) -> float:
    """Where a panel begins: outliers are written at its bottom."""
    means = [statistics.fmean(own) for own in panel.scores.values()]
    return min(ranges.without_outliers(means), default=0.0)


def series(panel: Panel, names: list[str], looks: Mapping[str, int]) -> list[Series]:
    """One for each method. A line joins neighbouring sizes of the panel only.

    Otherwise it would hide a training between them that diverged, was not run, or is below the panel.
    """
    made = []
    for name in LABELS:
        own = {m: scores for (method, m), scores in panel.scores.items() if method == name}
        if 0 in own:
            own = dict.fromkeys(panel.sizes, own[0])
        lines: list[list[int]] = [[]]
        for m in panel.sizes:
            if m in own and statistics.fmean(own[m]) >= lowest(panel):
                lines[-1].append(m)
            else:
                lines.append([])
        for sizes in filter(None, lines):
            made.append(
                Series(
                    LABELS[name],
                    looks[name],
                    [float(names.index(str(m))) for m in sizes],
                    [statistics.fmean(own[m]) for m in sizes],
                    [statistics.stdev(own[m]) if len(own[m]) > 1 else None for m in sizes],
                    [len(own[m]) for m in sizes],
                )
            )
    return made


def looks_of(found: list[Panel]) -> dict[str, int]:
    """Of every method that has a record."""
    shown = [name for name in LABELS if any(method == name for panel in found for method, _ in panel.scores)]
    return dict(zip(shown, palette.colours([LAB[name] for name in shown]), strict=True))


def chart(found: list[Panel]) -> Curves:
    names = [str(m) for m in sorted({m for panel in found for m in panel.sizes})]
    looks = looks_of(found)
    lines = [Lines(panel.title, series(panel, names, looks)) for panel in found]
    words = "m, the examples that share their statistics"
    return Curves(lines, words, "test accuracy, %", names, bounds=(0.0, 100.0), aside=True)


def draw(theme: Theme, rows: list[Record] | None = None) -> Figure:
    found = panels(rows)
    curves = chart(found)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # another picture may have set the colours of its theme
        matplotlib.rcParams.update({**plotting.STYLE, "svg.fonttype": "path"})
        figure, axes = plotting.drawing(curves, "")
        for ax, panel, lines in zip(axes, found, curves.panels, strict=True):
            own_range(ax, Curves([lines], curves.x, curves.y, curves.names, bounds=curves.bounds, aside=True))
            told_below(ax, panel, curves, looks_of(found))
        place_legend(figure)
    if theme != LIGHT:
        recolour(figure, theme)
    return figure


def own_range(ax: Axes, curves: Curves) -> None:
    """The y axis of this panel alone. The lab's charts share one, because they show one data set."""
    axis = curves.up["whole"]
    ax.set_ylim(axis.low, axis.high)
    ax.set_yticks([y for y, _ in axis.ticks], [words for _, words in axis.ticks])


def told_below(ax: Axes, panel: Panel, curves: Curves, looks: Mapping[str, int]) -> None:
    """The means of points that are below the panel. Points that are shown stay above these words."""
    at: dict[int, list[tuple[str, str, int]]] = {}
    shown: dict[int, list[float]] = {}
    for (name, size), scores in sorted(panel.scores.items(), key=lambda item: statistics.fmean(item[1])):
        m, mean = size or panel.sizes[-1], statistics.fmean(scores)
        if mean < lowest(panel):
            at.setdefault(m, []).append((f"↓{mean:.1f}" + ("" if size else f", {LABELS[name]}"), name, size))
        else:
            shown.setdefault(m, []).append(mean)
    figure = ax.get_figure()
    assert figure is not None
    height = ax.get_position().height * figure.get_size_inches()[1] * 72  # points
    high = ax.get_ylim()[1]
    for m, words in at.items():
        share = (FIRST_WORDS + WORDS * (len(words) + 0.5)) / height
        least = min(shown.get(m, [high]))
        ax.set_ylim(min(ax.get_ylim()[0], (least - share * high) / (1 - share)), high)
    for m, words in at.items():
        for number, (word, name, size) in enumerate(words):
            place = curves.names.index(str(m)), ax.get_ylim()[0]
            side = "right" if not size else "center" if place[0] else "left"
            shift = -FIRST_WORDS if side == "left" else 0, FIRST_WORDS + WORDS * number
            colour = palette.shade(looks[name])
            ax.annotate(word, place, shift, textcoords="offset points", color=colour, ha=side, fontsize=7.5)


def place_legend(figure: Figure) -> None:
    """Below the panels, in as many lines as it needs: with so many columns that it is not wider than the figure."""
    legend = figure.legends[0]
    handles, labels = legend.legend_handles, [text.get_text() for text in legend.get_texts()]
    legend.remove()
    width, height = figure.get_size_inches()
    for columns in range(COLUMNS, 0, -1):
        legend = figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=9)
        if legend.get_window_extent().width <= width * figure.dpi:
            break
        legend.remove()
    extra = 0.2 * (-(-len(labels) // columns) - 1)  # inches
    figure.set_size_inches(width, height + extra)
    for ax in figure.axes:
        box = ax.get_position()
        grown = (box.y0 * height + extra) / (height + extra), box.height * height / (height + extra)
        ax.set_position((box.x0, grown[0], box.width, grown[1]))


def recolour(figure: Figure, theme: Theme) -> None:
    """The colours of the lab's dark scheme, and those of the theme for words and lines of axes."""
    dark = dict(zip(palette.LIGHT, palette.DARK, strict=True))

    def turned(colour: Any) -> tuple[str, float] | None:
        """The same series in the dark scheme. None: no colour of a series."""
        if isinstance(colour, np.ndarray):  # a row for each line of a collection, which has one colour here
            colour = tuple(colour[0]) if len(colour) else "none"
        *rgb, alpha = to_rgba(colour)
        return (dark[to_hex(rgb)], alpha) if to_hex(rgb) in dark else None

    for artist in figure.findobj():
        for name in ("color", "markerfacecolor", "markeredgecolor", "edgecolor"):
            get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
            if get is None or put is None:
                continue
            new = turned(get())
            if new is not None:
                put(new)
            elif isinstance(artist, Text):
                put(theme.text)
    for ax in figure.axes:
        ax.tick_params(colors=theme.quiet)
        for spine in ax.spines.values():
            spine.set_color(theme.grid)
        for line in ax.get_ygridlines():
            line.set_color(theme.grid)
