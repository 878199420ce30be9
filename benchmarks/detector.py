"""Eager steps of a detector on images of changing size, and how many kernels new sizes need.

    python benchmarks/detector.py -o detector.csv

The net is torchvision's `fasterrcnn_resnet50_fpn` without pretrained weights, with batch norms that train. Every step
has two images of another size, with three boxes each. The shorter side is around 800 after the detector has scaled the
images. All ways see the same images, and take turns. Steps run in bf16 under autocast, channels_last, with SGD.

A row has the time of a step, its ratio to BatchNorm, and for BKN the number of kernels that were built: in the first
ten steps, and later, where every step has a size that has not come before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, nn

import kalmannorm
from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.bench.turns import Seconds, ratios, spread, take_turns
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.origin import origin

BATCHNORM, BKN, FUSED = "BatchNorm", "BKN", "BKN fused"
EARLY = 10
"""Steps in which kernels are expected to be built."""

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


def batches(count: int, size: int, device: torch.device) -> list[Batch]:
    """Two images per batch with sides from 0.8 to 1.25 times `size`, and three boxes in each."""
    rng = torch.Generator().manual_seed(0)
    found: list[Batch] = []
    for _ in range(count):
        images, targets = list[Tensor](), list[dict[str, Tensor]]()
        for _ in range(2):
            height, width = (int(size * (0.8 + 0.45 * float(torch.rand((), generator=rng)))) for _ in range(2))
            images.append(torch.randn(3, height, width, generator=rng).to(device))
            corner = torch.rand(3, 2, generator=rng) * 0.5
            boxes = torch.cat([corner, corner + 0.1 + torch.rand(3, 2, generator=rng) * 0.3], 1)
            scaled = boxes * torch.tensor([width, height, width, height])
            labels = torch.randint(1, 91, (3,), generator=rng)
            targets.append({"boxes": scaled.to(device), "labels": labels.to(device)})
        found.append((images, targets))
    return found


def detector(way: str, size: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model: Any = torchvision.models.detection.fasterrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, min_size=size, max_size=2 * size
    )
    model = model.to(device, memory_format=torch.channels_last)
    if way == BATCHNORM:
        return cast(nn.Module, model)
    # The backbone has all batch norms. Its example need not be large.
    example = torch.randn(2, 3, 64, 64, device=device).contiguous(memory_format=torch.channels_last)
    kalmannorm.convert(model.backbone, example, statistics_batch_size=2, inplace=True)
    if way == FUSED:
        model.backbone = kalmannorm.fuse(model.backbone, example)
    return cast(nn.Module, model)


class Built:
    """Counts the kernels that Triton builds or loads from its cache."""

    def __init__(self) -> None:
        self.count = 0
        try:
            import triton
        except ImportError:
            return
        runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
        if hasattr(runtime, "jit_post_compile_hook"):
            runtime.jit_post_compile_hook = self._add

    def _add(self, *_: Any, **__: Any) -> None:
        self.count += 1


def measure(count: int, size: int, rounds: int, device: torch.device) -> list[Record]:
    data, built, steps = batches(count, size, device), Built(), dict[str, Callable[[Batch], None]]()
    kernels: dict[str, tuple[int, int]] = {}
    for way in (BATCHNORM, BKN, FUSED):
        model = detector(way, size, device).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step(batch: Batch, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                losses: dict[str, Tensor] = model(*batch)
                loss = torch.stack([value.float() for value in losses.values()]).sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        steps[way] = step
        before = built.count
        for batch in data[:EARLY]:
            step(batch)
        early = built.count - before
        for batch in data[EARLY:]:
            step(batch)
        kernels[way] = early, built.count - before - early
        print(f"{way}: {early} kernels in {min(EARLY, count)} steps, then {kernels[way][1]}", flush=True)

    def timer(step: Callable[[Batch], None]) -> Callable[[], Seconds]:
        def run() -> Seconds:
            start = time.perf_counter()
            for batch in data:
                step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return Seconds((time.perf_counter() - start) / len(data))

        return run

    times = take_turns({way: timer(step) for way, step in steps.items()}, rounds)
    rows: list[Record] = []
    for way, own in times.items():
        row: Record = {
            "model": "fasterrcnn_resnet50_fpn", "images": 2, "size": size, "sizes": count, "precision": "bf16",
            "device": str(device), "way": way, **spread("ms", [1e3 * each.clock for each in own]),
            **spread("ratio", ratios(own, times[BATCHNORM])),
            "kernels_in_first_steps": kernels[way][0], "kernels_later": kernels[way][1], "rounds": rounds,
        }  # fmt: skip
        print(f"{way}: {row['ms']} ms, {row['ratio']} of BatchNorm's", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=50, help="steps, each with a size of its own")
    parser.add_argument("--size", type=int, default=800, help="the shorter side of an image")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to write the CSV")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = measure(arguments.sizes, arguments.size, arguments.rounds, device)
    write_csv(arguments.output, rows, origin())


if __name__ == "__main__":
    main()
