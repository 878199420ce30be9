"""`kalmannorm bench op`: time one norm, forward and backward, over shapes, layouts and statistics batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kalmannorm_command import bench_output
from kalmannorm_command.bench_output import AsJson, Columns, Device, Output, Plot, Rounds, Rows, Threads, norm_table

if TYPE_CHECKING:
    from kalmannorm.lab.bench.turns import Watch


def op(
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="<str>",
            help="Examples x channels x height x width, such as 8x64x24x24. May be repeated.",
        ),
    ] = None,
    layouts: Annotated[str, typer.Option("--layout", help="NHWC (channels_last), NCHW or both.")] = "NHWC,NCHW",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bf16 or fp16. [default: bf16 on a GPU, float32 on a CPU]")
    ] = None,
    batches: Annotated[
        str, typer.Option("--statistics-batches", help="Examples per group. N is the whole batch.")
    ] = "2,N",
    relu: Annotated[bool, typer.Option("--relu/--no-relu", help="Add a ReLU after the norm.")] = True,
    level: Annotated[
        str, typer.Option("--level", help="layer: the module, with running statistics. op: the function alone.")
    ] = "layer",
    inductor: Annotated[
        bool, typer.Option("--inductor/--no-inductor", help="Also time BatchNorm compiled by inductor.")
    ] = True,
    rounds: Rounds = 31,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time one norm, forward and backward: BatchNorm, compiled BatchNorm, GroupNorm, ghost batch norm, BKN,
    and BKN at the end of a closing phase (settled).

    Ratios are relative to eager BatchNorm in the same run. Outputs and gradients are first compared with the naive
    reference in float64. On a GPU each sample replays a CUDA graph. GB/s counts the bytes that the algorithm has to
    move. % copy is relative to the speed of a large copy on this machine.
    """
    from kalmannorm.lab.bench.copying import copy_speed
    from kalmannorm.lab.bench.op import SHAPES, cases, inductor_missing, measure, parse_shape
    from kalmannorm.lab.bench.turns import check_rounds
    from kalmannorm.lab.errors import comma_separated

    place = bench_output.ready(device, threads, output, plot)
    check_rounds(rounds)
    chosen = [parse_shape(shape) for shape in shapes] if shapes else SHAPES[place.type]
    dtype = dtype or ("bf16" if place.type == "cuda" else "float32")
    words = comma_separated(layouts, "NHWC,NCHW")
    found = cases(chosen, words, dtype, place, batches, relu=relu, level=level)
    missing = inductor_missing(place) if inductor else None
    if missing is not None:
        typer.echo(f"kalmannorm: compiled BatchNorm is left out: inductor does not work here ({missing})", err=True)

    def runs(watch: Watch) -> Iterator[Rows]:
        watch("timing a copy")
        copy = copy_speed(place)
        for case in found:
            yield measure(case, rounds, copy=copy, inductor=inductor and missing is None, watch=watch)

    axes = {"panel": "layout", "place": "shape", "line": ("contender", "statistics_batch")}
    bench_output.show(runs, _table, output=output, plot=plot, as_json=as_json, axes=axes)


def _table(rows: Rows) -> tuple[str, Columns]:
    return norm_table(rows, rows[0]["level"], "inductor")
