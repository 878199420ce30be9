"""Reads folders of runs and experiments. Runs may be in any state.

A damaged file does not stop a report. The readable parts are shown, and `Collected.damaged` lists the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from xml.etree.ElementTree import Element

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files import shapes
from kalmannorm.lab.files.records import Record, Run, read_json
from kalmannorm.lab.files.shapes import plain_text
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.report import svg
from kalmannorm.lab.words.naming import essence

State = Literal["finished", "diverged", "unfinished", "repeated"]


@dataclass(frozen=True)
class Found:
    """A run with its log.

    Only finished and diverged runs enter averages. If a run was repeated, the last one counts.
    """

    run: Run
    place: str
    """Its folder, relative to the given folder."""
    state: State
    result: Record
    events: list[Record]
    analyses: dict[str, Record]
    """The records of its analyses, by name."""
    drawing: Element | None
    """The drawing of its wiring; see `svg`."""

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
    """A run or an experiment that could not be read, or only in part."""

    place: str
    message: str
    left_out: bool

    @property
    def kind(self) -> str:
        return "left out" if self.left_out else "read in part"

    def __str__(self) -> str:
        return f"{self.kind} {self.place}: {self.message}"


@dataclass(frozen=True)
class Collected:
    runs: list[Found]
    experiments: list[Experiment]
    damaged: list[Damaged]


def collect(folders: Sequence[Path]) -> Collected:
    """All runs and experiments in these folders, at any depth, each once, sorted by name."""
    runs: dict[Path, Found] = {}
    experiments: dict[Path, Experiment] = {}
    damaged: dict[Path, Damaged] = {}
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"there is no folder {folder}")
        for path in sorted([*folder.rglob("recipe.json"), *folder.rglob("experiment.json")]):
            name, home, place = path.resolve(), path.parent.resolve(), _layer_name(path.parent, folder)
            if name in damaged or home in (runs if path.name == "recipe.json" else experiments):
                continue
            wrong: list[str] = []
            try:
                if path.name == "recipe.json":
                    runs[home] = _found(path.parent, place, wrong)
                else:
                    experiments[home] = _experiment(home, wrong)
            except LabError as error:
                damaged[name] = Damaged(place, _within(path.parent, error), left_out=True)
            else:
                if wrong:
                    damaged[name] = Damaged(place, "; ".join(wrong), left_out=False)
    if not runs and not experiments and not damaged:
        named = ", ".join(str(folder) for folder in folders)
        raise LabError(f"there are no runs in {named}: make some with kalmannorm demo, train or compare")
    return Collected(list(runs.values()), list(experiments.values()), list(damaged.values()))


def _layer_name(path: Path, given: Path) -> str:
    """The name of the given folder, followed by the path inside it."""
    return plain_text(str(Path(given.resolve().name) / path.relative_to(given)))


def _within(folder: Path, error: LabError) -> str:
    """The message, with file names relative to the folder, because a page may be read on other machines."""
    return plain_text(str(error).replace(f"{folder}/", ""))


def _found(folder: Path, place: str, wrong: list[str]) -> Found:
    """The run, without the parts that cannot be read, which are added to `wrong`.

    Raises an error if the run cannot be shown at all: without a recipe it is unknown what was trained, and without its
    result the run would look unfinished.
    """
    run = Run.read(folder)
    said: list[str] = []
    record = shapes.CIRCUMSTANCES(run.record, "", said)
    _tell(wrong, "recipe.json", said)
    recipe = replace(run.recipe, model=plain_text(run.recipe.model), dataset=plain_text(run.recipe.dataset))
    result, said = run.result_in_part()
    _tell(wrong, "result.json", said)
    events, said = run.events_in_part()
    _tell(wrong, "log.jsonl", said)
    state: State = "unfinished" if result is None else "diverged" if result.get("diverged") else "finished"
    return Found(
        replace(run, recipe=recipe, record=record),
        place,
        state,
        result or {},
        events,
        _analyses(run, wrong),
        _drawing(folder, wrong),
    )


def _tell(wrong: list[str], file: str, said: Sequence[str]) -> None:
    """Add one line per file: its first error, and the number of further errors."""
    if said:
        more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
        wrong.append(f"{file}: {said[0]}{more}")


def _analyses(run: Run, wrong: list[str]) -> dict[str, Record]:
    found = {}
    for name in shapes.ANALYSES:
        try:
            record, said = run.analysis_in_part(name)
        except LabError as error:
            wrong.append(_within(run.folder, error))
            continue
        _tell(wrong, f"analysis/{name}.json", said)
        if record is not None:
            found[name] = record
    return found


def _drawing(folder: Path, wrong: list[str]) -> Element | None:
    path = folder / "wiring.svg"
    try:
        return svg.read(path) if path.is_file() else None
    except LabError as error:
        wrong.append(_within(folder, error))
        return None


def _experiment(home: Path, wrong: list[str]) -> Experiment:
    record = read_json(home / "experiment.json", "delete it, and run the experiment again")
    said: list[str] = []
    fitted = shapes.EXPERIMENT(record, "", said)
    _tell(wrong, "experiment.json", said)
    return Experiment(home, fitted)


def without_twins(runs: Sequence[Found]) -> list[Found]:
    """Of runs with equal numbers, including the seed, the one that ended last counts. The others are marked."""
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
