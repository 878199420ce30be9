"""Peak memory and time of a training step, by net and by what is kept: python benchmarks/memory.py -o memory.csv

    BatchNorm                 the net as it is
    BKN                       converted, groups of 2
    BKN fused                 after `kalmannorm.fuse`
    BKN saving                after `kalmannorm.fuse(…, save_memory=True)`
    BKN checkpoints           fused, and every block in an activation checkpoint
    BKN both                  saving, and every block in an activation checkpoint

On a GPU a row has the peak of an eager step, the time of a step as a CUDA graph and in eager mode, and the bytes that
autograd keeps. All ways of a net take turns. Steps with checkpoints are timed in eager mode only. On a CPU a row has
only the bytes that autograd keeps: they are counted at two batch sizes, and grow linearly with the batch. With
checkpoints these are the inputs of blocks; the backward adds what one block keeps. With `--limit 24` it searches the
largest batch whose step fits so many GiB, instead of timing. Rows are written after each net. Nets that the file
contains already are skipped, and no net is begun after `--minutes`.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kalmannorm import fuse
from kalmannorm._support.kept_tensors import kept_tensors
from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.bench.step_contenders import BASELINE, Case, Contender, Entry
from kalmannorm.lab.bench.timing import Timed, timed
from kalmannorm.lab.bench.turns import Seconds, ratios, spread, take_turns
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.origin import origin
from kalmannorm.lab.recipes.setting import Setting

NETS = "resnet50,resnet101,densenet121,resnetv2_50"
BATCHNORM, BKN, FUSED, SAVING, CHECKPOINTS, BOTH = (
    "BatchNorm", "BKN", "BKN fused", "BKN saving", "BKN checkpoints", "BKN both",
)  # fmt: skip
WAYS = (BATCHNORM, BKN, FUSED, SAVING, CHECKPOINTS, BOTH)
BLOCKS = {"BasicBlock", "Bottleneck", "PreActBasic", "PreActBottleneck", "_DenseLayer"}
SAMPLE = 5e-2
"""Seconds of one sample."""


def checkpointed(model: nn.Module) -> nn.Module:
    """The model with every block in an activation checkpoint."""
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            # Not an assignment: a fused module would return to its own forward.
            vars(module)["forward"] = functools.partial(_recomputed, module.forward)
    return model


def _recomputed(forward: Callable[..., Tensor], given: Tensor | list[Tensor]) -> Tensor:
    """A block in a checkpoint. DenseNet's blocks get a list, to which others append before it is recomputed."""
    alone = isinstance(given, Tensor)

    def run(*parts: Tensor) -> Tensor:
        return forward(parts[0] if alone else list(parts))

    parts = [given] if alone else given
    return cast(Tensor, checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False))


def build(case: Case) -> dict[str, nn.Module]:
    """The net in every way, from the same weights. A small example is enough for `fuse`."""
    batch = case.gradient_batch
    example = case.placed(torch.randn(2, 3, 32, 32))
    bkn = case.build(Entry("bkn", Setting(batch, 2)))
    fused, saving = fuse(bkn, example), fuse(bkn, example, save_memory=True)
    return {
        BATCHNORM: case.build(Entry(BASELINE, Setting(batch, batch))),
        BKN: bkn,
        FUSED: fused,
        SAVING: saving,
        CHECKPOINTS: checkpointed(copy.deepcopy(fused)),
        BOTH: checkpointed(copy.deepcopy(saving)),
    }


def kept(case: Case, model: nn.Module, batch: int) -> tuple[int, int]:
    """Bytes and tensors that autograd keeps after a forward of `batch` images, without parameters and buffers."""
    images = case.placed(torch.randn(batch, *case.shape))

    def forward() -> torch.Tensor:
        with case.autocast():
            return F.cross_entropy(model(images), torch.zeros(batch, dtype=torch.long, device=case.device))

    _, found = kept_tensors(forward, [*model.parameters(), *model.buffers()])
    return sum(each.bytes for each in found), len(found)


def counted(case: Case, model: nn.Module) -> tuple[float, int]:
    """MiB and tensors that autograd keeps after a forward of the whole batch."""
    if case.device.type == "cuda" or case.gradient_batch <= 4:
        size, number = kept(case, model, case.gradient_batch)
        return size / 2**20, number
    (two, _), (four, number) = kept(case, model, 2), kept(case, model, 4)
    return (two + (four - two) * (case.gradient_batch - 2) / 2) / 2**20, number


def measure(case: Case, rounds: int) -> list[Record]:
    models = build(case)
    rows: list[Record] = []
    for way, model in models.items():
        size, number = counted(case, model)
        print(f"{case.model}, {way}: {size:.0f} MiB kept", flush=True)
        rows.append({"kept_mib": round(size, 1), "kept_tensors": number})
        gc.collect()
    nothing: dict[str, list[Seconds]] = {way: [] for way in models}
    peaks, graphs, eager = [None] * len(models), nothing, nothing
    if case.device.type == "cuda":
        peaks, graphs, eager = timed_steps(case, models, rounds)
    result = []
    for (way, _), row, peak in zip(models.items(), rows, peaks, strict=True):
        share = round(row["kept_mib"] / rows[0]["kept_mib"], 3)
        result.append(
            {
                "model": case.model, "shape": "x".join(map(str, (case.gradient_batch, *case.shape))), "layout": "NHWC",
                "precision": case.precision, "device": str(case.device), "way": way, **row, "kept_ratio": share,
                "peak_mib": None if peak is None else round(peak / 2**20, 1),
                "peak_ratio": None if peak is None else round(peak / peaks[0], 3),
                **_times("", graphs, way), **_times("eager_", eager, way),
                "rounds": rounds,
            }
        )  # fmt: skip
    return result


