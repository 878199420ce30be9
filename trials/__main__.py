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
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from kalmannorm.lab.machine.origin import hardware
from trials import table
from trials.cells import BATCH, CELLS, Cell, Data, absent, load, made_up
from trials.chosen import FOLLOWING
from trials.evidence import QUEUE
from trials.rounds import ROUNDS
from trials.training import Run, Training, train

HERE = Path(__file__).parent
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


IMAGES = 50_000
"""Training images of every data set of a cell whose steps have a measured time."""
PREPARING = 30.0
"""Seconds of a call in which nothing is trained, if the kernels are built."""


def affordable(waiting: list[tuple[str, Run]], budget: float, at_once: int) -> list[tuple[str, Run]]:
    """The first of these runs, as many as are likely to end in time. Another machine could not go on with the others.

    A GPU is full with a few runs side by side, so their times add up. Where the time of a step was not measured, no
    more runs begin than train at once. One run begins in any case: on the same machine a later call goes on with it.
    """
    total = 0.0
    for count, (_, run) in enumerate(waiting):
        total += _expected(run) or (budget - PREPARING) / at_once
        if count and total > budget - PREPARING:
            print(f"no time for {len(waiting) - count} runs", flush=True)
            return waiting[:count]
    return waiting


def _expected(run: Run) -> float:
    """Seconds of an H200. 0: not known."""
    cell = CELLS[run.cell]
    epochs = cell.epochs if run.epochs is None else run.epochs
    return 1e-3 * cell.step * epochs * IMAGES * (1.0 if run.test else 0.9) / BATCH


def side_by_side(waiting: list[tuple[str, Run]], together: int) -> list[list[tuple[str, Run]]]:
    """Runs of one cell, one split of the images and one batch, in the order of the first of each."""
    by_split: dict[Any, list[tuple[str, Run]]] = {}
    found = []
    for each in waiting:
        own = by_split.get(_split(each[1]))
        if own is None or len(own) == together:
            own = by_split[_split(each[1])] = []
            found.append(own)
        own.append(each)
    return found


def _worker(arguments: argparse.Namespace, end: float, batches: list[list[tuple[str, Run]]], taken: Any) -> None:
    """Train batches that no other worker has taken, until none is left or time is over."""

    parent = os.getppid()

    def free() -> Iterator[list[tuple[str, Run]]]:
        while True:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(batches) or os.getppid() != parent:  # no parent: another call may train the same runs
                return
            yield batches[number]

    queue = Queue(arguments)
    queue._end = end
    queue.train_all(free())


