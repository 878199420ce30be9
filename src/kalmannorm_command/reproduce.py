"""`kalmannorm reproduce`: run an experiment of the paper."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kalmannorm_command.options import CLUSTER, OWN, execution_options, recipe_options

if TYPE_CHECKING:
    from kalmannorm.lab.files.records import Record
    from kalmannorm.lab.recipes.recipe import Execution


@functools.partial(recipe_options, evaluate_every="1, or a 20th of the training if that is less")
@execution_options
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Name of the experiment. See --list.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--list", help="List the experiments and their questions.")] = False,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "-d",
            help="Data set. Others than the paper's, such as digits, are stand-ins. [default: the paper's]",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help=f"Net of the lab, torchvision or timm. [default: {OWN}]")
    ] = None,
    budget: Annotated[
        float,
        typer.Option("--budget", help="Length of training relative to the data set's full recipe: 0.5 is half of it."),
    ] = 1.0,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Runs per table row. [default: 3, or 1 on ImageNet]")
    ] = None,
    paper_only: Annotated[
        bool, typer.Option("--paper-only", help="Leave out the rows that the paper does not have.")
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option("--rows", help="Run only these rows, such as bn-128x2,bkn-128x2. [default: all]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the runs and the report. [default: runs/NAME-DATASET]"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Fail if there is nothing to resume. The command resumes without it, too.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Runs in parallel. [default: one per GPU, or one per core without GPUs]"
        ),
    ] = None,
    cluster: CLUSTER = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the record, as JSON.")] = False,
    *,
    changes: dict[str, Any],
    execution: Execution,
) -> None:
    """Run an experiment of the paper, on the paper's data or on a smaller data set as a stand-in.

    Tables show our numbers beside the paper's. Runs, record and report are written to one folder. The same command
    again skips finished runs. docs/experiments.md lists costs and differences from the paper.
    """
    from kalmannorm.lab.errors import LabError
    from kalmannorm.lab.experiments.catalogue import EXPERIMENTS, experiment

    if every:
        _list(EXPERIMENTS.values(), as_json)
        return
    if name is None:
        raise LabError(f"name an experiment: {', '.join(EXPERIMENTS)}")
    chosen = experiment(name)
    from kalmannorm.lab.experiments.planning import Wanted
    from kalmannorm.lab.experiments.reproducing import reproduce as run

    chosen_rows = () if rows is None else tuple(name.strip() for name in rows.split(","))
    wanted = Wanted(dataset, model, budget, seeds, paper_only, chosen_rows, changes)
    with _rounds(chosen.timed and not as_json) as watch:
        done = run(
            chosen, wanted, out, execution, resume=resume, jobs=jobs, cluster=cluster, quiet=as_json, watch=watch
        )
    if as_json:
        typer.echo(json.dumps({"folder": str(done.folder), "report": str(done.page), **done.record}))
    else:
        _show(done.record, done.page)
    if done.failure is not None:
        raise done.failure


def _list(experiments: Any, as_json: bool) -> None:
    if as_json:
        rows = [{key: getattr(each, key) for key in ("name", "title", "question", "source")} for each in experiments]
        typer.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=False)
    for heading in ("name", "in the paper", "data", "question"):
        table.add_column(heading)
    for each in experiments:
        table.add_row(each.name, each.source, ", ".join(each.datasets), each.question)
    Console().print(table)


@contextmanager
def _rounds(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over the rounds of timed steps, if `shown`."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task("timing steps", total=None)
        yield lambda done, rounds: progress.update(task, completed=done, total=rounds)


def _show(record: Record, page: Path | None) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kalmannorm.lab.report.columns import is_papers, texts

    console = Console(highlight=False)
    console.print(f"[bold]{record['title']}[/bold], {record['source']} of the paper")
    for warning in record["warnings"]:
        console.print(Text(warning, style="yellow"))
    if record["stand_in"]:
        console.print("[yellow]A stand-in[/yellow]: another data set or net than the paper's")
    for content in record["tables"]:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        for heading in content["columns"]:
            table.add_column(heading, style="dim" if is_papers(heading) else "", overflow="fold")
        for row in texts(content):
            table.add_row(*row)
        # A title of the table would be wrapped at the width of the table.
        console.print(Text(f"\n{content['title']}", style="italic"), table, content["note"])
    for note in record["notes"]:
        console.print(f"- {note}", markup=False)
    console.print(f"The page: {page}", markup=False, soft_wrap=True)
