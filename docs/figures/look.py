"""The look of the figures: colours for light and dark pages, and the few shapes that they share.

Each figure is saved once for each theme, with a transparent background. So it can be read on white and on dark pages.
"""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed to write files
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

Record = dict[str, Any]


@dataclass(frozen=True)
class Theme:
    """Colours. Those of the methods differ for the colour-blind, and contrast with the page by 4:1 or more."""

    name: str
    text: str
    quiet: str
    grid: str
    panel: str
    batch: str
    kalman: str
    learned: str
    good: str

    def of(self, method: str) -> str:
        return {"BN": self.batch, "BKN weights": self.kalman, "BKN learned": self.learned}.get(method, self.quiet)


LIGHT = Theme("light", "#1b1f24", "#57606a", "#d8dee4", "#f3f5f7", "#c8500a", "#0a5a99", "#7a4fbf", "#1a7f37")
DARK = Theme("dark", "#e6edf3", "#a3adb8", "#3a424c", "#262c36", "#ff9d5c", "#6cb6ff", "#c4a2ff", "#56d364")
NAMES = {"BN": "batch norm", "BKN weights": "BKN", "BKN learned": "BKN learned", "GN": "group norm"}
MARKS = {"BN": "o", "BKN weights": "s", "BKN learned": "^"}


def records(name: str) -> list[Record]:
    """The rows of a record: JSON lines, or CSV with numbers as numbers."""
    path = ROOT / name
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _number(text: str) -> float | str | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text


def digest(names: tuple[str, ...]) -> str:
    """Of the files that a figure is made from. It is stored in the figure, so a test sees that the figure is old."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in names)).hexdigest()[:16]


def canvas(theme: Theme, width: float, height: float) -> Figure:
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 11,
            "text.color": theme.text,
            "axes.labelcolor": theme.text,
            "axes.edgecolor": theme.grid,
            "xtick.color": theme.quiet,
            "ytick.color": theme.quiet,
            "axes.axisbelow": True,
            "svg.hashsalt": "kalmannorm",  # equal records give equal files
        }
    )
    return plt.figure(figsize=(width, height))


def plain(axes: Axes, theme: Theme, *, kept: tuple[str, ...] = ("bottom",)) -> None:
    """No frame but these sides, and no ticks."""
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side in kept)
        spine.set_color(theme.grid)
    axes.tick_params(length=0)


def drawing(figure: Figure, width: float, height: float) -> Axes:
    """Axes over the whole figure, in these units, without any frame."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return axes


def box(
    axes: Axes, theme: Theme, place: tuple[float, float, float, float], words: str, *, colour: str, bold: bool = False
) -> None:
    """A box with words in its middle. Its place is left, top, width, height."""
    left, top, width, height = place
    shape = FancyBboxPatch(
        (left, top), width, height, "round,pad=0,rounding_size=0.12", facecolor=theme.panel, edgecolor=colour, lw=1.6
    )
    axes.add_patch(shape)
    weight = "bold" if bold else "normal"
    axes.text(left + width / 2, top + height / 2, words, ha="center", va="center", fontweight=weight, linespacing=1.35)


def arrow(axes: Axes, theme: Theme, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    shape = {"arrowstyle": "-|>", "color": theme.quiet, "lw": 1.6, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
    axes.annotate("", end, start, arrowprops={**shape, **style})
