"""Runs an experiment: trains its cells, collects their results with the paper's numbers, and writes the page.

FOLDER/experiment.json    tables, figures and notes; see docs/experiments.md
FOLDER/CELL/              one run each, as written by `kalmannorm train`
FOLDER/report.html        the page of `kalmannorm report`, with its figures/
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kalmannorm.lab import report
from kalmannorm.lab.comparing.compare import FailedCellsError, run_cells
from kalmannorm.lab.comparing.live import say
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.experiments import speed, tables
from kalmannorm.lab.experiments.planning import Plan, Wanted, default_folder, plan
from kalmannorm.lab.experiments.results import Results, of_cells, read_results
from kalmannorm.lab.experiments.spec import Arm, Experiment, Role
from kalmannorm.lab.experiments.widths import TOLERANCE
from kalmannorm.lab.files.records import Record, usable, write_json
from kalmannorm.lab.machine.devices import on_threads
from kalmannorm.lab.machine.origin import origin
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.report.trained import caveats
from kalmannorm.lab.words.wording import counted

Runner = Callable[..., Sequence[Any]]
"""`kalmannorm.lab.comparing.compare.run_cells`, or its replacement in a test."""


@dataclass(frozen=True)
class Reproduced:
    """The content of experiment.json, its folder, the page, and the error that names failed cells, if any."""

    record: Record
    folder: Path
    page: Path | None
    failure: FailedCellsError | None = None


def reproduce(
    experiment: Experiment,
    wanted: Wanted,
    folder: Path | None = None,
    execution: Execution | None = None,
    *,
    resume: bool = False,
    jobs: int | None = None,
    cluster: str | None = None,
    quiet: bool = False,
    page: bool = True,
    runner: Runner = run_cells,
    watch: speed.Watch | None = None,
) -> Reproduced:
    """Run the experiment in a folder and write its record and its page.

    Finished cells of the same recipe are kept, and unfinished ones are resumed. With `resume` there must be some.
    `cluster` is a Dask cluster for the cells, as in `run_cells`. `watch` is called with the rounds if steps are timed.
    """
    execution = (execution or Execution()).checked()
    folder = folder or default_folder(experiment, wanted)
    usable(folder)
    if resume and not any(folder.glob("*/recipe.json")):
        raise LabError(f"there is nothing to resume in {folder}: leave out --resume, or correct --out")
    if experiment.timed and cluster is not None:
        raise LabError("the steps of this experiment are timed on this machine: leave out --cluster")
    chosen = plan(experiment, wanted, execution)
    failure: FailedCellsError | None = None
    if experiment.timed:
        with on_threads(execution.threads):
            timings = speed.time_steps(chosen, execution, watch)
        record = _record(chosen, {}, [speed.speed_table(chosen, timings)])
        record["timings"] = timings
    else:
        try:
            _run(chosen, folder, execution, quiet, functools.partial(runner, jobs=jobs, cluster=cluster))
        except FailedCellsError as error:
            failure = error
        results = read_results(chosen, folder)
        if failure is not None and not results:
            raise failure
        record = _record(chosen, results, _tables(chosen, results))
    write_json(folder / "experiment.json", record)
    written = report.write([folder], folder / "report.html", figures=folder / "figures", tell=say) if page else None
    return Reproduced(record, folder, written, failure)


def _run(chosen: Plan, folder: Path, execution: Execution, quiet: bool, runner: Runner) -> None:
    cells: list[tuple[str, Recipe]] = [(cell.folder, cell.recipe) for cell in chosen.cells]
    analysed = [name for name, _ in cells] if chosen.experiment.analysed else []
    runner(cells, folder, execution, quiet=quiet, analyse=analysed)


def _tables(chosen: Plan, results: Results) -> list[Record]:
    return [
        *tables.accuracy_tables(chosen, results),
        *tables.claims_table(chosen, results),
        *tables.steps_table(chosen, results),
        *tables.gap_tables(chosen, results),
    ]


def _record(chosen: Plan, results: Results, found: list[Record]) -> Record:
    experiment = chosen.experiment
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "source": experiment.source,
        "dataset": ", ".join(chosen.datasets),
        "models": list(chosen.models.values()),
        "budget": chosen.budget,
        "seeds": chosen.seeds,
        "stand_in": chosen.stand_in,
        "origin": origin(),
        "warnings": caveats([run.ended for run in results.values()]),
        "tables": found,
        "figures": _figures(chosen, results),
        "notes": _notes(chosen, results),
    }


def _figures(chosen: Plan, results: Results) -> list[Record]:
    figures: list[Record] = []
    titles = dict(chosen.experiment.columns)
    for dataset in chosen.datasets:
        for role, model in chosen.models.items():
            lines = [(arm.label, _folders(chosen, results, arm, role, dataset)) for arm in chosen.arms]
            lines = [(label, runs) for label, runs in lines if runs]
            for mode in chosen.experiment.curves:
                groups = [
                    {"label": label, "runs": runs}
                    for label, runs in lines
                    if any(mode in results[run].result["accuracy"] for run in runs)
                ]
                title = f"{model} on {dataset}, {titles[mode]}"
                figures.append({"kind": "curves", "title": title, "mode": mode, "y": "accuracy", "groups": groups})
            if chosen.experiment.analysed:
                first = [{"label": label, "run": runs[0]} for label, runs in lines]
                figures.append({"kind": "variance-gap", "title": f"Variance gap, {model} on {dataset}", "runs": first})
    return figures


def _folders(chosen: Plan, results: Results, arm: Arm, role: Role, dataset: str) -> list[str]:
    return [cell.folder for cell in chosen.of(arm, role, dataset) if cell.folder in results]


def _notes(chosen: Plan, results: Results) -> list[str]:
    experiment = chosen.experiment
    notes = []
    if chosen.stand_in:
        real = f"{' and '.join(experiment.datasets)}"
        notes.append(f"This is a stand-in: the paper uses {real}, its own networks and all images.")
    if chosen.budget != 1 and not experiment.timed:
        notes.append(f"The length of training is {chosen.budget:g} of the full length.")
    if chosen.rows:
        notes.append(f"--rows chose {len(chosen.arms)} of {counted(len(experiment.arms), 'row')}.")
    for dataset in chosen.datasets:
        for role, model in chosen.models.items():
            for arm in chosen.arms:
                cells = chosen.of(arm, role, dataset)
                found = of_cells(cells, results)
                line = f"{model} with {arm.label} on {dataset}"
                lost = sum(bool(run.result["diverged"]) for run in found)
                if lost:
                    notes.append(f"{line}: {lost} of {counted(len(found), 'seed')} diverged.")
                if len(found) < len(cells) and not experiment.timed:
                    notes.append(f"{line}: {len(found)} of {counted(len(cells), 'seed')} finished.")
    return [*notes, *_unmatched(chosen, results), *experiment.notes]


def _unmatched(chosen: Plan, results: Results) -> list[str]:
    """Notes on arms whose number of parameters cannot match BKN's with whole channels."""
    notes = []
    wanted = {run.run.recipe.dataset: run.result["parameters"] for run in _of_method(chosen, results, "bkn-learned")}
    for cell in chosen.cells:
        if cell.arm.wide and cell.folder in results and cell.recipe.dataset in wanted:
            off = results[cell.folder].result["parameters"] / wanted[cell.recipe.dataset] - 1
            if abs(off) > TOLERANCE:
                notes.append(
                    f"{cell.arm.label}: {off:+.1%} parameters compared with BKN learned, the nearest in whole channels."
                )
    return list(dict.fromkeys(notes))


def _of_method(chosen: Plan, results: Results, method: str) -> list[Any]:
    return [results[cell.folder] for cell in chosen.cells if cell.arm.method == method and cell.folder in results]
