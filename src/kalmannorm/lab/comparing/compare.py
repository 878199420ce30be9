"""Many runs in worker processes, here or on a cluster. Finished runs are kept, and interrupted ones are resumed.

A cell that diverges has a result like any other. If a cell fails, the others continue, and it is named at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

from kalmannorm.lab import models
from kalmannorm.lab.comparing import cells as table
from kalmannorm.lab.comparing.cells import Cell
from kalmannorm.lab.comparing.cluster import connected
from kalmannorm.lab.comparing.live import say, screen
from kalmannorm.lab.comparing.pool import Listener, Outcome, perform, seats
from kalmannorm.lab.comparing.worker import Task, Watch
from kalmannorm.lab.errors import DivergedError, Interrupted, LabError
from kalmannorm.lab.files.records import Record, Run, usable
from kalmannorm.lab.machine.origin import command
from kalmannorm.lab.machine.ranks import by_slurm
from kalmannorm.lab.recipes import fitting
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.words.wording import counted, listed

Trainer = Callable[..., Record]
"""`kalmannorm.lab.training.train.train`, or its replacement in a test."""


class FailedCellsError(LabError):
    """Some cells failed, each with its reason. `runs` are all runs that have a result."""

    status = 1

    def __init__(self, failures: dict[str, str], total: int, runs: list[Run]) -> None:
        self.failures, self.runs = failures, runs
        names: dict[str, list[str]] = {}
        for name, reason in failures.items():
            names.setdefault(reason, []).append(name)
        if len(names) == 1 and len(failures) == total > 1:
            super().__init__(f"all {total} runs failed: {next(iter(names))}")
            return
        lines = "".join(f"\n  {_listed(own)}: {reason}" for reason, own in names.items())
        head = f"{len(failures)} of {counted(total, 'run')} failed; the same command keeps the rest and tries again"
        super().__init__(f"{head}:{lines}")


def _listed(names: list[str]) -> str:
    return listed(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    execution: Execution,
    *,
    jobs: int | None = None,
    cluster: str | None = None,
    quiet: bool = False,
    analyse: Collection[str] = (),
    trainer: Trainer | None = None,
) -> list[Run]:
    """Train every cell into `folder/NAME`, as many at a time as there are GPUs, or cores if there is no GPU.

    Finished cells are skipped, and unfinished ones continue from their checkpoint. The cells named in `analyse` are
    analysed after training. With `cluster`, the address of a Dask scheduler or its file, the workers of that cluster
    train the cells. Raises `FailedCellsError` after the last cell if some failed, and `Interrupted` after Ctrl-C, when
    every worker has saved.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or by_slurm():
        raise LabError("many runs share the GPUs without torchrun and srun: start the command once, without them")
    cells, execution = table.checked(cells), execution.checked()
    if cluster is None:  # else the workers check their own machine
        for _, recipe in cells:
            fitting.checked(recipe, execution)
    elif jobs is not None:
        raise LabError("--jobs is for one machine: leave it out, because the workers of --cluster share the runs")
    for model in sorted({recipe.model for _, recipe in cells}):
        models.check_known(model)
    usable(folder)
    todo = [
        (name, recipe)
        for name, recipe in cells
        if not table.finished(folder / name, recipe) or (name in analyse and not _analysed(folder / name))
    ]
    outcomes: list[Outcome] = []
    if not todo:
        if not quiet:
            say(f"all {len(cells)} runs are already finished")
    else:
        with _engine(cluster, jobs, execution, len(todo), quiet) as (workers, performed):
            tasks = [
                Task(
                    name.replace("/", "_"),
                    functools.partial(_cell, Path.cwd(), recipe, folder / name, execution, name in analyse, trainer),
                )
                for name, recipe in todo
            ]
            with screen(cells, todo, folder, workers=workers, quiet=quiet) as shown:
                outcomes = performed(tasks, folder.absolute() / "output", shown)
        with contextlib.suppress(OSError):  # nothing was printed
            (folder / "output").rmdir()
    return _gathered(cells, folder, dict(zip((name for name, _ in todo), outcomes, strict=True)))


Performer = Callable[[Sequence[Task], Path, Listener], list[Outcome]]


@contextlib.contextmanager
def _engine(
    cluster: str | None, jobs: int | None, execution: Execution, most: int, quiet: bool
) -> Iterator[tuple[int, Performer]]:
    """How many tasks run at a time, and the function that runs them: here, or on the workers of a cluster."""
    if cluster is None:
        places = seats(execution.device, jobs, execution.threads)[:most]
        yield len(places), lambda tasks, output, listener: perform(tasks, places, output, listener)
        return
    with connected(cluster) as there:
        if not (there.workers or quiet):
            say("the cluster has no workers yet: waiting for them")
        yield (
            max(there.workers, 1),
            lambda tasks, output, listener: there.perform(tasks, execution.device, execution.threads, output, listener),
        )


def _gathered(cells: Sequence[Cell], folder: Path, outcomes: dict[str, Outcome]) -> list[Run]:
    """Read from disk which cells are finished, because a worker may be interrupted right after it wrote its result."""
    runs = [Run.read(folder / name) for name, recipe in cells if table.finished(folder / name, recipe)]
    if any(outcome.kind == "interrupted" for outcome in outcomes.values()):
        raise Interrupted(
            f"{len(runs)} of {len(cells)} runs are finished, running ones are saved; resume with: {command()}"
        )
    failures = {name: outcome.reason for name, outcome in outcomes.items() if outcome.kind == "failed"}
    if failures:
        raise FailedCellsError(failures, len(cells), runs)
    return runs


def _cell(
    here: Path,
    recipe: Recipe,
    folder: Path,
    execution: Execution,
    analysed: bool,
    trainer: Trainer | None,
    device: str,
    watch: Watch,
) -> None:
    """Runs in a worker: train and analyse the cell, as far as it is not done yet. Paths start at the folder `here`."""
    os.chdir(here)  # a worker of a cluster may have been started elsewhere
    execution = dataclasses.replace(execution, device=device)
    try:
        _trainer(trainer)(recipe, folder, execution, resume=True, watch=watch)  # does nothing for a finished run
        if analysed and not _analysed(folder):
            from kalmannorm.lab.analysis.analyse import analyse

            watch({"event": "analyse"})
            analyse(folder, device=device, data_root=execution.data_root, workers=execution.workers)
    except DivergedError:
        if not Run.read(folder).finished:
            raise
    finally:
        if device != "cpu":  # other workers may share the GPU
            gc.collect()
            torch.cuda.empty_cache()


def _trainer(given: Trainer | None) -> Trainer:
    if given is None:
        from kalmannorm.lab.training.train import train

        return train
    return given


def _analysed(folder: Path) -> bool:
    """Whether the analysis is done. A diverged network is not analysed."""
    run = Run.read(folder)
    result = run.result
    return run.analysis("variance-gap") is not None or bool(result and result["diverged"])
