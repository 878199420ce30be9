"""The output files of a bench: a CSV with the origin of each row, and a chart of ratios."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Record, writable, write_atomically

FORMATS = ("png", "svg")


def check_paths(output: Path | None, plot: Path | None) -> None:
    """Raise errors before the work starts."""
    for path in (output, plot):
        if path is not None:
            writable(path)
    if plot is not None and plot.suffix.lstrip(".") not in FORMATS:
        raise LabError(f"--plot {plot}: the name must end in .png or .svg")


def write_csv(path: Path, rows: Sequence[Record], source: dict[str, str]) -> None:
    """Write every row with its origin: hardware, versions, commit, command."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0], *source], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **source} for row in rows)
    write_atomically(path, text.getvalue().encode())


def write_plot(path: Path, rows: Sequence[Record], title: str, **axes: Any) -> None:
    """`axes` says which columns make panels, places and lines, see `chart.draw`."""
    from kalmannorm.lab.bench.chart import draw  # matplotlib is slow to import and rarely needed

    write_atomically(path, draw(rows, title, **axes)[path.suffix.lstrip(".")])
