"""The progress of a comparison: the state of every cell from its worker's messages, and the remaining time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kalmannorm.lab.comparing.cells import Cell
from kalmannorm.lab.comparing.summary import Row, rows
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.recipes.recipe import Recipe

CellState = Literal["waiting", "running", "finished", "diverged", "failed", "interrupted"]


@dataclass
class CellProgress:
    name: str
    recipe: Recipe
    state: CellState = "waiting"
    fraction: float = 0.0
    epoch: float = 0.0
    loss: float | None = None
    images_per_second: float | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    """By mode, from the last evaluation, and at the end from the result."""
    reason: str = ""
    started: float = 0.0
    first: tuple[float, float] | None = None
    """Time and fraction at the worker's first message, because a resumed cell does not start at 0."""
    seconds: float = 0.0
    """Duration of the cell, once it has ended."""

    @property
    def over(self) -> bool:
        return self.state in ("finished", "diverged", "failed")

    def hear(self, record: Record, now: float) -> None:
        if record["event"] in ("progress", "train"):
            self.fraction = record["step"] / record["steps"]
            self.epoch, self.loss = record["epoch"], record["loss"]
            self.images_per_second = record["images_per_second"]
            self.first = self.first or (now, self.fraction)
        elif record["event"] == "evaluate":
            self.accuracy = {mode: scores["accuracy"] for mode, scores in record["modes"].items()}

    def take(self, result: Record) -> None:
        self.state = "diverged" if result["diverged"] else "finished"
        self.fraction, self.epoch = 1.0, result["epochs"]
        self.accuracy, self.images_per_second = result["accuracy"], result["images_per_second"]

    def remaining(self, now: float) -> float | None:
        """Seconds until a running cell ends, at its speed so far. None while that is unknown."""
        if self.first is None:
            return None
        since, at = self.first
        done = self.fraction - at
        return (now - since) * (1 - self.fraction) / done if done > 0.02 else None


class Progress:
    """All cells. `workers` of them run at a time."""

    def __init__(self, cells: Sequence[Cell], workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.cells = [CellProgress(name, recipe) for name, recipe in cells]
        self.rows: list[Row] = rows([recipe for _, recipe in cells])
        self.workers, self.clock = workers, clock

    def of(self, row: Row) -> list[CellProgress]:
        return [self.cells[place] for place in row.members]

    @property
    def over(self) -> int:
        return sum(cell.over for cell in self.cells)

    def remaining(self) -> float | None:
        """Seconds until all cells have ended. None until the first cell has made enough progress."""
        now = self.clock()
        running = {id(cell): cell.remaining(now) for cell in self.cells if cell.state == "running"}
        known: dict[int, list[float]] = {}
        """Seconds of whole cells, by row."""
        for number, row in enumerate(self.rows):
            for cell in self.of(row):
                rest = running.get(id(cell))
                if cell.seconds:
                    known.setdefault(number, []).append(cell.seconds)
                elif rest is not None and cell.fraction < 1:
                    known.setdefault(number, []).append(rest / (1 - cell.fraction))
        if not known:
            return None
        usual = statistics.fmean(value for values in known.values() for value in values)
        total = 0.0
        for number, row in enumerate(self.rows):
            whole = statistics.fmean(known[number]) if number in known else usual
            for cell in self.of(row):
                if cell.state == "waiting":
                    total += whole
                elif cell.state == "running":
                    rest = running[id(cell)]
                    total += whole * (1 - cell.fraction) if rest is None else rest
        return total / self.workers
