"""Kills runs at random moments and compares what they end with to a run that nobody disturbed.

A rank of a torchrun job is killed, and torchrun starts all ranks again; a whole job, or a run in one process, is killed
or interrupted by Ctrl-C, and is started again. A moment is a sign of progress (the folder, the recipe, a checkpoint, a
file half written, the result) and a random time after it. A run is lost if it does not reach its result, and unequal if
its weights, log or result differ in a bit. Linux only: the ranks are found in /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kalmannorm.lab.files import checkpoint
from support.lab_runs import ENVIRONMENT, launcher, numbers, weights, workers

MUST_BE_ZERO = ("lost", "unequal", "tracebacks")

KINDS = ("process", "rank", "job", "rank", "interrupt", "rank")
"""What is attacked, in turn."""

OPTIONS = [
    *("--epochs", "4", "--train-examples", "512", "--test-examples", "128", "--setting", "64,2"),
    *("--save-every", "5", "--log-every", "3", "--evaluate-every", "2", "--precision", "float64", "--no-tensorboard"),
]
STARTS = 4
"""Again, at most: one is enough."""
LIMIT = 300
"""Seconds for one start."""

Moment = Callable[[Path], bool]

MOMENTS: dict[str, Moment] = {
    "start": lambda folder: True,
    "folder": lambda folder: folder.exists(),
    "recipe": lambda folder: (folder / "recipe.json").exists(),
    "checkpoint": lambda folder: bool(checkpoint.checkpoints(folder)),
    "second checkpoint": lambda folder: len(checkpoint.checkpoints(folder)) > 1,
    "half written": lambda folder: any((folder / "checkpoint").glob(".*")),
    "weights": lambda folder: (folder / "model.safetensors").exists(),
    "result": lambda folder: (folder / "result.json").exists(),
}


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    counts = dict.fromkeys(("kills", "interrupts", "restarts", *MUST_BE_ZERO), 0)
    undisturbed: dict[int, tuple[Path, float]] = {}
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)]
        ranks = {"rank": 2, "job": 2, "process": 1, "interrupt": rng.choice((1, 2))}[kind]
        if ranks not in undisturbed:
            undisturbed[ranks] = _undisturbed(folder / f"undisturbed-{ranks}", ranks)
        expected, seconds = undisturbed[ranks]
        moment = rng.choice(list(MOMENTS))
        delay = rng.uniform(0, seconds if moment == "start" else 0 if moment == "half written" else 0.5)
        place = folder / f"run-{number}"
        _attack(kind, ranks, place, moment, delay, rng.randrange(2), counts)
        if (fault := _fault(place, expected)) is not None:
            counts["unequal" if (place / "result.json").exists() else "lost"] += 1
            what = f"{kind} (of {ranks}), {delay:.2f} s after {moment}"
            print(f"kills: attack {number} of seed {seed}, {what}: {fault}", file=sys.stderr)
            print(_errors(place).read_text(), file=sys.stderr)
    return counts


def _undisturbed(folder: Path, ranks: int) -> tuple[Path, float]:
    """The run, and the seconds it took."""
    begun = time.monotonic()
    process = _start(folder, ranks)
    if process.wait(LIMIT) != 0:
        raise RuntimeError(f"a run that nobody disturbed failed: {_errors(folder).read_text()}")
    return folder, time.monotonic() - begun


def _attack(
    kind: str, ranks: int, folder: Path, moment: str, delay: float, victim: int, counts: dict[str, int]
) -> None:
    """One run, attacked once and started again until it ends well."""
    process = _start(folder, ranks)
    try:
        while process.poll() is None and not MOMENTS[moment](folder):
            time.sleep(0.002)
        time.sleep(delay)
        while process.poll() is None and ranks == 2 and len(found := workers(process)) < 2:
            time.sleep(0.002)
        if process.poll() is None:
            counts["interrupts" if kind == "interrupt" else "kills"] += 1
            if kind == "rank":
                _send(signal.SIGKILL, found[victim])
            elif kind == "interrupt":
                _send(signal.SIGINT, process.pid)  # of a torchrun job, as a terminal does it
            else:
                _send(signal.SIGKILL, process.pid, *(found.values() if ranks == 2 else ()))
        starts = 0
        while process.wait(LIMIT) != 0 and kind != "rank" and starts < STARTS:
            starts += 1
            process = _start(folder, ranks, resume=ranks == 1 and (folder / "recipe.json").exists())
    except subprocess.TimeoutExpired:
        _send(signal.SIGKILL, process.pid, *workers(process).values())
        process.wait()
    errors = _errors(folder).read_text()
    counts["restarts"] += starts if kind != "rank" else errors.count("failed (exitcode: ")
    # Of ours: torchrun tells by a traceback of its own that it was interrupted.
    counts["tracebacks"] += sum("kalmannorm" in text for text in errors.split("Traceback (most recent")[1:])


def _start(folder: Path, ranks: int, *, resume: bool = False) -> subprocess.Popen[str]:
    """As a user does it: by the console script, or by torchrun, whose command is the same each time."""
    script = ["-c", "from kalmannorm_command import main; main()"] if ranks == 1 else ["-m", "kalmannorm"]
    elastic = ["--max-restarts", str(STARTS)] if ranks > 1 else []
    what = ["--resume", str(folder)] if resume else [*OPTIONS, "--out", str(folder)]
    with _errors(folder).open("a") as errors:
        words = [*launcher(ranks), *elastic, *script, "train", *what]
        return subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=errors, text=True)


def _send(number: int, *processes: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _errors(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.stderr")


def _fault(folder: Path, expected: Path) -> str | None:
    """What is wrong with a run that should have ended as another did."""
    if not (folder / "result.json").exists():
        return "there is no result"
    own, other = weights(folder), weights(expected)
    if own.keys() != other.keys() or not all(torch.equal(own[name], other[name]) for name in own):
        return "other weights"
    if numbers(folder) != numbers(expected):
        return "another log"
    return None if _result(folder) == _result(expected) else "another result"


def _result(folder: Path) -> dict[str, object]:
    """Without what depends on the clock."""
    result = json.loads((folder / "result.json").read_text())
    return {name: value for name, value in result.items() if name not in ("seconds", "images_per_second")}
