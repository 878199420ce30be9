"""`kalmannorm bench`: time and memory of a training step beside nn.BatchNorm."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer


def bench(
    model: Annotated[str, typer.Option("--model", help="One of the lab's nets, or a name of torchvision or timm.")] = (
        "cifar-inception"
    ),
    setting: Annotated[str, typer.Option("--setting", "-s", help="Gradient and statistics batch.")] = "128,2",
    methods: Annotated[str, typer.Option("--methods", help="Of bn, brn, gn, ln, in, bkn, bkn-learned.")] = (
        "bn,bkn,bkn-learned"
    ),
    image_size: Annotated[int | None, typer.Option("--image-size", help="32 for CIFAR's nets, else 224.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Steps of each; they take turns.")] = 15,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; as torch sees fit.")] = None,
    channels_last: Annotated[bool, typer.Option("--channels-last/--no-channels-last", help="Memory layout.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write a CSV file, with origins.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Time a training step, and its peak memory, as ratios to the same net with nn.BatchNorm in the same run.

    Random images; forward, backward and optimizer. bn is batch norm on groups of the statistics batch. Memory is what
    torch allocated at most. Results are checked first: nothing is timed where one is wrong.
    """
    import torch
    from rich.console import Console

    from kalmannorm.lab.bench import Case
    from kalmannorm.lab.bench import bench as run
    from kalmannorm.lab.origin import origin
    from kalmannorm.lab.records import writable, write_atomically
    from kalmannorm.lab.resolve import resolve
    from kalmannorm.lab.setting import Setting

    if output is not None:
        writable(output)
    if threads is not None:
        torch.set_num_threads(threads)
    case = Case(
        model=model,
        setting=Setting.parse(setting),
        image_size=image_size,
        device=resolve(device),
        channels_last=channels_last,
    )
    names = [name.strip() for name in methods.split(",")]
    console = Console(stderr=True, quiet=as_json)
    with console.status("building") as status:
        rows = run(case, names, rounds, watch=status.update)
    source = origin()
    if output is not None:
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, [*rows[0], *source], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **source} for row in rows)
        write_atomically(output, table.getvalue().encode())
    if as_json:
        typer.echo(json.dumps({"origin": source, "rows": rows}))
    else:
        _show(rows, source)


def _show(rows: list[dict[str, Any]], source: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    table = Table(
        title=f"{first['model']} {first['setting']}, {first['shape']} {first['layout']}, {first['device']}",
        caption=f"{first['rounds']} rounds; {source['hardware']}, {source['threads']} threads, torch {source['torch']}",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("", "ms per step", "ratio", "p20 to p80", "peak MiB", "ratio"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_p20']:.2f} to {row['ratio_p80']:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_ratio']:.3f}",
        )
    Console().print(table)
