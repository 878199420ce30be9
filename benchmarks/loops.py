"""A typical training loop, with and without CUDA graphs that torch makes of the model's forward and backward.

    python benchmarks/loops.py -o loops.csv

The steps are those of `kalmannorm bench step`, started from Python: random images, bf16 under autocast, channels_last.
Each contender runs alone, and the median of 15 steps is taken. "graphed" is `torch.cuda.make_graphed_callables` before
the loop. The loss and the optimizer are still started from Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.bench.step_contenders import Case, Contender, Entry, entries
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.origin import origin

EAGER, GRAPHED = "eager", "graphed"


def contender(entry: Entry, model: str, device: torch.device, way: str) -> Contender:
    batch, graphed = entry.setting.gradient_batch, way == GRAPHED
    case = Case(
        model=model, gradient_batch=batch, device=device, channels_last=True, precision="bf16", cuda_graph=graphed
    ).checked()
    images, labels = case.batch()
    found = Contender(case, entry, case.build(entry), images, labels)
    if graphed:
        with case.autocast():
            found.run = torch.cuda.make_graphed_callables(nn.Sequential(found.model), (images.clone(),))
    return found


def timed(loop: Contender, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and the loss of the last step."""
    loss, times = torch.zeros(()), []
    for number in range(5 + steps):
        begin = time.perf_counter()
        loss = loop.step()
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        if number >= 5:
            times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times), loss.item()


def measure(model: str, batch: int, device: torch.device, steps: int) -> list[Record]:
    rows: list[Record] = []
    for way in (EAGER, GRAPHED) if device.type == "cuda" else (EAGER,):
        for entry in entries(batch, [2], ["bkn"], fused=True):
            loop = contender(entry, model, device, way)
            ms, loss = timed(loop, steps)
            method = " ".join(filter(None, (entry.method, entry.way)))
            print(f"{model} {method}, {way}: {ms:.1f} ms", flush=True)
            case = {"model": model, "shape": "x".join(map(str, loop.images.shape)), "m": 2, "method": method}
            rows.append({**case, "way": way, "ms": round(ms, 1), "loss": round(loss, 4)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet101", help="a network of the lab, torchvision or timm")
    parser.add_argument("--batch", type=int, default=32, help="images per step, in groups of 2")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to write the CSV")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = measure(arguments.model, arguments.batch, device, arguments.steps)
    write_csv(arguments.output, rows, origin())


if __name__ == "__main__":
    main()
