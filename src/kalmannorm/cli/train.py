"""`kalmannorm train`: one run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kalmannorm.cli.options import execution_options, recipe_options
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.recipe import Execution, Recipe


@recipe_options
@execution_options
def train(
    dataset: Annotated[str, typer.Option("--dataset", "-d", help="See kalmannorm data list.")] = "digits",
    model: Annotated[str | None, typer.Option("--model", help="The data set's own unless given.")] = None,
    method: Annotated[str, typer.Option("--method", help="bn, brn, gn, ln, in, bkn or bkn-learned.")] = "bkn",
    setting: Annotated[
        str | None, typer.Option("--setting", "-s", help="Gradient and statistics batch, such as 128,2.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the weights, the order of the images and augmentation.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder; runs/NAME unless given.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Go on with the run in this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
    *,
    changes: dict[str, Any],
    execution: Execution,
) -> None:
    """Train one model with one normalizer at one setting, into a folder of its own.

    Under torchrun the gradient batch is split over the ranks: torchrun --nproc-per-node 2 -m kalmannorm train …
    """
    from kalmannorm.cli.progress import Bar, result_table

    if resume is not None:
        recipe, folder, execution = _resumed(resume, execution, changes)
    else:
        recipe = _recipe(dataset, model, method, setting, seed, changes)
        folder = out or Path("runs") / f"{recipe.dataset.split(':')[0]}-{recipe.name}"
    recipe.checked()
    from kalmannorm.lab.train import train as run

    with Bar(f"{recipe.method} {recipe.setting}", quiet=as_json) as bar:
        result = run(recipe, folder, execution, resume=resume is not None, watch=bar)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), **result}))
    else:
        result_table(recipe, result, folder)


def _recipe(
    dataset: str, model: str | None, method: str, setting: str | None, seed: int, changes: dict[str, Any]
) -> Recipe:
    from kalmannorm.lab.presets import at_setting, preset
    from kalmannorm.lab.setting import Setting

    recipe = dataclasses.replace(preset(dataset, model), method=method, seed=seed)
    if setting is not None:
        recipe = at_setting(recipe, Setting.parse(setting))
    return dataclasses.replace(recipe, **changes)


def _resumed(folder: Path, execution: Execution, changes: dict[str, Any]) -> tuple[Recipe, Path, Execution]:
    """What the folder says; how it runs may change, what it computes may not."""
    from kalmannorm.lab.records import Run

    if changes:
        options = ", ".join("--" + name.replace("_", "-") for name in changes)
        raise LabError(f"--resume goes on with the recipe of {folder}: leave out {options}")
    run = Run.read(folder)
    saved = {key: value for key, value in run.record.get("execution", {}).items() if value is not None}
    known = {field.name: field for field in dataclasses.fields(Execution)}
    kept = {key: Path(value) if key == "data_root" else value for key, value in saved.items() if key in known}
    kept.pop("device", None)
    given = {key: value for key, value in vars(execution).items() if value != known[key].default}
    return run.recipe, folder, Execution(**{**kept, **given})
