"""The results of a plan's runs: accuracies per arm, at the end or during training, and steps to an accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kalmannorm.lab.experiments.planning import Cell, Plan
from kalmannorm.lab.files.records import Record, Run
from kalmannorm.lab.report.trained import Ended, sound
from kalmannorm.lab.words.spread import spread


@dataclass(frozen=True)
class Finished:
    """A run, with its result and log."""

    run: Run
    result: Record
    evaluations: list[Record]

    @property
    def ended(self) -> Ended:
        return self.run.recipe, self.result

    @property
    def lost(self) -> bool:
        """Whether it is no better than guessing, or too short to compare."""
        return not sound([self.ended])

    def accuracy(self, mode: str, at: float | None = None) -> float | None:
        """Accuracy in %, at the end, or at the evaluation nearest to a share of the training.

        None without this mode.
        """
        if at is None or not self.evaluations:
            found: float | None = self.result["accuracy"].get(mode)
            return found
        wanted = at * self.length
        nearest = min(self.evaluations, key=lambda event: abs(event["step"] - wanted))
        return _accuracy(nearest, mode)

    @property
    def length(self) -> int:
        """Steps of the whole training. A diverged run did not reach them."""
        planned = [event["steps"] for event in self.run.events("train")]
        return int(planned[-1] if planned else self.evaluations[-1]["step"])

    def best(self, mode: str) -> float | None:
        return max((a for event in self.evaluations if (a := _accuracy(event, mode)) is not None), default=None)

    def steps_to(self, mode: str, accuracy: float) -> int | None:
        """The first evaluated step that reached the accuracy. None if none did."""
        for event in self.evaluations:
            found = _accuracy(event, mode)
            if found is not None and found >= accuracy:
                return int(event["step"])
        return None


def _accuracy(event: Record, mode: str) -> float | None:
    found: float | None = event["modes"].get(mode, {}).get("accuracy")
    return found


Results = Mapping[str, Finished]
"""By the cell's folder."""


def read_results(plan: Plan, folder: Path) -> dict[str, Finished]:
    """The results of all cells that have one."""
    found = {}
    for cell in plan.cells:
        home = folder / cell.folder
        if (home / "result.json").is_file():
            run = Run.read(home)
            result = run.result
            assert result is not None
            found[cell.folder] = Finished(run, result, run.events("evaluate"))
    return found


def of_cells(cells: list[Cell], results: Results) -> list[Finished]:
    return [results[cell.folder] for cell in cells if cell.folder in results]


def averaged(values: Sequence[float | None]) -> Any:
    """A cell of a table: {"mean", "std", "n"}, or None."""
    found = spread(values)
    return None if found is None else found.to_json()
