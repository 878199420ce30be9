"""What the rounds of evidence.py and small.py show, and what of them is missing.

For every method and m, the setting that was best on held-out images is chosen, and its score on the test images is
shown. The rounds `sizes`, `rates` and `seeds` give the settings. For true small batches the rounds of small.py give
them, and `python -m trials.chosen` prints them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trials import small, table
from trials.evidence import CELLS_BY_SIZE, EVIDENCE, SINGLE, methods
from trials.forms import Form
from trials.table import Row, Score
from trials.training import Run

BY_SIZE = ("sizes", "rates", "seeds")
LABELS = {
    "groups": "batch norm",
    "groups, closing phase": "batch norm, closing phase",
    "groups, recipe": "batch norm, recipe",
    "BKN learned": "BKN learned",
    "BKN": "BKN",
    "BKN, closing phase": "BKN, closing phase",
    "BKN, recipe": "BKN, recipe",
    "renorm": "batch renorm",
    "moving": "Moving Average Batch Norm",
    "online": "Online Normalization",
    "group": "group norm",
    "standardized": "group norm with standardized weights",
}
"""The methods, in the order of tables and of the picture."""
LAB = {
    "groups": "bn",
    "groups, closing phase": "bn",
    "groups, recipe": "bn-ws",
    "BKN learned": "bkn-learned",
    "BKN": "bkn",
    "BKN, closing phase": "bkn",
    "BKN, recipe": "bkn-ws",
    "renorm": "brn",
    "moving": "mabn",
    "online": "on",
    "group": "gn",
    "standardized": "gn-ws",
}
"""Their names in the lab, by which a picture gives them their looks."""
ALONE = ("population", "recalibrated", "example")
"""Ways of inference in which the result for an image does not depend on other test images."""


def evidence(rows: Iterable[Row] | None = None) -> list[Row]:
    """The records of these rounds, those of failed runs included."""
    return [row for row in (table.records() if rows is None else rows) if row["round"] in EVIDENCE]


def form_of(name: str, m: int) -> Form:
    return SINGLE[name] if name in SINGLE else methods(m)[name]


@dataclass(frozen=True)
class Point:
    """A method at m in a cell: the chosen setting."""

    name: str
    m: int
    score: Score
    tried: int
    """The number of settings that it was chosen from."""

    def tested(self, mode: str = "population") -> dict[int, float]:
        """Accuracies on test images in %, by seed."""
        return self.score.accuracies(mode, "tested")

    @property
    def ways(self) -> dict[str, float]:
        """The ways of inference that need no other test images, with the accuracy of one seed on held-out images."""
        held = {mode: self.score.accuracies(mode) for mode in ALONE}
        return {mode: next(iter(found.values())) for mode, found in held.items() if found}

    @property
    def way(self) -> str:
        """The best of them."""
        known = self.ways
        return max(known, key=known.__getitem__)


def points(cell: str, rows: Iterable[Row] | None = None) -> dict[tuple[str, int], Point | None]:
    """By method and m. None: all of its runs diverged. What was not run is missing.

    A method without groups of examples is there once, with m = 1.
    """
    mine = table.scores(row for row in evidence(rows) if row.get("cell") == cell and row["round"] in BY_SIZE)
    found: dict[tuple[str, int], Point | None] = {}
    sizes = sorted({score.setting.form.m for score in mine})
    for name in LABELS:
        for m in [1] if name in SINGLE else sizes:
            own = [score for score in mine if score.setting.form == form_of(name, m)]
            best = table.best(own)
            if own:
                found[name, m] = None if best is None else Point(name, m, best, len(own))
    return found


def cells(rows: Iterable[Row] | None = None) -> list[str]:
    """The cells of accuracy against m that have a record."""
    found = {row.get("cell") for row in evidence(rows) if row["round"] in BY_SIZE}
    return [cell for cell in CELLS_BY_SIZE if cell in found]


def missing(name: str, rows: Iterable[Row] | None = None) -> dict[str, tuple[int, int]]:
    """Of a round, by cell: the number of runs without a record, and of all runs. Complete cells are left out."""
    done = {row["key"] for row in evidence(rows) if row["round"] == name and "failed" not in row}
    runs = EVIDENCE[name]
    counts = {
        cell: [run.key not in done for run in runs if run.cell == cell]
        for cell in dict.fromkeys(run.cell for run in runs)
    }
    return {cell: (sum(own), len(own)) for cell, own in counts.items() if any(own)}


def failed(rows: Iterable[Row] | None = None) -> list[str]:
    """Keys of runs that failed and have no other record."""
    found = evidence(rows)
    done = {(row["round"], row["key"]) for row in found if "failed" not in row}
    bad = [(row["round"], row["key"]) for row in found if "failed" in row]
    return [f"{name}: {key}" for name, key in dict.fromkeys(bad) if (name, key) not in done]


SMALL = ("small", "small-edges", "small-seeds")


@dataclass(frozen=True)
class Small(Point):
    """A method in true batches of m: the chosen learning rate."""

    rates: tuple[float, ...]
    """All that were tried, in rising order."""

    @property
    def edge(self) -> float | None:
        """The next rate to try, if the chosen one is the lowest or the highest, else None."""
        at = self.rates.index(self.score.setting.rate)
        if 0 < at < len(self.rates) - 1:
            return None
        return self.rates[-1] * small.STEP if at else self.rates[0] / small.STEP


def small_points(rows: Iterable[Row] | None = None) -> dict[tuple[str, int], Small | None]:
    """By method and batch, where all runs of `small` have a record. None: all of them diverged."""
    rows = [row for row in (table.records() if rows is None else rows) if row["round"] in SMALL]
    scores = [score for score in table.scores(rows) if score.setting.cell == small.CELL]
    found: dict[tuple[str, int], Small | None] = {}
    for batch in small.BATCHES:
        for name, form in small.methods(batch).items():
            own = [each for each in scores if (each.setting.form, each.setting.batch) == (form, batch)]
            rates = tuple(sorted(each.setting.rate for each in own))
            if {small.rate_of(batch, factor) for factor in small.FACTORS} <= set(rates):
                best = table.best(own)
                found[name, batch] = None if best is None else Small(name, batch, best, len(own), rates)
    return found


def small_edges(rows: Iterable[Row]) -> list[Run]:
    """A further rate for each method and batch whose best rate is the lowest or the highest so far."""
    points = [point for point in small_points(rows).values() if point is not None]
    return [
        small.run_of(point.score.setting.form, point.m, point.edge)
        for point in points
        if point.edge is not None and point.tried < small.MOST_RATES
    ]


def small_seeds(rows: Iterable[Row]) -> list[Run]:
    """More seeds at the chosen rates. Nothing is chosen while a further rate is to be tried."""
    points, waiting = small_points(rows), {(run.form, run.batch) for run in small_edges(rows)}
    return [
        small.run_of(point.score.setting.form, point.m, point.score.setting.rate, seed)
        for seed in small.SEEDS
        for point in points.values()
        if point is not None and (point.score.setting.form, point.m) not in waiting
    ]


FOLLOWING: dict[str, Callable[[Iterable[Row]], list[Run]]] = {
    "small-edges": small_edges,
    "small-seeds": small_seeds,
}
"""Rounds whose runs follow from the records of others."""


def small_lines(rows: Iterable[Row] | None = None) -> list[list[str]]:
    """Lines of cells, the headings first: the chosen rate, and the accuracies in population inference."""
    lines = [["method", "batch", "rate", "tried", "held-out", "test, by seed", "mean"]]
    for (name, batch), point in small_points(rows).items():
        if point is None:
            lines.append([name, str(batch), "", "", "diverged", "", ""])
            continue
        tested = point.tested()
        lines.append(
            [
                name, str(batch), f"{point.score.setting.rate:g}" + ("" if point.edge is None else ", at the edge"),
                " ".join(f"{rate:g}" for rate in point.rates), f"{point.score.first:.1f}",
                " ".join(f"{value:.1f}" for value in tested.values()),
                f"{statistics.fmean(tested.values()):.2f}" if tested else "",
            ]
        )  # fmt: skip
    return lines


if __name__ == "__main__":
    print("\n".join(table.columns(small_lines())))
