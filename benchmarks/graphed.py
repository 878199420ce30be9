"""A training loop in eager mode, with the graphs of `torch.cuda.make_graphed_callables`, and with `kalmannorm.graphed`.

    python benchmarks/graphed.py -o graphed.csv

The steps are those of `kalmannorm bench step`, started from Python: random images, bf16 under autocast, channels_last.
All contenders take turns in each round, and all are in memory at the same time. There are two ratios: to BatchNorm in
the same kind of loop, and to the same norm with torch's graphs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from kalmannorm import graphed
from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.bench.step_contenders import Case, Contender, Entry, entries
from kalmannorm.lab.bench.timing import timed
from kalmannorm.lab.bench.turns import ratios, spread, take_turns
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.origin import origin

EAGER, TORCH, GRAPHED = "eager", "make_graphed_callables", "kalmannorm.graphed"
SAMPLE = 0.5
"""Seconds of one sample. Each begins with an idle GPU, which waits for the host once. A training loop does not."""


def contender(entry: Entry, model: str, device: torch.device, way: str) -> Contender:
    batch, torchs = entry.setting.gradient_batch, way == TORCH
    case = Case(
        model=model, gradient_batch=batch, device=device, channels_last=True, precision="bf16", cuda_graph=torchs
    ).checked()
    images, labels = case.batch()
    found = Contender(case, entry, case.build(entry), images, labels)
    if torchs:
        with case.autocast():
            found.run = torch.cuda.make_graphed_callables(nn.Sequential(found.model), (images.clone(),))
    elif way == GRAPHED:
        found.run = graphed(found.model)
    return found


def measure(model: str, batch: int, device: torch.device, rounds: int) -> list[Record]:
    ways = (EAGER, TORCH, GRAPHED) if device.type == "cuda" else (EAGER, GRAPHED)
    contenders: dict[tuple[str, str], Contender] = {}
    for way in ways:
        for entry in entries(batch, [2], ["bkn"], fused=True):
            contenders[" ".join(filter(None, (entry.method, entry.way))), way] = contender(entry, model, device, way)
    ready = {}
    for (method, way), loop in contenders.items():
        print(f"warming up {method}, {way}", flush=True)
        ready[f"{method}, {way}"] = timed(loop.timed, device, graph=False, sample=SAMPLE)
    times = take_turns({name: one.seconds for name, one in ready.items()}, rounds)
    rows: list[Record] = []
    first = next(method for method, _ in contenders)
    for (method, way), loop in contenders.items():
        own = times[f"{method}, {way}"]
        torchs = times.get(f"{method}, {TORCH}", [])
        row = {
            "model": model, "shape": "x".join(map(str, loop.images.shape)), "m": 2, "method": method, "way": way,
            **spread("ms", [1e3 * seconds.clock for seconds in own]),
            **spread("ratio", ratios(own, times[f"{first}, {way}"])),
            **spread("to_torchs_graphs", ratios(own, torchs) if torchs else []),
            "loss": round(loop.step().item(), 4), "rounds": rounds,
        }  # fmt: skip
        print(f"{method}, {way}: {row['ms']} ms", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet101", help="a network of the lab, torchvision or timm")
    parser.add_argument("--batch", type=int, default=32, help="images per step, in groups of 2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to write the CSV")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = measure(arguments.model, arguments.batch, device, arguments.rounds)
    write_csv(arguments.output, rows, origin())


if __name__ == "__main__":
    main()