class Queue:
    """Runs of one cell, one split of the images and one batch, side by side, until nothing is left or time is over."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self._end = arguments, time.perf_counter() + arguments.budget
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.loaded: dict[tuple[str, bool, bool], Data] = {}

    def work(self, waiting: list[tuple[str, Run]]) -> None:
        print(f"{len(waiting)} runs to do", flush=True)
        packs = {run: absent(CELLS[run.cell], self.arguments.packs, test=run.test or run.both) for _, run in waiting}
        for name in sorted({pack for found in packs.values() for pack in found}):
            print(f"no pack {name}: {sum(name in found for found in packs.values())} runs are skipped", flush=True)
        waiting = [(name, run) for name, run in waiting if not packs[run]]
        if not math.isinf(self.arguments.budget):
            at_once = self.arguments.together * self.arguments.workers
            waiting = affordable(waiting, self.arguments.budget, at_once)
        batches = side_by_side(waiting, self.arguments.together)
        workers = min(self.arguments.workers, len(batches))
        if workers <= 1:
            self.train_all(iter(batches))
            return
        context = multiprocessing.get_context("spawn")
        given = self.arguments, self._end, batches, context.Value("q")
        worker = importlib.import_module("trials.__main__")._worker  # by its name in here, spawn would not find it
        processes = [context.Process(target=worker, args=given, daemon=True) for _ in range(workers)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        bad = [process.exitcode for process in processes if process.exitcode]
        if bad:
            sys.exit(f"{len(bad)} of {workers} workers failed")

    def train_all(self, batches: Iterable[list[tuple[str, Run]]]) -> None:
        torch.backends.cudnn.benchmark = True  # shapes are constant
        missed = 0
        for batch in batches:
            try:
                self._train(batch)
            except TimeoutError:
                missed += len(batch)
        if missed:
            print(f"out of time with {missed} runs to do", file=sys.stderr)

    def _remaining(self) -> float:
        return self._end - time.perf_counter()  # type: ignore[no-any-return]

    def _train(self, batch: list[tuple[str, Run]]) -> None:
        begun = time.perf_counter()
        if self._remaining() < 0:
            raise TimeoutError
        cell = CELLS[batch[0][1].cell]
        data = self._data(cell, batch[0][1])
        trainings = []
        for name, run in batch:
            try:
                trainings.append((name, self._training(name, run, cell, data)))
            except (RuntimeError, ValueError, TypeError) as error:  # the others can still run
                self._write(name, {"key": run.key, "failed": f"{type(error).__name__}: {error}"[:500]}, batch)
        ready = time.perf_counter() - begun
        started, over = time.perf_counter(), False
        try:
            train([training for _, training in trainings], self._remaining(), self._keeper(trainings))
        except TimeoutError:
            over = True
        except RuntimeError as error:  # after an error of CUDA nothing else can run in this process
            for name, training in trainings:
                words = f"beside {len(trainings) - 1} others: {type(error).__name__}: {error}"[:500]
                self._write(name, {"key": training.run.key, "failed": words}, batch)
                if not isinstance(error, torch.OutOfMemoryError):
                    self._place(name, training.run).unlink(missing_ok=True)
            raise
        seconds = time.perf_counter() - started
        for name, training in trainings:
            if over and training.done < training.steps and not training.diverged:
                continue
            record = {"key": training.run.key, **_outcome(training), "seconds": round(seconds, 1)}
            self._write(name, {**record, "ready": round(ready, 1)}, batch)
            self._place(name, training.run).unlink(missing_ok=True)
        if over:
            raise TimeoutError
        print(f"  ready after {ready:.0f} s, trained in {seconds:.0f} s", flush=True)

    def _data(self, cell: Cell, run: Run) -> Data:
        """The images of this cell, on the device. Cells of one data set share them."""
        key = cell.images, run.test, run.both
        if key not in self.loaded:
            self.loaded[key] = load(cell, self.arguments.packs, self.device, test=run.test, both=run.both)
        return self.loaded[key]

    def _training(self, name: str, run: Run, cell: Cell, data: Data) -> Training:
        place = self._place(name, run)
        saved = torch.load(place, map_location="cpu", weights_only=True) if place.is_file() else None
        return Training(run, cell, data, graph=self.device.type == "cuda", saved=saved)

    def _place(self, name: str, run: Run) -> Path:
        folder: Path = self.arguments.unfinished
        return folder / f"{hashlib.sha256(f'{name}: {run.key}'.encode()).hexdigest()[:16]}.pt"

    def _keeper(self, trainings: list[tuple[str, Training]]) -> Callable[[Training], None]:
        names = {id(training): name for name, training in trainings}
        return lambda training: self._save(names[id(training)], training)

    def _save(self, name: str, training: Training) -> None:
        place = self._place(name, training.run)
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(training.saved(), place.with_suffix(".new"))
        place.with_suffix(".new").replace(place)

    def _write(self, name: str, record: dict[str, Any], batch: list[tuple[str, Run]]) -> None:
        record |= {"together": len(batch), **origin(self.arguments.commit)}
        path = self.arguments.records / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        scored = record.get("failed") or record.get("test") or record["held_out"]
        print(f"{name}: {record['key']}: {scored} loss {record.get('loss')}", flush=True)


def _split(run: Run) -> tuple[Any, ...]:
    return run.cell, run.test, run.both, run.batch


def _outcome(training: Training) -> dict[str, Any]:
    run, loss, scores = training.run, training.loss(), training.scores()
    found: dict[str, Any] = {
        "cell": run.cell,
        "seed": run.seed,
        "epochs": training.epochs,
        "rate": training.rate,
        "form": vars(run.form),
        "decay": training.decay,
        "batch": training.batch,
        "test" if run.test else "held_out": scores["held_out"],
        "loss": round(loss, 4) if math.isfinite(loss) else None,
        "curve": training.curve(),
        "weights": training.weights(),
        "steps": training.steps,
    }
    if training.done < training.steps:
        found["stopped"] = training.done  # its loss was not finite
    if "tested" in scores:
        found["tested"] = scores["tested"]
    if training.reached:
        found["reached"] = training.reached
    return found


def origin(commit: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else hardware()
    if not commit:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    return {"hardware": name, "torch": torch.__version__, "commit": commit}


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
