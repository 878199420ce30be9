"""A training loop as one writes it, with and without graphs that torch makes of the model's forward and backward.

    python benchmarks/loops.py -o loops.csv

The steps of `kalmannorm bench step`, started from Python: random images, bf16 under autocast, channels_last. Contenders
take turns, a step each; the median of 15 rounds, 20th and 80th percentile. "graphed" is
`torch.cuda.make_graphed_callables` before the loop; the loss and the optimizer are started from Python as before.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import torch
from torch import nn

from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.bench.step_contenders import Case, Contender, Entry, entries
from kalmannorm.lab.bench.turns import Seconds, check_rounds, spread, take_turns
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.origin import origin
from kalmannorm.lab.records import Record

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


def seconds(loop: Contender) -> Seconds:
    """Of one step, from its start in Python until the GPU has done it."""
    begin = time.perf_counter()
    loop.step()
    if loop.images.is_cuda:
        torch.cuda.synchronize(loop.images.device)
    return Seconds(time.perf_counter() - begin)


def measure(model: str, batch: int, device: torch.device, rounds: int) -> list[Record]:
    ways = (EAGER, GRAPHED) if device.type == "cuda" else (EAGER,)
    contenders = entries(batch, [2], ["bkn"], fused=True)
    loops = {(way, entry): contender(entry, model, device, way) for way in ways for entry in contenders}
    timers = {f"{entry}, {way}": functools.partial(seconds, loop) for (way, entry), loop in loops.items()}
    times = take_turns(timers, rounds)
    rows: list[Record] = []
    for (way, entry), loop in loops.items():
        ms = spread("ms", [1e3 * one.clock for one in times[f"{entry}, {way}"]], digits=1)
        method = " ".join(filter(None, (entry.method, entry.way)))
        print(f"{model} {method}, {way}: {ms['ms']} ms", flush=True)
        case = {"model": model, "shape": "x".join(map(str, loop.images.shape)), "m": 2, "method": method, "way": way}
        # Every contender has done as many steps, so a graph's loss is the one from Python.
        rows.append({**case, "rounds": rounds, **ms, "loss": round(loop.step().item(), 4)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet101", help="one of the lab's nets, or a name of torchvision or timm")
    parser.add_argument("--batch", type=int, default=32, help="images of a step; groups are of 2")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender, in turn")
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to write the CSV")
    arguments = parser.parse_args()
    try:
        check_rounds(arguments.rounds)
    except LabError as error:
        parser.error(str(error))
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = measure(arguments.model, arguments.batch, device, arguments.rounds)
    write_csv(arguments.output, rows, origin())


if __name__ == "__main__":
    main()
