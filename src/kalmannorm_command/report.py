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
    from kalmannorm.lab.report.collecting import collect
    from kalmannorm.lab.report.writing import summarize_collected, write_collected

    folder = (figures or out.parent / f"{out.stem}-figures") if draw else None
    collected = collect(runs)
    write_collected(collected, out, figures=folder, tell=lambda line: typer.echo(f"kalmannorm: {line}", err=True))
    if as_json:
        made = {"page": str(out), "figures": str(folder) if folder else None}
        typer.echo(json.dumps({**made, **summarize_collected(collected)}, indent=1))
        return
    typer.echo(f"Wrote {out}" + (f", and its figures as files into {folder}" if folder else ""))
