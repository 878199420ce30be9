"""What a bench leaves: a CSV file with its origins, and a chart of ratios."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.methods import METHODS as LAB
from kalmannorm.lab.records import Record, writable, write_atomically

FORMATS = ("png", "svg")
METHODS = {"BatchNorm": "bn", "nn.BatchNorm": "bn", "GroupNorm": "gn", "BKN": "bkn"} | {name: name for name in LAB}
"""Which of the report's methods a contender is, by the first word of its name: it has that one's colour."""


def check_paths(output: Path | None, plot: Path | None) -> None:
    """Raise before the work, not after it."""
    for path in (output, plot):
        if path is not None:
            writable(path)
    if plot is not None and plot.suffix.lstrip(".") not in FORMATS:
        raise LabError(f"--plot {plot}: give a name that ends in .png or .svg")


def write_csv(path: Path, rows: Sequence[Record], source: dict[str, str]) -> None:
    """Every row with where it comes from: hardware, versions, commit, command."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0], *source], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **source} for row in rows)
    write_atomically(path, text.getvalue().encode())


def write_plot(path: Path, rows: Sequence[Record], title: str, *, panel: str, place: str, line: Sequence[str]) -> None:
    """Ratios with their spread: a panel for each value of one column, along it those of another, a series per line.

    A series is named by the columns of `line`; the baseline, which is 1 everywhere, is a series too.
    """
    from kalmannorm.lab.report import palette
    from kalmannorm.lab.report.charts import Curves, Lines, Series
    from kalmannorm.lab.report.plotting import images

    places = list(dict.fromkeys(row[place] for row in rows))
    methods = {_name(row, line): METHODS.get(str(row[line[0]]).split()[0].rstrip(","), "") for row in rows}
    colours = dict(zip(methods, palette.colours(list(methods.values())), strict=True))
    panels = []
    for value in dict.fromkeys(row[panel] for row in rows):
        found = []
        for name, colour in colours.items():
            own = [row for row in rows if row[panel] == value and _name(row, line) == name]
            if own:
                half = [(row["ratio_p80"] - row["ratio_p20"]) / 2 for row in own]
                x, y = [float(places.index(row[place])) for row in own], [row["ratio"] for row in own]
                found.append(Series(name, colour, x, y, half))
        panels.append(Lines(str(value), found))
    chart = Curves(panels, "", "time / baseline", ticks=[str(p) for p in places], aside=True)
    write_atomically(path, images(chart, title)[path.suffix.lstrip(".")])


def _name(row: Record, line: Sequence[str]) -> str:
    return " ".join(str(row[column]) for column in line if row[column] not in (None, ""))
