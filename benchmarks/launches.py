"""The sweep for tuning `_ops/normalize/tiling.py`: launches of the op, timed on a GPU.

    python benchmarks/launches.py --jobs 14 -o launches.csv    # promising launches, for shapes of common networks
    python benchmarks/launches.py --jobs 14 --both -o both.csv # for large tensors, forward and backward in turn
    python benchmarks/launches.py --jobs 14 --settled -o s.csv # settled norms, forward and backward in turn
    python benchmarks/launches.py --only 96x3136 -o some.csv   # only some shapes, in any sweep
    python benchmarks/launches.py --read launches.csv          # the chosen launch, compared with the best measured one

It times one norm with its ReLU in bf16, forward and backward separately, as CUDA graphs. Small tensors are in the
cache, as they are after a convolution. Of large tensors there are several, used in turn. With `--both` and `--settled`
there is one, as in `kalmannorm bench op`: many launches are tried for one direction, while the other uses the chosen
launch. Before that `--jobs` processes build the kernels.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.grid import power
from kalmannorm._ops.normalize.arguments import Inputs, Results, SettledGrads, SettledInputs
from kalmannorm._ops.normalize.tiling import Launch, Shape, launch_for, launch_of, settling
from kalmannorm.lab.machine.origin import commit

RECORD = Path(__file__).parent / "records" / "launches-h200.csv"
RECORD_OF_BOTH = RECORD.with_name("launches-both-h200.csv")
COLUMNS = (
    *("N", "C", "L", "m", "layout", "residual", "direction"),
    *("BR", "BC", "warps", "splits", "K", "stages", "us", "hardware", "torch", "commit"),
)
PROCESSORS = 132
"""Processors of the H200 on which the record was measured."""
SMALL = 7e6
"""The most values of a tensor that stays in the cache."""


Kind = Literal["apart", "both", "settled"]
"""Of a sweep: small and large tensors, large tensors with both directions in turn, settled norms."""


class Case(NamedTuple):
    shape: Shape
    residual: bool = False


def _cases(layout: str, listed: str) -> list[Case]:
    """Cases from words such as 32x256x3136m2, with + for a residual."""
    found = []
    for word in listed.split():
        sizes, m = word.rstrip("+").split("m")
        N, C, L = map(int, sizes.split("x"))
        found.append(Case(Shape(N, C, L, int(m), layout == "NHWC"), word.endswith("+")))
    return found


def word(case: Case) -> str:
    s = case.shape
    return f"{s.N}x{s.C}x{s.L}m{s.m}{'+' if case.residual else ''}"


CASES = _cases(
    "NHWC",
    """
    128x64x12544m128 128x64x12544m2 256x256x3136m256 256x256x3136m2 64x256x3136m64 64x256x3136m2
    32x256x3136m32 32x256x3136m32+ 32x256x3136m2 32x256x3136m2+ 32x256x3136m4+ 32x64x12544m32 32x64x12544m2
    32x64x3136m32 32x64x3136m2 32x192x3136m32 256x512x196m256 256x512x196m2 32x512x784m32 32x512x784m32+ 32x512x784m4+
    32x512x784m2+ 32x128x784m32 32x128x784m4 32x128x784m2 32x96x784m32 32x96x784m2 32x192x784m2 32x256x784m2
    32x1024x196m32 32x1024x196m32+ 32x1024x196m4+ 32x1024x196m2 32x1024x196m2+ 32x256x196m32 32x256x196m4 32x256x196m2
    32x160x196m32 32x160x196m2 32x576x196m2 8x512x784m8 8x512x784m2 2x256x3136m2 128x16x1024m128 128x16x1024m2
    32x512x49m32 32x512x49m4 32x512x49m2 32x2048x49m32 32x2048x49m32+ 32x2048x49m4+ 32x2048x49m2 32x2048x49m2+
    32x352x49m32 32x352x49m2 128x96x1024m2 128x192x256m2 128x336x64m2
    """,
) + _cases(
    "NCHW",
    """
    256x256x3136m256 256x256x3136m2 128x64x12544m128 128x64x12544m2 32x256x3136m32 32x256x3136m2 256x512x196m256
    256x512x196m2 8x512x784m8 8x512x784m2 32x2048x49m32 32x2048x49m2 32x2048x49m1 128x16x1024m128 128x16x1024m2
    2x256x3136m2
    """,
)


CASES_OF_BOTH = _cases(
    "NHWC",
    """
    64x256x3136m2 64x256x3136m4 64x256x3136m16 64x256x3136m64 64x256x3136m2+ 64x256x3136m4+ 64x256x3136m64+
    256x256x3136m2 256x256x3136m8 256x256x3136m256 256x256x3136m2+ 128x64x12544m2 128x64x12544m8 128x64x12544m128
    128x128x3136m2 256x64x3136m2 128x512x784m4 256x1024x196m16 4x64x262144m1 32x256x3136m2 32x256x3136m32
    64x96x12544m2 64x96x12544m16 64x96x12544m64 128x96x3136m2 64x48x12544m2 64x48x12544m64 128x160x3136m2
    128x160x3136m128 128x352x3136m2 128x224x3136m2+ 256x288x784m2 128x672x784m4 64x32x65536m2 64x32x65536m64
    32x24x65536m2 32x24x65536m32 64x40x12544m2 64x40x12544m64 128x72x3136m2 64x100x12544m2 64x100x12544m64
    64x17x65536m2 64x17x65536m64 64x3x65536m2 64x96x3136m2 64x96x3136m64 32x144x3136m2 32x144x3136m32 32x32x12544m2
    32x32x12544m32 32x240x3136m2+ 32x96x3136m2 32x96x3136m32
    """,
)


SETTLED_CASES = _cases(
    "NHWC", "32x2048x49m2 32x2048x49m32 32x512x49m2 32x256x196m2 8x512x784m2 2x256x3136m2 128x16x1024m2 256x512x196m2"
) + _cases(
    "NCHW", "32x2048x49m2 32x2048x49m32 32x512x49m2 256x512x196m2 128x16x1024m2 8x512x784m2 8x512x784m8 2x256x3136m2"
)
CASES_OF = {"apart": CASES, "both": CASES_OF_BOTH, "settled": SETTLED_CASES}


def shared(s: Shape) -> Iterator[Launch]:
    """Several programs for a group: one to eight times as many as run at once."""
    small = s.size < SMALL
    if s.channels_last:
        tiles = [(64, 64, 4), (32, 64, 4), (64, 64, 8), (64, 32, 4), (128, 32, 4), (64, 32, 2), (16, 128, 4)]
        tiles = [(128, 16, 4), (256, 16, 4), (256, 16, 8)] if s.C <= 16 else tiles
        often: tuple[int, ...] = (1, 2, 3, 4) if small else (2, 4)
    else:
        row = power(s.L)
        tiles = [(256, 16, 4), (256, 8, 4), (512, 8, 4), (512, 4, 4), (1024, 4, 4)]
        tiles = [(min(BR, row), min(BC * BR // min(BR, row), 32), warps) for BR, BC, warps in tiles]
        often = (2, 4, 8)
    for BR, BC, warps in tiles:
        programs = s.groups * -(-s.C // BC)
        for times in often:
            for splits in (max(times * PROCESSORS // programs, 1), -(-times * PROCESSORS // programs)):
                how = launch_of(s, BR, BC, min(splits, 256), warps)
                if how.splits:
                    yield how
    yield from abreast(s, (1, 2, 3) if small else (1, 2, 4))


def shared_of_large(s: Shape) -> Iterator[Launch]:
    """For large tensors: tiles of any width, and one to six programs per processor, at least two per group."""
    tiles = [(64, 64, 8), (64, 64, 4), (32, 64, 4), (128, 32, 8), (128, 32, 4), (16, 128, 4)]
    narrow = power(s.C)
    tiles = [(2048 // narrow, narrow, 4), (4096 // narrow, narrow, 8)] if narrow <= 16 else tiles
    for BR, BC, warps in tiles:
        programs = s.groups * -(-s.C // BC)
        for times in (1, 2, 3, 4, 6) if warps == 8 else (2, 4):
            yield launch_of(s, BR, BC, min(max(times * PROCESSORS // programs, 2), 256), warps)
    yield from abreast(s, (1, 2, 4, 6))


def abreast(s: Shape, often: tuple[int, ...]) -> Iterator[Launch]:
    """If channels leave tiles partly empty: several positions form one row, so that whole positions fill it."""
    if (K := s.filling) > 1:
        programs = s.groups * -(-s.C * K // 64)
        for BR, warps in ((64, 8), (64, 4), (32, 4)):
            for times in often:
                how = launch_of(s, BR, 64, min(max(round(times * PROCESSORS / programs), 1), 256), warps, K)
                if how.splits:
                    yield how


def alone(s: Shape) -> Iterator[Launch]:
    """One program for a group and a block of channels: in registers, or with loops."""
    rows = power(s.slab)
    if s.channels_last:
        for BC in (16, 32, 64) if rows <= 2048 else ():
            for warps in (1, 2, 4, 8, 16):
                if 32 <= rows * BC // (32 * warps) <= (64 if warps < 8 else 128):
                    yield launch_of(s, rows, BC, 0, warps)
        tiles = [(64, 64, 4), (64, 64, 8), (128, 64, 8), (32, 64, 4), (128, 32, 4), (64, 32, 4), (32, 32, 2)]
        tiles.append((128, 16, 4))
        tiles = [tile for tile in tiles if 2 * tile[0] <= s.slab <= 8192]
    else:
        tiles = [
            (BR, BC, warps)
            for BR in sorted({min(power(s.L), BR) for BR in (64, 256, 1024)})
            for BC in (1, 2, 4, 8, 16, 32)
            for warps in (1, 2, 4)
            if 16 <= BR * BC // (32 * warps) <= 64 and BR * BC <= 2048
        ]
    for BR, BC, warps in tiles:
        if s.groups * -(-s.C // BC) >= 60:
            yield launch_of(s, BR, BC, 0, warps)


def settled(s: Shape) -> Iterator[Launch]:
    """One or two programs for a group: small tiles of one to four warps."""
    rows = power(s.slab if s.channels_last else s.L)
    for BR in (32, 64, 128) if s.channels_last else (64, 128, 256, 512, 1024):
        for BC in (16, 32, 64) if s.channels_last else (1, 2, 4, 8, 16):
            for warps in (1, 2, 4):
                if rows >= BR and power(s.C) >= BC and 256 * warps <= BR * BC <= min(2048 * warps, 4096):
                    yield from (launch_of(s, BR, BC, splits, warps) for splits in (1, 2))


def chosen(case: Case, direction: str, kind: Kind = "apart") -> Launch:
    choose = settling if kind == "settled" else launch_for
    return choose(case.shape, PROCESSORS, backward=direction == "backward", residual=case.residual)


def candidates(case: Case, kind: Kind = "apart") -> list[Launch]:
    own = [chosen(case, direction, kind) for direction in ("forward", "backward")]
    if kind == "settled":
        found = [*own, *shared(case.shape), *settled(case.shape)]
        return list(dict.fromkeys(how._replace(splits=max(how.splits, 1)) for how in found))
    tried = [*own, *alone(case.shape), *(shared_of_large if kind == "both" else shared)(case.shape)]
    return [how for how in dict.fromkeys(tried) if power(case.shape.C * how.K) >= how.BC or how.BC == 16]


def tile(how: Launch) -> tuple[int, ...]:
    return how.BR, how.BC, how.warps, how.splits, how.K


def image_of(case: Case, device: torch.device) -> Tensor:
    N, C, L, _, last = case.shape
    values = torch.randn(N, L, C, device=device).to(torch.bfloat16)
    return values.transpose(1, 2).unsqueeze(3) if last else values.view(N, C, L, 1)


def settled_calls(case: Case, device: torch.device) -> dict[str, list[Callable[[], object]]]:
    """As `calls`, of a settled norm with a prior."""
    from kalmannorm._ops.normalize import triton_settled_run

    (_, C, _, m, _), residual = case
    zeros, ones = torch.zeros(C, device=device), torch.ones(C, device=device)
    prior = zeros[None], ones[None], ones / 2
    x, g, other = (image_of(case, device) for _ in range(3))
    inputs = SettledInputs(x, *prior, ones, zeros, zeros, ones, m, 1e-5, other if residual else None, True)
    y, _, _, *seen, centre, rho = triton_settled_run.forward(inputs)
    known = centre, rho, *seen, torch.zeros((C, 3), device=device)
    grads = SettledGrads(
        g, x, y if residual else None, *prior, ones, zeros, *known, None, None, None, None, m, True, residual
    )
    return {
        "forward": [lambda: triton_settled_run.forward(inputs)],
        "backward": [lambda: triton_settled_run.backward(grads)],
    }


def calls(case: Case, device: torch.device, copies: int) -> dict[str, list[Callable[[], object]]]:
    """Forward and backward, on `copies` sets of tensors."""
    from kalmannorm._ops.normalize import triton_run

    (_, C, _, m, _), residual = case
    rows = torch.zeros(1, C, device=device), torch.ones(1, C, device=device), torch.full((C,), 0.5, device=device)
    weight, bias = torch.ones(C, device=device), torch.zeros(C, device=device)
    found: dict[str, list[Callable[[], object]]] = {"forward": [], "backward": []}
    for _ in range(copies):
        x, g, other = (image_of(case, device) for _ in range(3))
        other = other if residual else None
        inputs = Inputs(x, *rows, weight, bias, m, 1e-5, other, True)
        results = triton_run.forward(inputs)
        found["forward"].append(lambda inputs=inputs: triton_run.forward(inputs))
        # With a residual the ReLU's mask comes from y, else from x and β.
        kept = inputs._replace(residual=None, bias=None if residual else bias)
        seen = results if residual else results._replace(y=None)
        grads = Results(g, None, None, None, None)
        found["backward"].append(lambda grads=grads, kept=kept, seen=seen: triton_run.backward(grads, kept, seen, 1))
    return found


def microseconds(each: list[Callable[[], object]]) -> float:
    each[0]()
    graph, turns = torch.cuda.CUDAGraph(), max(1, 10 // len(each))
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in each:
                call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    times = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * min(times) / turns / len(each)


def in_turn(apart: dict[str, list[Callable[[], object]]]) -> dict[str, list[Callable[[], object]]]:
    """Forward and backward in turn, for both directions."""
    (forward,), (backward,) = apart["forward"], apart["backward"]
    return {direction: [lambda: (forward(), backward())] for direction in apart}


def trying(how: Launch, case: Case, direction: str, kind: Kind) -> Callable[..., Launch]:
    """Replaces `launch_for` or `settling`. The other direction uses the chosen launch."""
    launches = {each: chosen(case, each, kind) for each in ("forward", "backward")} | {direction: how}
    return lambda *_, backward=False, **__: launches["backward" if backward else "forward"]


def sweep(device: torch.device, share: tuple[int, int] | None, kind: Kind, only: str) -> Iterator[list[object]]:
    """One row for each launch. With a share, kernels are built and nothing is timed."""
    from kalmannorm._ops.normalize import triton_run, triton_settled_run

    number = 0
    for case in CASES_OF[kind]:
        if not re.search(only, word(case)):
            continue
        triton_run.launch_for, triton_settled_run.settling = launch_for, settling
        if kind == "settled":
            found = settled_calls(case, device)
        else:
            one = kind == "both" or share or case.shape.size < SMALL
            found = calls(case, device, 1 if one else max(2, min(8, round(6e7 / case.shape.size))))
        for how in candidates(case, kind):
            number += 1
            if share and number % share[1] != share[0]:
                continue
            for direction, each in (found if kind == "apart" else in_turn(found)).items():
                triton_run.launch_for = triton_settled_run.settling = trying(how, case, direction, kind)
                if share:
                    each[0]()
                    continue
                layout = "NHWC" if case.shape.channels_last else "NCHW"
                what = *case.shape[:4], layout, int(case.residual), direction, *tile(how), 0 if how.held else how.stages
                yield [*what, round(microseconds(each), 2)]


def measured(path: Path) -> dict[tuple[Case, str], dict[tuple[int, ...], float]]:
    """µs of each case and direction, by tile, warps and splits."""
    found: dict[tuple[Case, str], dict[tuple[int, ...], float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            N, C, L, m = (int(row[name]) for name in "NCLm")
            shape = Shape(N, C, L, m, row["layout"] == "NHWC")
            case = Case(shape, row["residual"] == "1"), row["direction"]
            how = tuple(int(row[name]) for name in ("BR", "BC", "warps", "splits", "K"))
            found.setdefault(case, {})[how] = float(row["us"])
    return found


def read(path: Path, kind: Kind) -> None:
    for (case, direction), times in measured(path).items():
        own, best = tile(chosen(case, direction, kind)), min(times, key=times.__getitem__)
        name = f"{word(case)} {'NHWC' if case.shape.channels_last else 'NCHW'}"
        now = f"{times[own]:.1f} µs" if own in times else "not measured"
        print(f"{name:26} {direction:8} {own}: {now:12} best {best}: {times[best]:.1f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where to write the CSV")
    parser.add_argument("--jobs", type=int, default=1, help="processes that build kernels")
    parser.add_argument("--read", type=Path, nargs="?", const=RECORD, help="a CSV, or the record of the H200")
    parser.add_argument("--both", action="store_true", help="large tensors, a forward and its backward in turn")
    parser.add_argument("--settled", action="store_true", help="settled norms, a forward and its backward in turn")
    parser.add_argument("--only", default="", metavar="REGEX", help="shapes that match this, such as 32x96x784m2")
    parser.add_argument("--build", help=argparse.SUPPRESS)  # which share, such as 0/14
    arguments = parser.parse_args()
    kind: Kind = "both" if arguments.both else "settled" if arguments.settled else "apart"
    if arguments.read:
        read(arguments.read, kind)
        return
    if not torch.cuda.is_available():
        sys.exit("a sweep needs a CUDA GPU; --read shows a record")
    device = torch.device("cuda", 0)
    if arguments.build:
        part, parts = map(int, arguments.build.split("/"))
        assert not list(sweep(device, (part, parts), kind, arguments.only))
        return
    if arguments.output is None:
        sys.exit("-o FILE.csv: the file for the results")
    which = [] if kind == "apart" else [f"--{kind}"]
    builder = [sys.executable, __file__, *which, "--only", arguments.only, "--build"]
    builders = [[*builder, f"{i}/{arguments.jobs}"] for i in range(arguments.jobs)]
    for process in [subprocess.Popen(each) for each in builders]:
        process.wait()
    about = torch.cuda.get_device_name(device), torch.__version__, commit()
    with arguments.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sweep(device, None, kind, arguments.only):
            writer.writerow([*row, *about])


if __name__ == "__main__":
    main()
