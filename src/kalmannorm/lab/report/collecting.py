"""What lies in the given folders: runs in whatever state, and experiments. One damaged file does not stop a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.recipe import Recipe
from kalmannorm.lab.records import Record, Run, read_json
from kalmannorm.lab.report.naming import essence

State = Literal["finished", "diverged", "unfinished", "repeated"]


@dataclass(frozen=True)
class Found:
    """A run with its log read. Only finished and diverged ones enter averages; a repeated one has a later twin."""

    run: Run
    place: str
    """Its folder, from the folder that was given."""
    state: State
    result: Record
    events: list[Record]
    analyses: dict[str, Record]
    """By the name of what was analysed."""

    @property
    def counts(self) -> bool:
        return self.state in ("finished", "diverged")

    @property
    def ended(self) -> tuple[Recipe, Record]:
        return self.run.recipe, self.result

    def of(self, kind: str) -> list[Record]:
        return [event for event in self.events if event.get("event") == kind]


@dataclass(frozen=True)
class Experiment:
    folder: Path
    record: Record


@dataclass(frozen=True)
class Damaged:
    place: str
    message: str


@dataclass(frozen=True)
class Collected:
    runs: list[Found]
    experiments: list[Experiment]
    damaged: list[Damaged]


def collect(folders: Sequence[Path]) -> Collected:
    """Everything in these folders, at any depth, each once, in the order of their names."""
    runs: dict[Path, Found] = {}
    experiments: dict[Path, Experiment] = {}
    damaged: list[Damaged] = []
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"there is no folder {folder}")
        for path in sorted([*folder.rglob("recipe.json"), *folder.rglob("experiment.json")]):
            home, place = path.parent.resolve(), _place(path.parent, folder)
            if home in runs or (path.name == "experiment.json" and home in experiments):
                continue
            try:
                if path.name == "recipe.json":
                    runs[home] = _found(path.parent, place)
                    _read_analyses(runs[home])
                else:
                    experiments[home] = Experiment(home, read_json(path))
            except LabError as error:
                damaged.append(Damaged(place, str(error)))
    if not runs and not experiments and not damaged:
        named = ", ".join(str(folder) for folder in folders)
        raise LabError(f"there are no runs in {named}: make some with kalmannorm demo, train or compare")
    return Collected(list(runs.values()), list(experiments.values()), list(dict.fromkeys(damaged)))


def _place(path: Path, given: Path) -> str:
    """The given folder's own name, then the way down from it."""
    return str(Path(given.resolve().name) / path.relative_to(given))


def _found(folder: Path, place: str) -> Found:
    run = Run.read(folder)
    result = run.result
    state: State = "unfinished" if result is None else "diverged" if result.get("diverged") else "finished"
    return Found(run, place, state, result or {}, run.events(), {})


def _read_analyses(found: Found) -> None:
    """Apart from the rest: a damaged analysis costs a run its pictures, not its place in the tables."""
    for name in ("layers", "variance-gap"):
        record = found.run.analysis(name)
        if record is not None:
            found.analyses[name] = record


def without_twins(runs: Sequence[Found]) -> list[Found]:
    """Of runs that come to the same numbers, seed and all, the one that ended last counts; the others are marked."""
    last: dict[Recipe, Found] = {}
    for found in runs:
        if found.counts:
            same = essence(found.run.recipe)
            if same not in last or _ended(found) >= _ended(last[same]):
                last[same] = found
    return [
        found if not found.counts or last[essence(found.run.recipe)] is found else replace(found, state="repeated")
        for found in runs
    ]


def _ended(found: Found) -> float:
    return (found.run.folder / "result.json").stat().st_mtime
