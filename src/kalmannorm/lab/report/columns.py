"""How the numbers of an experiment's table are written, in the terminal and on the page.

Measured numbers have decimals that depend on their spread, one if it is 0.05 or more. All cells of a column have
equally many decimals. The paper's numbers are written as the paper prints them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kalmannorm.lab.files.records import Record
from kalmannorm.lab.words.spread import Spread
from kalmannorm.lab.words.wording import MISSING, decimals, number, places_of, plus_minus


def is_papers(heading: str) -> bool:
    return "paper" in heading.lower()


def texts(table: Record) -> list[list[str]]:
    """Every cell of the table as text, row by row."""
    headings = [str(name) for name in table.get("columns") or []]
    rows = [list(cells)[: len(headings)] for cells in table.get("rows") or []]
    columns = []
    for place, heading in enumerate(headings):
        cells = [row[place] if place < len(row) else None for row in rows]
        columns.append(column_texts(heading, cells))
    return [list(cells) for cells in zip(*columns, strict=True)] if rows else []


def column_texts(heading: str, cells: Sequence[Any]) -> list[str]:
    measured = [value for cell in cells if (value := spread_of(cell)) is not None]
    known = [value for value in measured if value.std] or measured
    places = statistics.median_low(places_of(value) for value in known) if known else _plain_places(cells)
    return [_text(cell, places, as_printed=is_papers(heading)) for cell in cells]


def spread_of(cell: Any) -> Spread | None:
    """The spread of a cell over seeds."""
    if not isinstance(cell, dict) or not isinstance(cell.get("mean"), (int, float)):
        return None
    std = cell.get("std")
    return Spread(cell["mean"], std if isinstance(std, (int, float)) else None, cell.get("n") or 1)


def _plain_places(cells: Sequence[Any]) -> int:
    """Decimals of plain numbers: 0 if no number has any, else as many as three digits need."""
    shown = [f"{cell:.{decimals(cell)}f}" for cell in cells if isinstance(cell, float)]
    return max((len(words.rstrip("0").partition(".")[2]) for words in shown), default=0)


def _text(cell: Any, places: int, *, as_printed: bool) -> str:
    value = spread_of(cell)
    if value is not None:
        return plus_minus(value, places)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, (int, float)):
        return f"{cell:,}" if as_printed else number(cell, places if isinstance(cell, float) else None)
    return MISSING if cell is None or isinstance(cell, (dict, list)) else str(cell)
