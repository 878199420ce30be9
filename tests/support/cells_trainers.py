"""Trainers that take no time, for tests of comparisons: workers import this file, so it is no part of a test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kalmannorm.lab.errors import DivergedError, Interrupted, LabError
from kalmannorm.lab.files.records import write_json
from kalmannorm.lab.recipes.recipe import Execution, Recipe


def describe(recipe: Recipe, folder: Path) -> None:
    write_json(folder / "recipe.json", {"recipe": recipe.to_json(), "execution": {}, "origin": {}})


def conclude(recipe: Recipe, folder: Path, accuracy: float = 85.0, diverged: bool = False) -> dict:
    result = {
        "accuracy": {"population": accuracy + recipe.seed},
        "loss": {"population": 0.5},
        "steps": 10,
        "epochs": recipe.epochs,
        "seconds": 1.0,
        "images_per_second": 100.0,
        "parameters": 7,
        "peak_memory": None,
        "gains": {},
        "diverged": diverged,
        "pid": os.getpid(),
    }
    write_json(folder / "result.json", result)
    return result


def troubled(recipe: Recipe, folder: Path, execution: Execution, *, resume: bool, watch) -> dict:
    """Ends as its seed says."""
    again = (folder / "recipe.json").is_file()
    assert resume
    describe(recipe, folder)
    watch(
        {"event": "progress", "step": 5, "steps": 10, "epoch": 1.0, "loss": 1.0, "accuracy": 50.0}
        | {"images_per_second": 9.0}
    )
    if recipe.seed == 1:
        conclude(recipe, folder, 10.0, diverged=True)
        raise DivergedError("the loss is nan")
    if recipe.seed == 2:
        raise LabError("the data are missing: fetch them")
    if recipe.seed == 5:
        print("said before the fall")
        write_json(folder / "fallen.json", {"pid": os.getpid()})
        raise ZeroDivisionError("a bug\nof two lines")
    if recipe.seed == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if recipe.seed == 3:
        os._exit(7)
    time.sleep(0.3)  # so that no worker is done with all before another has started
    result = conclude(recipe, folder)
    write_json(folder / "seen.json", {"device": execution.device, "again": again})
    return result


def patient(recipe: Recipe, folder: Path, execution: Execution, *, resume: bool, watch) -> dict:
    """Seed 0 ends at once; the others wait for signals, save for a while as a large model would, and count."""
    describe(recipe, folder)
    if recipe.seed == 0:
        return conclude(recipe, folder)
    signals = []
    signal.signal(signal.SIGINT, lambda *_: signals.append(time.monotonic()))
    (folder / "waiting").touch()
    for _ in range(600):
        if signals:
            break
        time.sleep(0.05)
    time.sleep(0.5)
    write_json(folder / "saved.json", {"signals": len(signals)})
    raise Interrupted("saved")


def counted(recipe: Recipe, folder: Path, execution: Execution, *, resume: bool, watch) -> dict:
    """The real training. It leaves the process id of everyone who began it in the file `begun`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "begun").open("a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    from kalmannorm.lab.training.train import train

    return train(recipe, folder, execution, resume=resume, watch=watch)
