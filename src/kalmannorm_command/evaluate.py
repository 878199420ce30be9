"""`kalmannorm evaluate`: test a trained run in every inference mode, and with recalibrated statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kalmannorm_command.options import THREADS, THREADS_DEFAULT


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is finished or has a checkpoint.")],
    modes: Annotated[
        str | None,
        typer.Option("--modes", help="Comma-separated: population, batch, example. [default: all that the method has]"),
    ] = None,
    recalibrate: Annotated[
        bool,
        typer.Option("--recalibrate/--no-recalibrate", help="Also test with statistics of the whole training set."),
    ] = True,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Test images per batch. [default: about as many as in training]")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or a numbered GPU such as cuda:1.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help=f"{THREADS} [default: {THREADS_DEFAULT}]")
    ] = None,
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Folder of the data sets.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Test a run in the inference modes population, batch and example, and recalibrated.

    Recalibrated is population inference with statistics of the whole training set instead of running statistics. Of an
    unfinished run the last checkpoint is tested. The results are also written to RUN/evaluation.json. That file is
    deleted when the run is resumed.
    """
    from rich.console import Console
    from rich.table import Table

    from kalmannorm.lab.errors import comma_separated
    from kalmannorm.lab.files.records import writable, write_json
    from kalmannorm.lab.machine.devices import on_threads
    from kalmannorm.lab.recipes.methods import method
    from kalmannorm.lab.training.evaluate import evaluate as scores_of
    from kalmannorm.lab.training.evaluate import recalibrated
    from kalmannorm.lab.training.loading import load_run
    from kalmannorm.lab.words.naming import row_name
    from kalmannorm.lab.words.wording import counted

    with on_threads(threads):
        loaded = load_run(run, device=device, data_root=data_root)
        writable(run / "evaluation.json")
        recipe = loaded.run.recipe
        chosen = comma_separated(modes, "population,batch") if modes else None
        scores = scores_of(loaded.model, loaded.data, recipe, modes=chosen, batch=batch)
        if recalibrate and method(recipe.method).groups:
            model = recalibrated(loaded.model, loaded.data, recipe)
            again = scores_of(model, loaded.data, recipe, modes=["population"], batch=batch)
            scores["recalibrated"] = again["population"]
    record = {"scores": scores, "batch": batch, "step": loaded.step, "steps": loaded.steps}
    write_json(run / "evaluation.json", record)
    if as_json:
        typer.echo(json.dumps(record))
        return
    images = counted(loaded.data.test_size, "test image")
    title = f"{recipe.model}, {row_name(recipe)}, {images}{loaded.position}"
    table = Table()
    names = list(next(iter(scores.values())))
    table.add_column("inference")
    for name in names:
        table.add_column(name if name == "loss" else f"{name} %", justify="right")
    for mode, found in scores.items():
        table.add_row(mode, *(f"{found[name]:.4f}" if name == "loss" else f"{found[name]:.2f}" for name in names))
    console = Console()
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
