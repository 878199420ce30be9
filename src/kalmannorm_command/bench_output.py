"""Output of the benchmarks: one table per finished case, or JSON at the end. The CSV file grows case by case."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from kalmannorm.lab.bench.turns import Watch

Rows = list[dict[str, Any]]
Columns = dict[str, list[str]]
WIDTH = 96

Rounds = Annotated[int, typer.Option("--rounds", help="Samples of each contender. Contenders take turns.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or a numbered GPU such as cuda:1.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads. [default: torch decides]")]
Output = Annotated[
    Path | None, typer.Option("--out", "-o", help="Also write a CSV file, with hardware, versions and command.")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Also plot the ratios to a .png or .svg file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


def ready(device: str, threads: int | None, output: Path | None, plot: Path | None) -> torch.device:
    """Check the options that all benchmarks share, and return the device, made the current one."""
    import torch

    from kalmannorm.lab.bench.output import check_paths
    from kalmannorm.lab.machine.devices import check_threads, resolve

    check_paths(output, plot)
    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)
    found = resolve(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def show(
    runs: Callable[[Watch], Iterable[Rows]],
    table: Callable[[Rows], tuple[str, Columns]],
    *,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
    axes: dict[str, Any],
) -> None:
    """Print the rows that `runs` yields for each case, as `table` arranges them. `axes` are those of the plot."""
    from rich.console import Console

    from kalmannorm.lab.bench.output import write_csv, write_plot
    from kalmannorm.lab.machine.origin import origin

    source, rows = origin(), Rows()
    status = Console(stderr=True, quiet=as_json).status("starting")
    with status:
        for found in runs(status.update):
            rows += found
            if output is not None:
                write_csv(output, rows, source)
            if not as_json:
                _print(*table(found))
    if plot is not None:
        write_plot(plot, rows, f"{source['hardware']}, torch {source['torch']}", **axes)
    if as_json:
        typer.echo(json.dumps({"origin": source, "rows": rows}))
    else:
        shared = (
            f"{rows[0]['rounds']} rounds; {source['hardware']}, threads: {source['threads']}, torch {source['torch']}"
        )
        Console().print(shared, highlight=False, soft_wrap=True)


def _print(title: str, columns: Columns) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in columns:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    # In a narrow terminal lines wrap. Otherwise rich would cut off columns.
    Console(width=max(Console().width, WIDTH)).print(table, "")


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def micro(value: float) -> str:
    """Microseconds: one decimal below 1000, none above."""
    return number(value, 1 if value < 1000 else 0)


def around(row: dict[str, Any], name: str, written: Callable[[float], str] = number) -> str:
    """Two percentiles, the 20th and the 80th."""
    return f"{written(row[f'{name}_p20'])} – {written(row[f'{name}_p80'])}"


def norm_table(rows: Rows, what: str, other: str) -> tuple[str, Columns]:
    """Title and columns for one norm. The column for the contender `other` is left out if it was not timed."""
    first, against = rows[0], f"ratio_{other.lower()}"
    followed = " + ReLU" if first["relu"] else ""
    copy = f"a copy: {first['copy_gb_per_s']:.0f} GB/s"
    title = f"{first['shape']} {first['layout']} {first['dtype']}, {what}{followed}, {first['device']}; {copy}"
    columns = {
        "": [row["contender"] for row in rows],
        "m": ["" if row["statistics_batch"] is None else str(row["statistics_batch"]) for row in rows],
        "µs": [micro(row["us"]) for row in rows],
        "p20 – p80": [around(row, "us", micro) for row in rows],
        "ratio": [number(row["ratio"]) for row in rows],
        f"÷ {other}": [number(row[against]) for row in rows],
        "GB/s": [number(row["gb_per_s"], 0) for row in rows],
        "% copy": [number(row["copy_percent"], 0) for row in rows],
    }
    if first[against] is None:
        del columns[f"÷ {other}"]
    return title, columns
