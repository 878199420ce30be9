"""`kalmannorm train`: one run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kalmannorm_command.options import OWN, given_execution_options, recipe_options

if TYPE_CHECKING:
    from kalmannorm.lab.recipes.recipe import Recipe


@recipe_options
@given_execution_options
def train(
    dataset: Annotated[
        str | None, typer.Option("--dataset", "-d", help="See kalmannorm data list. [default: digits]")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help=f"See docs/data.md. [default: {OWN}]")] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="bn, brn, gn, ln, in, bkn or bkn-learned. [default: bkn]")
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option("--setting", "-s", help=f"Gradient and statistics batch, such as 128,2. [default: {OWN}]"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of the weights, the order of the images and augmentation. [default: 0]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The run's folder. [default: runs/DATASET-MODEL-METHOD-SETTING-sSEED]"),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with the run in this folder, by its recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
    *,
    changes: dict[str, Any],
    execution: dict[str, Any],
) -> None:
    """Train one model with one normalizer at one setting, into a folder of its own.

    What is a data set's own is in docs/data.md, and in RUN/recipe.json afterwards.

    A folder that holds a run is refused; --resume goes on with it.

    Under torchrun the gradient batch is split over the ranks: torchrun --nproc-per-node 2 -m kalmannorm train …

    Under torchrun, and in a job that Slurm has requeued, the same command is start and restart: if the folder holds a
    run of the same recipe, it goes on from the last checkpoint, and a finished run is left as it is. So torchrun
    --max-restarts 3 survives the loss of a rank. A run of another recipe is refused.
    """
    from kalmannorm.lab.errors import FullDiskError, LabError
    from kalmannorm.lab.recipes.recipe import Execution
    from kalmannorm.lab.training.launcher import gives_again
    from kalmannorm_command.progress import Bar, crowded, result_table

    own = {"dataset": dataset, "model": model, "method": method, "setting": setting, "seed": seed, "out": out}
    if resume is not None:
        given = [name for name, value in (own | changes).items() if value is not None]
        recipe, folder = _resumed(resume, given), resume
        how = Execution(**{**_saved_execution(folder), **execution})
    else:
        recipe = _recipe(dataset or "digits", model, method or "bkn", setting, seed or 0, changes)
        folder = out or Path("runs") / f"{recipe.dataset.split(':')[0]}-{recipe.name}"
        how = Execution(**execution)
    recipe.checked()
    finished = (resume is not None or gives_again()) and (folder / "result.json").is_file()
    from kalmannorm.lab.training.train import train as run

    with Bar(f"{recipe.method} {recipe.setting}", quiet=as_json) as bar:
        if not finished and how.threads is None and (hint := crowded()):
            bar.say(hint)
        try:
            result = run(recipe, folder, how, resume=resume is not None, watch=bar)
        except FullDiskError as error:
            if not (folder / "recipe.json").is_file():  # nothing has begun
                raise
            raise LabError(f"{error.problem}: free some, then go on with: kalmannorm train --resume {folder}") from None
        if finished:
            bar.say(f"{folder} was finished already: nothing is trained")
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), **result}))
    else:
        result_table(recipe, result, folder)


def _recipe(
    dataset: str, model: str | None, method: str, setting: str | None, seed: int, changes: dict[str, Any]
) -> Recipe:
    from kalmannorm.lab.errors import LabError, useless
    from kalmannorm.lab.recipes.methods import method as normalizer
    from kalmannorm.lab.recipes.presets import at_setting, changed, preset
    from kalmannorm.lab.recipes.setting import Setting

    recipe = dataclasses.replace(preset(dataset, model), method=method, seed=seed)
    for name in changes:
        if not normalizer(method).takes(name):
            raise LabError(useless(name, normalizer(method).title))
    if setting is not None:
        recipe = at_setting(recipe, Setting.parse(setting))
    return changed(recipe, changes)


def _resumed(folder: Path, given: list[str]) -> Recipe:
    """What the folder says; how it runs may change, what it computes may not."""
    from kalmannorm.lab.errors import LabError, option
    from kalmannorm.lab.files.records import Run

    if given:
        options = ", ".join(map(option, given))
        raise LabError(f"--resume goes on with the recipe of {folder}: leave out {options}")
    return Run.read(folder).recipe


def _saved_execution(folder: Path) -> dict[str, Any]:
    """How it ran before, but for the device, which may be another now, and more threads than this machine allows."""
    from kalmannorm.lab.errors import LabError
    from kalmannorm.lab.files.records import Run
    from kalmannorm.lab.machine.devices import check_threads

    saved = vars(Run.read(folder).execution)
    unfit = {"device"}
    try:
        check_threads(saved["threads"])
    except LabError:
        unfit.add("threads")
    return {name: value for name, value in saved.items() if name not in unfit}
