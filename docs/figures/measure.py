"""Measures what the README shows, and writes it to `records/`; `draw.py` draws it.

    python docs/figures/measure.py             digits, about 4 minutes on two CPU cores
    python docs/figures/measure.py cifar10     on a GPU, after `kalmannorm data fetch cifar10`

Run it from the repository's root; the same command again goes on where it was broken off. The digits are those of
`kalmannorm demo`, with five seeds. `records/accuracy.jsonl` and `records/cifar10.jsonl` hold the test accuracy of each
run; `records/deviation.jsonl` says how far, in each layer, the σ that a batch is normalized with in training lies from
the σ that inference will use:

    ratio = sqrt(posterior var of a batch / running var)      per channel and batch; 1 where the two agree

Batch norm's posterior is the batch's own variance. "gain" is q, the trust in the batch, averaged over seeds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kalmannorm.lab.comparing.cells import grid
from kalmannorm.lab.comparing.compare import run_cells
from kalmannorm.lab.files.records import Record, Run
from kalmannorm.lab.recipes.presets import preset
from kalmannorm.lab.recipes.recipe import Execution
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm_command.demo import CHANGES, METHODS, SETTINGS

RECORDS = Path(__file__).parent / "records"
PERCENTILES = (5, 25, 50, 75, 95)
NAMES = {"bn": "BN", "brn": "BRN", "gn": "GN", "bkn": "BKN weights", "bkn-learned": "BKN learned"}
DEVIATING = [(name, m) for name in ("bn", "bkn-learned", "bkn") for m in (2, 1)]


def cell(run: Run) -> Record:
    recipe = run.recipe
    return {
        "method": NAMES[recipe.method] + (" warmed up" if recipe.warmup_epochs else ""),
        "gradient_batch": recipe.gradient_batch,
        "statistics_batch": recipe.statistics_batch,
    }


def accuracy(run: Run) -> Record:
    result = run.result
    assert result is not None
    return {
        **cell(run),
        "seed": run.recipe.seed,
        "epochs": run.recipe.epochs,
        "accuracy": {mode: round(value, 3) for mode, value in result["accuracy"].items()},
        "seconds": result["seconds"],
        **run.record["origin"],
    }


def deviations(runs: list[Run]) -> Iterable[Record]:
    """Of one method and setting: a record per layer, over the seeds."""
    gaps = [run.analysis("variance-gap")["layers"] for run in runs]
    gains = [{layer["name"]: layer["gain"] or 1.0 for layer in run.analysis("layers")["layers"]} for run in runs]
    for number, layers in enumerate(zip(*gaps, strict=True), 1):
        ratios = [math.sqrt(1 + gap) for layer in layers for row in layer["gap"] for gap in row]
        trust = [known[layers[0]["name"]] for known in gains]
        yield {
            **cell(runs[0]),
            "layer": number,
            **{f"p{rank}": round(float(np.percentile(ratios, rank)), 4) for rank in PERCENTILES},
            "gain": round(statistics.fmean(trust), 4),
            "batches": len(layers[0]["gap"][0]),
            "channels": layers[0]["channels"],
            "seeds": len(runs),
            "epochs": runs[0].recipe.epochs,
            **runs[0].record["origin"],
        }


def write(name: str, records: Iterable[Record]) -> None:
    (RECORDS / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def measure_digits() -> None:
    cells = grid(preset("digits"), METHODS, [Setting(*setting) for setting in SETTINGS], range(5), CHANGES)
    analysed = [name for name, recipe in cells if (recipe.method, recipe.statistics_batch) in DEVIATING]
    runs = run_cells(cells, Path("runs/figures"), Execution(device="cpu", tensorboard=False), analyse=analysed)
    write("accuracy.jsonl", map(accuracy, runs))
    of = {key: [run for run in runs if (run.recipe.method, run.recipe.statistics_batch) == key] for key in DEVIATING}
    write("deviation.jsonl", (record for own in of.values() for record in deviations(own)))


def measure_cifar() -> None:
    changes = {"epochs": 8.0, "precision": "bf16", "channels_last": True, "evaluate_every": 4.0}
    warmed = {**changes, "warmup_epochs": 1.0}  # without which group norm may never leave the start
    settings = [Setting(128, 128), Setting(128, 2)]
    cells = grid(preset("cifar10"), ("bn", "gn", "bkn-learned", "bkn"), settings, range(3), changes)
    cells += [(f"{name}-warm", cell) for name, cell in grid(preset("cifar10"), ("gn",), settings[:1], range(3), warmed)]
    execution = Execution(device="cuda", cuda_graph=True, tensorboard=False)
    write("cifar10.jsonl", map(accuracy, run_cells(cells, Path("runs/figures-cifar10"), execution, jobs=4)))


if __name__ == "__main__":
    measure_cifar() if sys.argv[1:] == ["cifar10"] else measure_digits()