def _times(prefix: str, times: dict[str, list[Seconds]], way: str) -> Record:
    own = times.get(way, [])
    return {
        **spread(f"{prefix}ms", [1e3 * seconds.clock for seconds in own]),
        **spread(f"{prefix}ratio", ratios(own, times[BATCHNORM]) if own else []),
    }


def timed_steps(
    case: Case, models: dict[str, nn.Module], rounds: int
) -> tuple[list[int], dict[str, list[Seconds]], dict[str, list[Seconds]]]:
    """Peaks, and the seconds of steps as CUDA graphs and in eager mode."""
    images, labels = case.batch()
    setting = Setting(case.gradient_batch, 2)
    contenders = {way: Contender(case, Entry(way, setting), model, images, labels) for way, model in models.items()}
    peaks, direct = [], dict[str, Timed]()
    for way, contender in contenders.items():
        contender.step()
        peaks.append(contender.peak())
        print(f"{case.model}, {way}: peak {peaks[-1] / 2**20:.0f} MiB", flush=True)
        direct[way] = timed(contender.timed, case.device, graph=False, sample=SAMPLE)
    eager = take_turns({way: each.seconds for way, each in direct.items()}, rounds)
    pool, ready = torch.cuda.graph_pool_handle(), dict[str, Timed]()
    for way, contender in contenders.items():
        contender.optimizer.zero_grad()
        if way not in (CHECKPOINTS, BOTH):
            ready[way] = timed(contender.timed, case.device, graph=True, sample=SAMPLE, pool=pool)
    graphs = take_turns({way: each.seconds for way, each in ready.items()}, rounds)
    for way, seconds in graphs.items():
        print(f"{case.model}, {way}: {1e3 * min(each.clock for each in seconds):.2f} ms", flush=True)
    return peaks, graphs, eager


def largest(case: Case, limit: float) -> list[Record]:
    """The largest batch, a multiple of 4, of which a step fits `limit` GiB, in every way."""
    total = torch.cuda.get_device_properties(case.device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit * 2**30 / total, case.device)
    rows: list[Record] = []
    for way, model in {way: model.cpu() for way, model in build(case).items()}.items():
        model.to(case.device).train()

        def peak(batch: int, model: nn.Module = model, way: str = way) -> int | None:
            """Peak of a step in bytes, or None if it does not fit."""
            gc.collect()
            torch.cuda.empty_cache()
            own = Case(**{**vars(case), "gradient_batch": batch})
            try:
                contender = Contender(own, Entry(way, Setting(batch, 2)), model, *own.batch())
                contender.step()
                found: int = contender.peak()
                contender.optimizer.zero_grad()
                return found
            except RuntimeError as error:
                if not isinstance(error, torch.cuda.OutOfMemoryError) and "CUDNN" not in str(error).upper():
                    raise
                model.zero_grad()
                return None

        fits = search(peak, limit * 2**30)
        print(f"{case.model} at {case.image_size}, {way}: {fits} images in {limit:g} GiB", flush=True)
        first = rows[0]["largest_batch"] if rows else fits
        rows.append(
            {
                "model": case.model, "image_size": case.image_size, "precision": case.precision,
                "device": str(case.device), "limit_gib": limit, "way": way, "largest_batch": fits,
                "ratio": round(fits / first, 3),
            }
        )  # fmt: skip
        model.cpu()
    return rows


def search(peak: Callable[[int], int | None], limit: float, step: int = 4) -> int:
    """The largest multiple of `step` that fits. Two small batches predict it, and then it is tried."""
    small, double = peak(2 * step), peak(4 * step)
    if small is None or double is None:
        return step if small is None else 2 * step
    each = max((double - small) / (2 * step), 1)
    batch = max(int((limit - small) / each + 2 * step) // step * step, 4 * step)
    while batch > 4 * step and peak(batch) is None:
        batch -= step
    while peak(batch + step) is not None:
        batch += step
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=NETS, help="networks of torchvision or timm, with commas")
    parser.add_argument("--batch", type=int, default=32, help="images per step, in groups of 2")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--limit", type=float, help="GiB: search the largest batch that fits, instead of timing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no further net after so many minutes")
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to write the CSV")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if arguments.limit is not None and device.type != "cuda":
        parser.error("--limit needs a GPU")
    rows: list[Record] = []
    if arguments.output.exists():
        with arguments.output.open(newline="", encoding="utf-8") as file:
            known = set(origin())
            rows = [{k: v for k, v in row.items() if k not in known} for row in csv.DictReader(file)]
    start = time.monotonic()
    torch.backends.cudnn.benchmark = arguments.limit is None  # the search has a new shape in every step
    for net in arguments.nets.split(","):
        if any(row["model"] == net for row in rows):
            continue
        if time.monotonic() - start > 60 * arguments.minutes:
            print(f"{net}: no time left; run the command again", flush=True)
            continue
        graph = device.type == "cuda" and arguments.limit is None
        case = Case(
            model=net, gradient_batch=arguments.batch, device=device, image_size=arguments.image_size,
            channels_last=True, precision="bf16", cuda_graph=graph,
        ).checked()  # fmt: skip
        rows += measure(case, arguments.rounds) if arguments.limit is None else largest(case, arguments.limit)
        write_csv(arguments.output, rows, origin())
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
