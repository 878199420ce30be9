"""`kalmannorm bench step`: time, kernels and memory of a training step, relative to nn.BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kalmannorm_command import bench_output
from kalmannorm_command.bench_output import AsJson, Columns, Device, Output, Plot, Rounds, Rows, Threads, around, number

if TYPE_CHECKING:
    from kalmannorm.lab.bench.turns import Watch


def step(
    model: Annotated[str, typer.Option("--model", help="A net of the lab, torchvision or timm.")] = ("cifar-inception"),
    setting: Annotated[str, typer.Option("--setting", "-s", help="Gradient batch and statistics batch.")] = "128,2",
    batches: Annotated[
        str | None,
        typer.Option(
            "--statistics-batches",
            help="Time several statistics batches, such as 32,4,2, instead of the one in --setting.",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            "-m",
            help="Comma-separated: bn, bn-ws, brn, mabn, on, gn, gn-ws, ln, in, bkn, bkn-ws, bkn-learned.",
        ),
    ] = ("bn,bkn,bkn-learned"),
    fuse: Annotated[
        bool, typer.Option("--fuse/--no-fuse", help="Also time fused nets: norm, sum and ReLU in one pass.")
    ] = False,
    settled: Annotated[
        bool,
        typer.Option(
            "--settled/--no-settled",
            help="Also time nets after a closing phase, as the recipe trains them most of the time.",
        ),
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also time the nn.BatchNorm net under torch.compile.")
    ] = False,
    bound: Annotated[
        bool, typer.Option("--bound/--no-bound", help="Also time the net without norms, as a lower bound.")
    ] = False,
    cuda_graph: Annotated[
        bool | None,
        typer.Option("--cuda-graph/--no-cuda-graph", help="Capture each step as a CUDA graph. [default: on a GPU]"),
    ] = None,
    eager: Annotated[
        bool,
        typer.Option("--eager/--no-eager", help="Beside CUDA graphs, also time steps as an ordinary loop runs them."),
    ] = True,
    compile_mode: Annotated[
        str | None,
        typer.Option(
            "--compile-mode",
            help="Also compile every net with torch.compile and time its steps: default or reduce-overhead.",
        ),
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="float32, or bf16 under autocast.")] = "float32",
    image_size: Annotated[
        int | None, typer.Option("--image-size", help="Pixels per side. [default: 32 for CIFAR nets, 224 for others]")
    ] = None,
    channels_last: Annotated[
        bool, typer.Option("--channels-last/--no-channels-last", help="Use the channels_last memory format.")
    ] = False,
    rounds: Rounds = 15,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure time and peak memory of a training step, relative to the same net with nn.BatchNorm in the same run.

    A step is forward, backward and optimizer on random images. bn is batch norm on groups of the statistics batch.
    Memory is the peak that torch allocated. Results are checked before timing.
    """
    from kalmannorm.lab.bench.step import bench
    from kalmannorm.lab.bench.step_contenders import BASELINE, NONE, Case, Entry, entries
    from kalmannorm.lab.errors import LabError, comma_separated
    from kalmannorm.lab.recipes.setting import Setting

    place = bench_output.ready(device, threads, output, plot)
    whole, size = Setting.parse(setting)
    case = Case(
        model=model,
        gradient_batch=whole,
        image_size=image_size,
        device=place,
        channels_last=channels_last,
        precision=precision,
        cuda_graph=place.type == "cuda" if cuda_graph is None else cuda_graph,
    )
    try:
        sizes = [size] if batches is None else [int(word) for word in batches.split(",")]
    except ValueError:
        raise LabError(f"--statistics-batches {batches!r}: give numbers of examples, such as 32,4,2") from None
    names = comma_separated(methods, "bn,bkn")
    chosen = entries(whole, sizes, names, fused=fuse, settled=settled)
    if compile:
        chosen.insert(1, Entry(BASELINE, Setting(whole, whole), "inductor"))
    if bound:
        chosen.append(Entry(NONE, Setting(whole, whole)))

    def runs(watch: Watch) -> Iterator[Rows]:
        yield bench(case, chosen, rounds, eager=eager, compile_mode=compile_mode, watch=watch)

    axes = {"panel": "model", "place": "setting", "line": ("method", "way")}
    bench_output.show(runs, _table, output=output, plot=plot, as_json=as_json, axes=axes)


def _table(rows: Rows) -> tuple[str, Columns]:
    first = rows[0]
    graph = ", CUDA graph" if first["cuda_graph"] else ""
    title = f"{first['model']}, {first['shape']} {first['layout']} {first['precision']}, {first['device']}{graph}"
    columns = {
        "": [" ".join(filter(None, (row["method"], row["way"]))) for row in rows],
        "setting": [row["setting"] for row in rows],
        "ms": [number(row["ms"], 1 if first["ms"] > 100 else 2) for row in rows],
        "ratio": [number(row["ratio"]) for row in rows],
        "p20 – p80": [around(row, "ratio") for row in rows],
        "eager ms": [number(row["eager_ms"]) for row in rows],
        "eager ratio": [number(row["eager_ratio"]) for row in rows],
        "compile s": [number(row["compile_s"], 1) for row in rows],
        "cached s": [number(row["compile_cached_s"], 1) for row in rows],
        "compiled ms": [number(row["compiled_ms"]) for row in rows],
        "compiled ratio": [number(row["compiled_ratio"]) for row in rows],
        "kernels": [number(row["kernels"], 0) for row in rows],
        "MiB": [number(row["peak_mib"], 0) for row in rows],
        "MiB ratio": [number(row["peak_ratio"], 3) for row in rows],
    }
    if first["kernels"] is None:
        del columns["kernels"]
    if first["eager_ms"] is None:
        del columns["eager ms"], columns["eager ratio"]
    if first["compile_mode"] is None:
        del columns["compile s"], columns["cached s"], columns["compiled ms"], columns["compiled ratio"]
    return title, columns
