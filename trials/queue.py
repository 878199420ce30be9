"""Trains the runs of a queue: side by side on one device, in one process or in several that share it.

Runs of one cell, one split of the images and one batch train together. Records are appended when runs end. When the
budget is over, running trainings are saved, and the next call on this machine goes on with them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from kalmannorm.lab.machine.origin import hardware
from trials.cells import BATCH, CELLS, Cell, Data, absent, load
from trials.training import Run, Training, train

HERE = Path(__file__).parent
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

    Queue(arguments, end).train_all(free())


class Queue:
    """Runs of one cell, one split of the images and one batch, side by side, until nothing is left or time is over."""

    def __init__(self, arguments: argparse.Namespace, end: float | None = None) -> None:
        self.arguments = arguments
        self._end: float = time.perf_counter() + arguments.budget if end is None else end
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
        processes = [context.Process(target=_worker, args=given, daemon=True) for _ in range(workers)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        bad = [process.exitcode for process in processes if process.exitcode]
        if bad:
            sys.exit(f"{len(bad)} of {workers} workers failed")

    def train_all(self, batches: Iterable[list[tuple[str, Run]]]) -> None:
        torch.backends.cudnn.benchmark = True  # shapes are constant
        missed = sum(self._train(batch) for batch in batches)
        if missed:
            print(f"out of time with {missed} runs to do", file=sys.stderr)

    def _remaining(self) -> float:
        return self._end - time.perf_counter()

    def _train(self, batch: list[tuple[str, Run]]) -> int:
        """Returns how many of these runs are left to do, because time is over."""
        begun = time.perf_counter()
        if self._remaining() < 0:
            return len(batch)
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
        seconds, left = time.perf_counter() - started, 0
        for name, training in trainings:
            if over and training.done < training.steps and not training.diverged:
                left += 1
                continue
            record = {"key": training.run.key, **_outcome(training), "seconds": round(seconds, 1)}
            self._write(name, {**record, "ready": round(ready, 1)}, batch)
            self._place(name, training.run).unlink(missing_ok=True)
        print(f"  ready after {ready:.0f} s, trained in {seconds:.0f} s", flush=True)
        return left

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
