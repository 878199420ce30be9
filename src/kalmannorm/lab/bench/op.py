"""One norm, forward and backward, over shapes and memory layouts, compared with its alternatives.

Every contender must give the output and all gradients of the reference, on the tensors that it is timed with. Then the
contenders take turns. On a GPU the replay of a CUDA graph is timed and checked. Caches are not emptied between calls,
so they are equally warm for all contenders.

Bytes are those that the algorithm needs, in passes over a tensor like x, not those that a kernel really moves:

    batch norm       3 forward (the statistics read x, the result reads it again and is written), 5 backward (sums read
                     x and the gradient, dx reads both again and is written)
    a ReLU after it  2 forward, 3 backward; 0 if it is computed in the same pass
    ghost by reshape of channels_last: 2 more, for the copy

    BKN settled      2 forward, 3 backward: no sum is needed before the result

So BKN and a compiled BatchNorm count 8, an eager BatchNorm with its ReLU 13. A group that stays on the chip is read
once, so fewer bytes are moved than counted. The share of a copy may then exceed 100 %.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kalmannorm.lab.bench.comparing import Entrant, Error, compare
from kalmannorm.lab.bench.op_contenders import INDUCTOR, Contender, Inputs, contenders
from kalmannorm.lab.bench.timing import Call
from kalmannorm.lab.bench.truth import check
from kalmannorm.lab.bench.turns import Watch
from kalmannorm.lab.errors import LabError, one_of
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.memory import check_fits

Shape = tuple[int, int, int, int]
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cuda": (
        (32, 256, 56, 56),
        (128, 64, 112, 112),
        (256, 512, 14, 14),
        (128, 16, 32, 32),
        (32, 2048, 7, 7),
        (8, 512, 28, 28),
        (2, 256, 56, 56),
    ),
    "cpu": ((8, 64, 24, 24), (128, 96, 16, 16), (32, 256, 28, 28)),
}
LAYOUTS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = ("layer", "op")


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Shape
    layout: str
    dtype: str
    device: torch.device
    statistics_batches: tuple[int, ...]
    relu: bool = True
    level: str = "layer"

    def __str__(self) -> str:
        return f"{spelled(self.shape)} {self.layout} {self.dtype}"

    def columns(self) -> Record:
        return {
            "level": self.level,
            "relu": self.relu,
            "shape": spelled(self.shape),
            "layout": self.layout,
            "dtype": self.dtype,
            "device": str(self.device),
        }


def spelled(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def parse_shape(text: str) -> Shape:
    found = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})x(\d{1,9})", text.strip())
    if found is None or not all(map(int, found.groups())):
        raise LabError(
            f"--shape {text!r} is not understood: give examples, channels, height, width, such as 32x256x56x56"
        )
    examples, channels, height, width = map(int, found.groups())
    check_fits(f"numbers of --shape {text}", (examples, channels, height, width), 4, "give a smaller one")
    return examples, channels, height, width


def parse_batches(text: str, shape: Shape) -> tuple[int, ...]:
    """ "2,N" for this shape: N is the whole batch. Duplicates are removed."""
    sizes = []
    for word in text.split(","):
        word = word.strip()
        if not (word == "N" or (re.fullmatch(r"\d{1,20}", word) and int(word) > 0)):
            raise LabError(f"--statistics-batches {text!r}: give numbers of examples, or N for all, such as 2,N")
        size = shape[0] if word == "N" else int(word)
        if size > shape[0]:
            raise LabError(f"--statistics-batches {size}: {spelled(shape)} has {shape[0]} examples; give N for all")
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def cases(
    shapes: Sequence[Shape],
    layouts: Sequence[str],
    dtype: str,
    device: torch.device,
    batches: str,
    *,
    relu: bool = True,
    level: str = "layer",
) -> list[Case]:
    """All shapes in all layouts. All errors are raised before anything runs."""
    one_of("dtype", dtype, DTYPES)
    one_of("level", level, LEVELS)
    found = []
    for layout in layouts:
        one_of("layout", layout, LAYOUTS)
        for shape in shapes:
            sizes = parse_batches(batches, shape)
            case = Case(shape=shape, layout=layout, dtype=dtype, device=device, statistics_batches=sizes)
            found.append(replace(case, relu=relu, level=level))
    return found


def inductor_missing(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device. None if it can."""
    try:
        torch.compile(lambda x: x.relu() + 1, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # no compiler, no Triton or an unsupported platform: no difference here
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def measure(case: Case, rounds: int, *, copy: float, inductor: bool, watch: Watch = lambda _: None) -> list[Record]:
    """One record per contender, the baseline first.

    `copy` is the speed of a copy on this device in bytes per second.
    """
    if inductor:
        torch.compiler.reset()  # code compiled for one shape must not affect the next
    inputs = Inputs(case.shape, DTYPES[case.dtype], LAYOUTS[case.layout], case.device)
    layer = case.level == "layer"
    found = contenders(inputs, case.statistics_batches, relu=case.relu, layer=layer, inductor=inductor)

    def entrant(contender: Contender) -> Entrant:
        size = "N" if contender.statistics_batch == case.shape[0] else contender.statistics_batch
        what = f"{contender.name} at {case}" if size is None else f"{contender.name} (m = {size}) at {case}"

        def prepare() -> tuple[Call, Error]:
            results, upstream = contender.truth(inputs.upstream)
            return contender.step(upstream), partial(check, what, expected=results)

        return Entrant(contender.name, size, prepare, contender.passes)

    rows = compare(
        [entrant(contender) for contender in found],
        inputs.x,
        rounds,
        copy=copy,
        against={"ratio_inductor": INDUCTOR},
        watch=lambda doing: watch(f"{case}: {doing}"),
    )
    return [{**case.columns(), **row} for row in rows]
