"""The losses of the first steps of trainings, on any machine.

    python -m trials.early --match "cifar100.*m=1" --steps 200

How a norm starts is seen in 200 steps, which a CPU can make. The runs are those of the round `fifteenth`, with the
images, schedules and seeds that they have there. A record in `records/early/losses.jsonl` contains the mean loss of
every 25 steps. A CPU computes in float32, a GPU in bf16.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch

from trials.cells import CELLS, Cell, Data, load
from trials.queue import HERE, origin, read
from trials.rounds import ROUNDS
from trials.training import Run, Training

RECORD = HERE / "records" / "early" / "losses.jsonl"
ROUND = "fifteenth"
PART = 25
"""Steps whose losses are averaged."""


def losses(run: Run, cell: Cell, data: Data, steps: int) -> list[float]:
    """The mean loss of each `PART` steps, from the first `steps` of a training."""
    training = Training(run, cell, data, graph=False)
    while training.done < min(steps, training.steps):
        training.step()
    return [round(float(part.mean()), 3) for part in training.losses[: training.done].split(PART)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="a regular expression: only runs whose key contains it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--packs", type=Path, default=HERE / "packs")
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = {(row["key"], row["steps"]) for row in read(arguments.record)}
    loaded: dict[str, Data] = {}
    for run in ROUNDS[ROUND]:
        if not re.search(arguments.match, run.key) or (run.key, arguments.steps) in known:
            continue
        cell = CELLS[run.cell]
        if run.cell not in loaded:
            loaded[run.cell] = load(cell, arguments.packs, device)
        begun = time.perf_counter()
        found = losses(run, cell, loaded[run.cell], arguments.steps)
        row = {"key": run.key, "steps": arguments.steps, "losses": found, **origin("")}
        row["seconds"] = round(time.perf_counter() - begun, 1)
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        with arguments.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{run.key}: {found}", flush=True)


if __name__ == "__main__":
    main()
