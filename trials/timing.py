"""How long a step of the forms of the CIFAR table takes on a GPU, alone and with others beside it.

    python -m trials.timing --cell cifar10            # prints CSV; records/steps-h200.csv is such a file

The images are made up. A step is one replay of a training's graph. `side by side` is the time of all steps divided by
their number: what a step costs a queue. `Cell.step` has it, to plan how many runs fit into a budget.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
import time

import torch

from trials.cells import BATCH, CELLS, made_up
from trials.evidence import LONG, TABLE3, WARMUP
from trials.queue import origin
from trials.training import Run, Training

COLUMNS = ("cell", "what", "count", "ms", "hardware", "torch", "commit")
REPLAYS = 40
BATCHES = 30
"""Batches of made-up images."""
BESIDE = (4, 8)


def prepared(cell: str, name: str) -> Training:
    form, device = TABLE3[name], torch.device("cuda")
    data = made_up(CELLS[cell], 2 * BATCHES * BATCH, device, test=True)
    data = dataclasses.replace(data, train=data.train[: BATCHES * BATCH])
    warm = WARMUP if form.kind in ("group", "standardized") else 0.0
    return Training(Run(cell, form, epochs=LONG, test=True, warmup=warm), CELLS[cell], data, graph=True)


def milliseconds(trainings: list[Training]) -> float:
    """Of one step, with the others side by side."""

    def replay(times: int) -> None:
        for _ in range(times):
            for training in trainings:
                with torch.cuda.stream(training.stream):
                    assert training.graph is not None
                    training.graph.replay()
        torch.cuda.synchronize()

    replay(5)
    begun = time.perf_counter()
    replay(REPLAYS)
    return 1e3 * (time.perf_counter() - begun) / REPLAYS / len(trainings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", choices=CELLS, default="cifar10")
    parser.add_argument("--commit", default="", help="commit of the sources, if git is not available")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("steps are timed on a GPU, and torch sees none")
    torch.backends.cudnn.benchmark = True
    writer, same = csv.writer(sys.stdout), origin(arguments.commit).values()
    writer.writerow(COLUMNS)
    trainings = []
    for name in TABLE3:
        trainings.append(prepared(arguments.cell, name))
        writer.writerow([arguments.cell, name, 1, f"{milliseconds(trainings[-1:]):.3f}", *same])
        sys.stdout.flush()
    for count in BESIDE:
        writer.writerow([arguments.cell, "side by side", count, f"{milliseconds(trainings[:count]):.3f}", *same])


if __name__ == "__main__":
    main()
