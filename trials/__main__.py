"""Run the runs of rounds that have no record yet.

    python -m trials --round first --cell cifar10     one round of one cell
    python -m trials --round sizes ablations          these rounds, every cell of them
    python -m trials --round small small-edges        small-edges and small-seeds follow from the records so far
    python -m trials --queue                          all rounds of evidence.py, the most telling runs first
    python -m trials --queue --list                   only print what is left to do
    python -m trials --queue --dry                    build every run and train it for a few steps on made-up images

Records are appended to `trials/records/ROUND.jsonl` (or to files in the folder `--records`) when runs end, so an
interrupted round can be continued. `--budget` is the most seconds. When they are over, running trainings are saved in
`trials/unfinished`, and so are they every two minutes. The same command on the same machine goes on with them. A run
that fails gets a record with its error, and is tried again at the end of the next call. Runs whose packs are not there
are skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trials import table
from trials.cells import BATCH, CELLS, made_up
from trials.chosen import FOLLOWING
from trials.evidence import QUEUE
from trials.queue import HERE, Queue, read
from trials.rounds import ROUNDS
from trials.training import Run, Training, train

DRY_STEPS, DRY_BATCH = 2, 16
"""Optimizer steps of a dry run, and the most images in each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--round", choices=[*ROUNDS, *FOLLOWING], nargs="+")
    chosen.add_argument("--queue", action="store_true", help="the rounds of trials/evidence.py, by importance")
    parser.add_argument("--cell", choices=CELLS, nargs="+", help="every cell unless given")
    parser.add_argument("--match", default="", help="a regular expression: only runs whose key contains it")
    parser.add_argument("--packs", type=Path, default=HERE / "packs")
    parser.add_argument("--records", type=Path, default=HERE / "records", help="a folder, for ROUND.jsonl")
    parser.add_argument("--unfinished", type=Path, default=HERE / "unfinished", help="a folder, for running trainings")
    parser.add_argument("--commit", default="", help="commit of the sources, if git is not available")
    parser.add_argument("--together", type=int, default=6, help="runs side by side in a process")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that share the GPU: one trains while another scores"
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--list", action="store_true", help="only print the keys of the runs that are left to do")
    parser.add_argument("--dry", action="store_true", help="a few steps on made-up images, without records")
    arguments = parser.parse_args()
    queue = Queue(arguments)
    for names in [None] if arguments.queue else parts(arguments.round):
        runs = QUEUE if names is None else [(name, run) for name in names for run in runs_of(name, arguments.records)]
        waiting = left(runs, arguments.cell, arguments.match, arguments.records)
        if arguments.list:
            tell(waiting)
        elif arguments.dry:
            try_out(waiting)
        else:
            queue.work(waiting)


def parts(names: Iterable[str]) -> list[list[str]]:
    """The rounds in the order in which they run. Before a round that follows from records, the others must be over."""
    found: list[list[str]] = []
    for name in names:
        if not found or name in FOLLOWING:
            found.append([])
        found[-1].append(name)
    return found


def runs_of(name: str, records: Path) -> list[Run]:
    if name in ROUNDS:
        return ROUNDS[name]
    rows = table.records()
    return FOLLOWING[name](rows if records == table.RECORDS else [*rows, *table.records(records)])


def tell(waiting: list[tuple[str, Run]]) -> None:
    for name, run in waiting:
        print(f"{name}: {run.key}")
    print(f"{len(waiting)} runs to do")


def try_out(waiting: list[tuple[str, Run]]) -> None:
    short = {small(run): run.key for _, run in reversed(waiting)}  # runs that differ in m or a rate may be equal here
    for run, key in reversed(short.items()):
        begun = time.perf_counter()
        loss = dry(run)["loss"]
        print(f"{key}: loss {loss:.3f} in {time.perf_counter() - begun:.1f} s", flush=True)
    print(f"{len(short)} different runs of {len(waiting)}")


def left(
    runs: Iterable[tuple[str, Run]], cells: Iterable[str] | None, match: str, records: Path
) -> list[tuple[str, Run]]:
    """Those without a record, of these cells, whose key matches. Those that failed before come last."""
    runs = list(runs)
    done, failed = set(), set()
    for name in dict.fromkeys(name for name, _ in runs):
        for path in {records / f"{name}.jsonl", HERE / "records" / f"{name}.jsonl"}:
            for row in read(path):
                (failed if "failed" in row else done).add((name, row["key"]))
    mine = [(name, run) for name, run in runs if cells is None or run.cell in cells]
    found = [(name, run) for name, run in mine if (name, run.key) not in done and re.search(match, run.key)]
    return sorted(found, key=lambda each: (each[0], each[1].key) in failed)


def small(run: Run) -> Run:
    """The run with small batches, for a few steps. A closing phase begins and ends within them."""
    batch = min(run.batch or BATCH, DRY_BATCH)
    form = dataclasses.replace(run.form, m=min(run.form.m, batch), close=(0.0, 0.5))
    form = form if run.form.closing else dataclasses.replace(form, close=run.form.close)
    return dataclasses.replace(run, form=form, seed=0, batch=batch, epochs=1, rate=None, decay=None)


def dry(run: Run) -> dict[str, Any]:
    """Scores and loss of a small run after a few steps on made-up images."""
    cell, device = CELLS[run.cell], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = run.batch or BATCH
    data = made_up(cell, max(2 * DRY_STEPS * batch, 40), device, test=run.test, both=run.both)
    data = dataclasses.replace(data, train=data.train[: DRY_STEPS * batch])
    training = Training(run, cell, data, graph=device.type == "cuda")
    train([training])
    loss = training.loss()
    if training.done != DRY_STEPS or not math.isfinite(loss):
        raise RuntimeError(f"{run.key}: {training.done} steps, loss {loss}")
    return {**training.scores(), "loss": loss, "reached": training.reached}


if __name__ == "__main__":
    main()
