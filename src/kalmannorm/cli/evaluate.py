"""`kalmannorm evaluate`: a trained run in every way of inference, and with recalibrated statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    modes: Annotated[
        str | None, typer.Option("--modes", help="population, batch, example; all that it has unless given.")
    ] = None,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate/--no-recalibrate", help="Also with statistics of the whole training set.")
    ] = True,
    batch: Annotated[int | None, typer.Option("--batch", help="Test images at a time.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")] = "auto",
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Where data sets are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Test a run in the three ways of inference: population, batch, example; and recalibrated.

    Recalibrated is population inference with the statistics that the training set shows, in place of moving averages.
    The scores are also written to RUN/evaluation.json.
    """
    from rich.console import Console
    from rich.table import Table

    from kalmannorm.lab.evaluate import evaluate as scores_of
    from kalmannorm.lab.evaluate import recalibrated
    from kalmannorm.lab.loading import load_run
    from kalmannorm.lab.methods import method
    from kalmannorm.lab.records import write_json

    loaded = load_run(run, device=device, data_root=data_root)
    recipe = loaded.run.recipe
    chosen = [mode.strip() for mode in modes.split(",")] if modes else None
    scores = scores_of(loaded.model, loaded.data, recipe, modes=chosen, batch=batch)
    if recalibrate and method(recipe.method).groups:
        model = recalibrated(loaded.model, loaded.data, recipe)
        again = scores_of(model, loaded.data, recipe, modes=["population"], batch=batch)
        scores["recalibrated"] = again["population"]
    write_json(run / "evaluation.json", {"scores": scores, "batch": batch})
    if as_json:
        typer.echo(json.dumps(scores))
        return
    table = Table(
        title_justify="left",
        title=f"{recipe.model}, {recipe.method} {recipe.setting}, {loaded.data.test_size} test images",
    )
    names = list(next(iter(scores.values())))
    table.add_column("inference")
    for name in names:
        table.add_column(name if name == "loss" else f"{name} %", justify="right")
    for mode, found in scores.items():
        table.add_row(mode, *(f"{found[name]:.4f}" if name == "loss" else f"{found[name]:.2f}" for name in names))
    Console().print(table)
