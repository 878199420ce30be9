"""`kalmannorm analyse`: what the norms of a run predict, see and use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kalmannorm_command.options import THREADS

LEGEND = """\
C: channels. q: trust in the mini-batch. prior off: |prior - observed variance| / observed.
gap: mean of |variance that normalizes a group - moving variance| / moving variance.
spread: standard deviation of that variance over groups / its mean.
raw: of the mini-batch alone, before the prior corrects it."""


def analyse(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or with a checkpoint.")],
    batches: Annotated[int, typer.Option("--batches", min=1, help="Gradient batches for the layers' statistics.")] = 4,
    max_groups: Annotated[
        int | None,
        typer.Option("--max-groups", min=1, help="Stop the variance gap after so many groups. [default: all]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help=f"{THREADS} [default: as torch sees fit]")
    ] = None,
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Where data sets are kept.")] = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes that read an image folder.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Look at the norms of a run: gain, prior against observation, and the variance gap, layer by layer.

    The gap is the variance that training normalizes a group with, minus the moving variance, relative to the latter,
    over the whole training set. What is found per channel goes to RUN/analysis, where kalmannorm report reads it; it is
    deleted when an unfinished run goes on.
    """
    from kalmannorm.lab.analysis.analyse import analyse as look
    from kalmannorm.lab.machine.devices import on_threads

    with on_threads(threads):
        found = look(
            run, batches=batches, max_groups=max_groups, device=device, data_root=data_root, workers=workers
        ).summary()
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    position = "" if found["step"] == found["steps"] else f", at step {found['step']} of {found['steps']}"
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold", min_width=16)
    for heading in ("C", "q", "prior off", "gap", "raw gap", "spread", "raw spread"):
        table.add_column(heading, justify="right")
    names = ("mean_abs", "observed_mean_abs", "spread", "observed_spread")
    for row in found["layers"]:
        numbers = [row["gain"], row["prior_error"], *(row[name] for name in names)]
        table.add_row(row["name"], str(row["channels"]), *("" if n is None else f"{n:.3f}" for n in numbers))
    overall = found["overall"]
    table.add_section()
    table.add_row("all", "", "", "", *(f"{overall[name]:.3f}" for name in names))
    console = Console()
    console.print(f"Norms of {run}{position}", highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(LEGEND, highlight=False)
    console.print(f"Written to {run / 'analysis'}", highlight=False, markup=False, soft_wrap=True)
