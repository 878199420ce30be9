"""`kalmannorm report`: one HTML page about runs and experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, comparisons or experiments. All runs in them are shown.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option("--figures", help="Folder for each figure as PNG, SVG and CSV. [default: beside the page]"),
    ] = None,
    draw: Annotated[bool, typer.Option("--draw/--no-draw", help="Also write the figures as files.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")] = False,
) -> None:
    """Write one self-contained HTML page about runs: tables, curves, gains, variance gaps, wiring, speed, origins.

    The page opens from disk in any browser and needs no network. Unfinished runs are listed, not averaged.
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
