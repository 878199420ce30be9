"""`kalmannorm reproduce`: an experiment of the paper by its name."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kalmannorm_command.options import execution_options, recipe_options

if TYPE_CHECKING:
    from kalmannorm.lab.files.records import Record
    from kalmannorm.lab.recipes.recipe import Execution


@functools.partial(recipe_options, evaluate_every="1, or 20 in a training if that is more often")
@execution_options
def reproduce(
    name: Annotated[str | None, typer.Argument(help="The experiment; --list names them.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--list", help="List the experiments and what they ask.")] = False,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", "-d", help="The paper's own unless given; digits and the like are stand-ins."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The data set's own unless given.")] = None,
    budget: Annotated[
        float,
        typer.Option("--budget", help="Length of training: 1 is the data set's full recipe, 0.5 half of it."),
    ] = 1.0,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Runs of each line; 3 unless given, 1 on ImageNet.")
    ] = None,
    paper_only: Annotated[bool, typer.Option("--paper-only", help="Leave out the lines that the paper lacks.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="runs/NAME-DATASET unless given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Insist on going on; the same command does anyway.")] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, and nothing else.")] = False,
    *,
    changes: dict[str, Any],
    execution: Execution,
) -> None:
    """Run one of the paper's experiments, on its own data or on a small stand-in.

    Tables show our numbers beside the paper's; runs, record and page lie in one folder. The same command again keeps
    what is finished. docs/experiments.md says what each one costs and where it differs from the paper.
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

    wanted = Wanted(dataset, model, budget, seeds, paper_only, changes)
    with _rounds(chosen.timed and not as_json) as watch:
        done = run(chosen, wanted, out, execution, resume=resume, jobs=jobs, quiet=as_json, watch=watch)
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
    """A bar over the rounds of timed steps, where it is wanted."""
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
        # Not as the table's title, which would be broken to the width of the table.
        console.print(Text(f"\n{content['title']}", style="italic"), table, content["note"])
    for note in record["notes"]:
        console.print(f"- {note}", markup=False)
    console.print(f"The page: {page}", markup=False, soft_wrap=True)
