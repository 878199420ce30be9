"""`kalmannorm train`: train one run."""

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
        str | None, typer.Option("--dataset", "-d", help="Data set. See kalmannorm data list. [default: digits]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help=f"Net of the lab, torchvision or timm. See docs/data.md. [default: {OWN}]"),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="Normalizer: bn, bn-ws, brn, mabn, on, gn, gn-ws, ln, in, bkn, bkn-ws or bkn-learned. [default: bkn]",
        ),
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option("--setting", "-s", help=f"Gradient batch and statistics batch, such as 128,2. [default: {OWN}]"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of the weights, the order of the images and the augmentation. [default: 0]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the run. [default: runs/DATASET-MODEL-METHOD-SETTING-sSEED]"),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Resume the run in this folder, with its own recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")] = False,
    *,
    changes: dict[str, Any],
    execution: dict[str, Any],
) -> None:
    """Train one model with one normalizer at one setting.

    docs/data.md lists the defaults of each data set. RUN/recipe.json holds the values that a run used.

    A folder that already holds a run is refused. Resume that run with --resume.

    Under torchrun the gradient batch is split over the ranks: torchrun --nproc-per-node 2 -m kalmannorm train …

    Under torchrun, and in a job that Slurm has requeued, the same command also restarts a run. If the folder holds an
    unfinished run of the same recipe, that run is resumed from its last checkpoint. A finished run stays unchanged. A
    run of another recipe is refused. So torchrun --max-restarts 3 survives the loss of a rank.
    """
    from kalmannorm.lab.errors import FullDiskError, LabError
    from kalmannorm.lab.recipes.recipe import Execution
    from kalmannorm.lab.training.launcher import repeats_commands
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
    finished = (resume is not None or repeats_commands()) and (folder / "result.json").is_file()
    from kalmannorm.lab.training.train import train as run

    with Bar(f"{recipe.method} {recipe.setting}", quiet=as_json) as bar:
        if not finished and how.threads is None and (hint := crowded()):
            bar.say(hint)
        try:
            result = run(recipe, folder, how, resume=resume is not None, watch=bar)
        except FullDiskError as error:
            if not (folder / "recipe.json").is_file():  # the run has not begun
                raise
            raise LabError(
                f"{error.problem}: free some, then resume with: kalmannorm train --resume {folder}"
            ) from None
        if finished:
            bar.say(f"{folder} is already finished: nothing to train")
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
    """The recipe in the folder. `given` are recipe options on the command line, which a resumed run must not change."""
    from kalmannorm.lab.errors import LabError, option
    from kalmannorm.lab.files.records import Run

    if given:
        options = ", ".join(map(option, given))
        raise LabError(f"--resume uses the recipe in {folder}: leave out {options}")
    return Run.read(folder).recipe


def _saved_execution(folder: Path) -> dict[str, Any]:
    """The execution of the run before, without the device, and without threads that this machine does not allow."""
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
