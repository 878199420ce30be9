"""`kalmannorm report`: one page that shows what runs and experiments found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, comparisons or experiments; all that lies in them is shown.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option("--figures", help="Where each figure goes as PNG, SVG and CSV; beside the page unless given."),
    ] = None,
    draw: Annotated[
        bool, typer.Option("--draw/--no-draw", help="Whether to write the figures as files at all.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    """Write one self-contained page about runs: tables, curves, gains, variance gaps, wiring, speed, origins.

    It opens from disk in any browser and needs no network. Unfinished runs are listed, not averaged.
    """
    from kalmannorm.lab.report import summarize, write
    from kalmannorm.lab.report.collecting import collect

    folder = (figures or out.parent / f"{out.stem}-figures") if draw else None
    write(runs, out, figures=folder)
    if as_json:
        typer.echo(
            json.dumps({"page": str(out), "figures": str(folder) if folder else None, **summarize(runs)}, indent=1)
        )
        return
    for broken in collect(runs).damaged:
        typer.echo(f"kalmannorm: left out {broken.place}: {broken.message}", err=True)
    typer.echo(f"Wrote {out}" + (f", and its figures as files into {folder}" if folder else ""))
