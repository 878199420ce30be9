"""`kalmannorm analyse`: gains, priors and variance gaps of the norms of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kalmannorm_command.options import THREADS, THREADS_DEFAULT

LEGEND = """\
C: channels. q: gain, the weight of the mini-batch. prior off: |prior - observed variance| / observed variance.
gap: mean of |variance used for a group - moving variance| / moving variance.
spread: standard deviation of the variance used, over groups, / its mean.
raw: the same for the variance of the mini-batch alone, without the prior."""


def analyse(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is finished or has a checkpoint.")],
    batches: Annotated[int, typer.Option("--batches", min=1, help="Gradient batches to measure each layer with.")] = 4,
    max_groups: Annotated[
        int | None,
        typer.Option("--max-groups", min=1, help="Groups to measure the variance gap with. [default: all]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or a numbered GPU such as cuda:1.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help=f"{THREADS} [default: {THREADS_DEFAULT}]")
    ] = None,
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Folder of the data sets.")] = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes that read the images of an image folder.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Measure the norms of a run, layer by layer: gain, error of the prior, and variance gap.

    The variance gap is |variance used for a group - moving variance| / moving variance, over the whole training set.
    Results per channel are written to RUN/analysis. kalmannorm report shows them. They are deleted when an unfinished
    run is resumed.
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
