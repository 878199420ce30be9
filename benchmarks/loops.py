"""A training loop as one writes it, with and without graphs that torch makes of the model's forward and backward.

    python benchmarks/loops.py -o loops.csv

Forward, loss, backward and optimizer on random images of 224², bf16 under autocast, channels_last; each contender by
itself, the median of 15 steps. "graphed" is `torch.cuda.make_graphed_callables` before the loop; the loss and the
optimizer are started from Python as before. `kalmannorm bench step` captures those too.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import kalmannorm
from kalmannorm.lab.origin import origin

NORMS = ("nn.BatchNorm", "bkn", "bkn fused")
WAYS = ("eager", "graphed")


def built(name: str, norm: str, example: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name).to(example.device, memory_format=torch.channels_last)
    if norm != "nn.BatchNorm":
        model = kalmannorm.convert(model, example, statistics_batch_size=2)
    return kalmannorm.fuse(model, example) if norm == "bkn fused" else model


def loop(model: nn.Module, x: Tensor, way: str) -> Callable[[], Tensor]:
    """One step of it."""
    labels = torch.randint(1000, x.shape[:1], device=x.device, generator=torch.Generator(x.device).manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    # A graph must hold the casts of the weights, not what an earlier step had cast.
    half: Callable[[], Any] = lambda: torch.autocast(x.device.type, torch.bfloat16, cache_enabled=way == "eager")  # noqa: E731
    run = model
    if way == "graphed":
        with half():
            run = torch.cuda.make_graphed_callables(nn.Sequential(model), (x.clone(),))

    def step() -> Tensor:
        optimizer.zero_grad()
        with half():
            loss = nn.functional.cross_entropy(run(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def timed(step: Callable[[], Tensor], device: torch.device, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and the loss of the last."""
    loss, times = torch.tensor(0.0), []
    for number in range(5 + steps):
        begin = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 5:
            times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times), loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet101", help="of torchvision")
    parser.add_argument("--batch", type=int, default=32, help="images of a step; groups are of 2")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to write the CSV")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    size = arguments.image_size
    x = torch.randn(arguments.batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    rows = []
    for way in WAYS if device.type == "cuda" else WAYS[:1]:
        for norm in NORMS:
            ms, loss = timed(loop(built(arguments.model, norm, x[:2]), x, way), device, arguments.steps)
            print(f"{arguments.model} {norm}, {way}: {ms:.1f} ms", flush=True)
            shape = "x".join(map(str, x.shape))
            case = {"model": arguments.model, "shape": shape, "m": 2, "method": norm, "way": way}
            rows.append({**case, "ms": round(ms, 1), "loss": round(loss, 4), **origin()})
    with arguments.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
