"""`kalmannorm compare`: train methods × settings × seeds, and write a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kalmannorm_command.options import CLUSTER, OWN, execution_options, recipe_options

if TYPE_CHECKING:
    from kalmannorm.lab.comparing.cells import Cell
    from kalmannorm.lab.files.records import Run
    from kalmannorm.lab.recipes.recipe import Execution


@recipe_options
@execution_options
def compare(
    dataset: Annotated[str, typer.Option("--dataset", "-d", help="Data set. See kalmannorm data list.")] = "digits",
    model: Annotated[
        str | None,
        typer.Option("--model", help=f"Net of the lab, torchvision or timm. See docs/data.md. [default: {OWN}]"),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            "-m",
            help="Comma-separated: bn, bn-ws, brn, mabn, on, gn, gn-ws, ln, in, bkn, bkn-ws, bkn-learned.",
        ),
    ] = "bn,brn,gn,bkn",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            "-s",
            metavar="<str>",
            help="Gradient batch and statistics batch, such as 128,2. May be repeated. "
            "[default: the data set's setting, and its gradient batch as one group]",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per method and setting.")] = 3,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Runs in parallel. [default: one per GPU, or one per core without GPUs]"
        ),
    ] = None,
    cluster: CLUSTER = None,
    analyse: Annotated[
        bool, typer.Option("--analyse/--no-analyse", help="Also analyse the norms of the runs with seed 0.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the runs and the report. [default: runs/DATASET-MODEL]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")] = False,
    *,
    changes: dict[str, Any],
    execution: Execution,
) -> None:
    """Train every method at every setting with every seed, and compare them.

    You may interrupt it at any time. The same command again skips finished runs and resumes the others.
    """
    from kalmannorm.lab.comparing.cells import grid
    from kalmannorm.lab.comparing.cells import seeds as first_seeds
    from kalmannorm.lab.errors import LabError, comma_separated, useless
    from kalmannorm.lab.recipes.methods import method
    from kalmannorm.lab.recipes.presets import preset
    from kalmannorm.lab.recipes.setting import Setting

    recipe = preset(dataset, model)
    chosen = [Setting.parse(setting) for setting in settings or []]
    if not chosen:
        whole = recipe.gradient_batch
        chosen = [Setting(whole, whole), recipe.setting]
    names = comma_separated(methods, "bn,bkn")
    for change in changes:
        if not any(method(name).takes(change) for name in names):
            raise LabError(useless(change, "any of these methods"))
    cells = grid(recipe, names, chosen, first_seeds(seeds), changes)
    folder = out or Path("runs") / f"{recipe.dataset.split(':')[0]}-{recipe.model}".replace("/", "_")
    analysed = [name for name, cell in cells if analyse and cell.seed == 0 and method(cell.method).groups]
    run_and_show(cells, folder, execution, jobs=jobs, cluster=cluster, analyse=analysed, as_json=as_json)


def run_and_show(
    cells: list[Cell],
    folder: Path,
    execution: Execution,
    *,
    jobs: int | None,
    cluster: str | None = None,
    analyse: list[str],
    as_json: bool,
) -> None:
    """Run the cells, then print a table and sentences, and write the report. Failed cells are named last."""
    from kalmannorm.lab.comparing.compare import FailedCellsError, run_cells

    failed: FailedCellsError | None = None
    try:
        runs = run_cells(cells, folder, execution, jobs=jobs, cluster=cluster, analyse=analyse, quiet=as_json)
    except FailedCellsError as error:
        runs, failed = error.runs, error
    if runs or as_json:
        _show(runs, folder, failed.failures if failed else {}, as_json)
    if failed:
        raise failed


def _show(runs: list[Run], folder: Path, failures: dict[str, str], as_json: bool) -> None:
    from kalmannorm.lab.comparing.live import say
    from kalmannorm.lab.comparing.summary import summarize, table
    from kalmannorm.lab.report import write
    from kalmannorm.lab.report.collecting import collect
    from kalmannorm.lab.report.comparison import chapters
    from kalmannorm.lab.report.sentences import findings
    from kalmannorm.lab.words.wording import counted

    rows = summarize(runs)
    found = chapters(collect([folder])) if runs else []
    warned = [warning for chapter in found for warning in chapter.warnings]
    told = [said for chapter in found for comparison in chapter.comparisons for said in findings(comparison)]
    if not as_json:
        epochs = " and ".join(dict.fromkeys(counted(run.recipe.epochs, "epoch") for run in runs))
        for warning in warned:
            typer.echo(f"\n{warning}")
        typer.echo(f"\nTest accuracy in % by way of inference, {epochs}, mean ± standard deviation of the runs\n")
        typer.echo(table(rows))
    report = str(write([folder], folder / "report.html", figures=folder / "figures", tell=say)) if runs else None
    if as_json:
        said = {"warnings": warned, "sentences": told}
        typer.echo(json.dumps({"folder": str(folder), "rows": rows, **said, "failed": failures, "report": report}))
        return
    typer.echo("\n" + "\n".join(told) + f"\n\nThe report: {report}")
