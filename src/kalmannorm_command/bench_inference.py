"""`kalmannorm bench inference`: time one norm, or a whole net, in inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kalmannorm_command import bench_output
from kalmannorm_command.bench_output import (
    AsJson,
    Columns,
    Device,
    Output,
    Plot,
    Rounds,
    Rows,
    Threads,
    around,
    norm_table,
    number,
)

if TYPE_CHECKING:
    from kalmannorm.lab.bench.turns import Watch

MOST_IMAGES = 1_000_000


def inference(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Time this net of the lab, torchvision or timm. [default: time one norm]"),
    ] = None,
    batches: Annotated[
        str,
        typer.Option(
            "--statistics-batches", help="Examples per group in `example` mode, such as 1,2. A net takes the first."
        ),
    ] = "2",
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="<str>", help="One norm: input shape such as 8x64x24x24. May be repeated."),
    ] = None,
    layouts: Annotated[str, typer.Option("--layout", help="One norm: NHWC, NCHW or both.")] = "NHWC,NCHW",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="One norm: float32, bf16 or fp16. [default: bf16 on a GPU, float32 on a CPU]"),
    ] = None,
    relu: Annotated[bool, typer.Option("--relu/--no-relu", help="One norm: add a ReLU after it.")] = True,
    batch: Annotated[int, typer.Option("--batch", min=2, max=MOST_IMAGES, help="Net: images per batch.")] = 32,
    image_size: Annotated[
        int | None,
        typer.Option("--image-size", help="Net: pixels per side. [default: 32 for CIFAR nets, 224 for others]"),
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="Net: float32, or bf16 under autocast.")] = "float32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last/--no-channels-last", help="Net: channels_last memory format.")
    ] = False,
    fuse: Annotated[
        bool, typer.Option("--fuse/--no-fuse", help="Net: also time a fused net in `example` mode.")
    ] = False,
    rounds: Rounds = 31,
    device: Device = "auto",
    threads: Threads = None,
    output: Output = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time inference in `population` and `example` mode, beside BatchNorm and GroupNorm.

    A `population` norm folds into the convolution before it, as BatchNorm does. With --model a whole net is timed,
    without it one norm over shapes and layouts. Outputs are first compared with float64. On a GPU each sample replays
    a CUDA graph.
    """
    from kalmannorm.lab.bench import inference as one_norm
    from kalmannorm.lab.bench import inference_model
    from kalmannorm.lab.bench.copying import copy_speed
    from kalmannorm.lab.bench.op import SHAPES, cases, parse_batches, parse_shape
    from kalmannorm.lab.bench.step_contenders import Case
    from kalmannorm.lab.bench.turns import check_rounds
    from kalmannorm.lab.errors import comma_separated

    place = bench_output.ready(device, threads, output, plot)
    check_rounds(rounds)
    gpu = place.type == "cuda"
    if model is not None:
        net = Case(
            model=model,
            gradient_batch=batch,
            image_size=image_size,
            device=place,
            channels_last=channels_last,
            precision=precision,
            cuda_graph=gpu,
        )
        size = parse_batches(batches, (batch, 1, 1, 1))[0]

        def of_net(watch: Watch) -> Iterator[Rows]:
            yield inference_model.measure(net, size, rounds, fused=fuse, watch=watch)

        axes = {"panel": "model", "place": "contender", "line": ("model",)}
        bench_output.show(of_net, _net_table, output=output, plot=plot, as_json=as_json, axes=axes)
        return

    chosen = [parse_shape(shape) for shape in shapes] if shapes else SHAPES[place.type]
    words = comma_separated(layouts, "NHWC,NCHW")
    found = cases(chosen, words, dtype or ("bf16" if gpu else "float32"), place, batches, relu=relu)

    def of_norm(watch: Watch) -> Iterator[Rows]:
        watch("timing a copy")
        copy = copy_speed(place)
        for case in found:
            yield one_norm.measure(case, rounds, copy=copy, watch=watch)

    axes = {"panel": "layout", "place": "shape", "line": ("contender", "statistics_batch")}
    bench_output.show(of_norm, _norm_table, output=output, plot=plot, as_json=as_json, axes=axes)


def _norm_table(rows: Rows) -> tuple[str, Columns]:
    return norm_table(rows, "inference", "GroupNorm")


def _net_table(rows: Rows) -> tuple[str, Columns]:
    first = rows[0]
    graph = ", CUDA graph" if first["cuda_graph"] else ""
    where = f"{first['layout']} {first['precision']}, inference, {first['device']}{graph}"
    columns = {
        "": [row["contender"] for row in rows],
        "ms": [number(row["ms"]) for row in rows],
        "ratio": [number(row["ratio"]) for row in rows],
        "p20 – p80": [around(row, "ratio") for row in rows],
        "÷ GroupNorm": [number(row["ratio_groupnorm"]) for row in rows],
        "kernels": [number(row["kernels"], 0) for row in rows],
    }
    if first["kernels"] is None:
        del columns["kernels"]
    return f"{first['model']} {first['setting']}, {first['shape']} {where}", columns
