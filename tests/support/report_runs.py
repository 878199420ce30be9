"""Folders of runs in exactly the shape that training leaves, with numbers from a formula: for tests of the report.

BN, BRN, GN, BKN and BKN learned at (64, 64), (64, 2) and (64, 1) with three seeds: BN falls at (64, 1) in population
mode, BKN holds; one seed of BRN (64, 1) diverges, and one of BKN learned (64, 2) is unfinished.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from pathlib import Path

from kalmannorm._model.wiring_drawing import draw
from kalmannorm.lab.files.records import Log, write_json
from kalmannorm.lab.machine.origin import origin
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.recipes.recipe import Recipe

METHOD_NAMES = ("bn", "brn", "gn", "bkn", "bkn-learned")
SETTINGS = ((64, 64), (64, 2), (64, 1))
LAYERS = {"features.1": 16, "features.4": 24, "features.8": 32, "features.11": 32, "classifier.1": 48}
EPOCHS, STEPS_PER_EPOCH, CHANCE = 12, 14, 10.2

# Final accuracies: population, batch and example at each statistics batch.
FINAL = {
    "bn": {64: (98.8, 98.8, 98.8), 2: (98.7, 95.9, 98.4), 1: (86.3, 98.2, 98.2)},
    "brn": {64: (98.7, 98.7), 2: (98.4, 97.0), 1: (93.1, 96.9)},
    "gn": {64: (97.6,), 2: (97.6,), 1: (97.6,)},
    "bkn": {64: (98.8, 98.6, 98.8), 2: (98.5, 98.2, 98.6), 1: (97.9, 98.3, 98.4)},
    "bkn-learned": {64: (98.6, 98.7, 98.7), 2: (98.3, 97.9, 98.4), 1: (95.6, 97.4, 97.4)},
}
UNFINISHED = ("bkn-learned", 2, 2)
DIVERGED = ("brn", 1, 2)
ANALYSED_SEED = 0


def make_comparison(folder: Path, *, seeds: int = 3, **fields) -> Path:
    """A whole comparison in `folder`; further fields go to every recipe."""
    for method in METHOD_NAMES:
        # A method without groups runs once per gradient batch, as `compare` has it.
        for gradient_batch, statistics_batch in SETTINGS if METHODS[method].groups else SETTINGS[:1]:
            for seed in range(seeds):
                recipe = Recipe(
                    method=method,
                    gradient_batch=gradient_batch,
                    statistics_batch=statistics_batch,
                    epochs=EPOCHS,
                    seed=seed,
                    **fields,
                )
                key = (method, statistics_batch, seed)
                make_run(folder / recipe.name, recipe, unfinished=key == UNFINISHED, diverged=key == DIVERGED)
    return folder


@functools.cache
def _origin() -> dict[str, str]:
    return origin()


def make_run(folder: Path, recipe: Recipe, *, unfinished: bool = False, diverged: bool = False) -> Path:
    rng = random.Random(f"{recipe.method} {recipe.setting} {recipe.seed}")
    m = recipe.statistics_batch
    source = _origin() | {
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": f"kalmannorm compare --methods {recipe.method} --setting {recipe.gradient_batch},{m}",
    }
    write_json(folder / "recipe.json", {"recipe": recipe.to_json(), "execution": {"device": "cpu"}, "origin": source})
    accuracy = accuracies(recipe.method, m, recipe.seed)
    epochs = round(recipe.epochs) // (2 if unfinished else 3 if diverged else 1)
    gains = _gains(recipe, 0.0)
    log = Log(folder / "log.jsonl")
    for epoch in range(1, epochs + 1):
        share = epoch / recipe.epochs
        place = {"step": epoch * STEPS_PER_EPOCH, "epoch": float(epoch)}
        loss = 2.3 * math.exp(-5 * share) + 0.03 + abs(rng.gauss(0, 0.01))
        log.write(
            "train",
            **place,
            loss=float("nan") if diverged and epoch == epochs else loss,
            accuracy=100 - 70 * math.exp(-6 * share) - rng.random(),
            learning_rate=0.1 * (1 - share),
            images_per_second=9000 + rng.gauss(0, 200),
            seconds=0.8 * epoch,
        )
        modes = {}
        for mode, final in accuracy.items():
            noise = rng.gauss(0, 14 if final < 90 else 0.8) * (1.1 - share)
            value = final - (final - CHANCE) * math.exp(-7 * share) + noise
            modes[mode] = {"accuracy": min(99.8, max(CHANCE, value)), "loss": 0.02 + (100 - value) / 40}
        log.write("evaluate", **place, modes=modes)
        if METHODS[recipe.method].to == "kalman":
            gains = _gains(recipe, share)
            log.write("gains", **place, gains=gains)
    log.close()
    if METHODS[recipe.method].to == "kalman":
        (folder / "wiring.svg").write_text(_wiring(recipe), encoding="utf-8")
    if unfinished:
        return folder
    speed = {"bn": 9800, "brn": 8900, "gn": 9300, "bkn": 9050, "bkn-learned": 8200}[recipe.method]
    write_json(
        folder / "result.json",
        {
            "accuracy": dict.fromkeys(accuracy, CHANCE) if diverged else accuracy,
            "loss": {mode: float("nan") if diverged else (100 - value) / 40 for mode, value in accuracy.items()},
            "steps": epochs * STEPS_PER_EPOCH,
            "epochs": epochs,
            "seconds": 0.8 * epochs,
            "images_per_second": speed + rng.gauss(0, 150),
            "parameters": 31_000 + 5_000 * (recipe.method == "bkn-learned"),
            "peak_memory": 312_000_000 + 9_000_000 * METHOD_NAMES.index(recipe.method),
            "gains": gains if METHODS[recipe.method].to == "kalman" else {},
            "diverged": diverged,
            "reached": None,
        },
    )
    if recipe.seed == ANALYSED_SEED and not diverged and METHODS[recipe.method].groups:
        make_analysis(folder, recipe)
    return folder


def accuracies(method: str, statistics_batch: int, seed: int) -> dict[str, float]:
    """By mode; the seeds lie 0.2 around the middle, or 4 where the method fails."""
    final = FINAL[method][statistics_batch]
    return {
        mode: round(value + (seed - 1) * (4.0 if value < 90 else 0.2), 2)
        for mode, value in zip(("population", "batch", "example"), final, strict=False)
    }


def _gains(recipe: Recipe, share: float) -> dict[str, float]:
    start = 0.9 if recipe.method == "bkn-learned" else 0.5
    goal = {64: 0.72, 2: 0.48, 1: 0.3}[recipe.statistics_batch]
    return {
        name: start + (goal + 0.06 * math.sin(2 * i) + 0.01 * recipe.seed - start) * (1 - math.exp(-4 * share))
        for i, name in enumerate(LAYERS)
    }


def _wiring(recipe: Recipe) -> str:
    names = list(LAYERS)
    norms = [(names[0], LAYERS[names[0]], [], "no norm before it")]
    norms += [(name, LAYERS[name], [before], None) for before, name in itertools.pairwise(names)]
    transition = METHODS[recipe.method].options["transition"]
    return draw("DigitsNet", f"4 of 5 norms of DigitsNet are wired ({transition}), 1 with no norm before", norms)


def make_analysis(folder: Path, recipe: Recipe, batches: int = 40) -> None:
    rng = random.Random(f"analysis of {recipe.method} {recipe.setting}")
    kalman = METHODS[recipe.method].to == "kalman"
    noise = {64: 0.06, 2: 0.34, 1: 0.6}[recipe.statistics_batch] * (0.35 if kalman else 1.0)
    layers, gaps = [], []
    for name, channels in LAYERS.items():
        running_var = [math.exp(rng.gauss(0, 1.2)) for _ in range(channels)]
        running_mean = [rng.gauss(0, 1) for _ in range(channels)]
        prior = kalman and name != "features.1"
        layers.append(
            {
                "name": name,
                "channels": channels,
                "gain": _gains(recipe, 1.0)[name] if prior else None,
                "prior_mean": [value + rng.gauss(0, 0.3) for value in running_mean] if prior else None,
                "prior_var": [0.8 * value * math.exp(rng.gauss(0, 0.3)) for value in running_var] if prior else None,
                "observed_mean": running_mean,
                "observed_var": running_var,
                "posterior_mean": running_mean,
                "posterior_var": running_var,
                "running_mean": running_mean,
                "running_var": running_var,
            }
        )
        gap = [[rng.gauss(0, noise) for _ in range(batches)] for _ in range(channels)]
        mean_abs = sum(abs(value) for row in gap for value in row) / (channels * batches)
        gaps.append({"name": name, "channels": channels, "batches": batches, "gap": gap, "mean_abs": mean_abs})
        gaps[-1]["observed_mean_abs"] = mean_abs * (3 if kalman else 1)
    write_json(folder / "analysis" / "layers.json", {"layers": layers})
    write_json(folder / "analysis" / "variance-gap.json", {"layers": gaps})


def make_experiment(folder: Path, *, seeds: int = 2) -> Path:
    """`small-16-4`-like: BN and BKN at one micro setting beside BN at the large one, with a table and two figures."""
    runs: dict[str, list[str]] = {}
    for method, m in (("bn", 64), ("bn", 2), ("bkn", 2)):
        for seed in range(seeds):
            recipe = Recipe(method=method, statistics_batch=m, epochs=EPOCHS, seed=seed)
            make_run(folder / "runs" / recipe.name, recipe)
            runs.setdefault(f"{METHODS[method].title} (64, {m})", []).append(f"runs/{recipe.name}")
    write_json(
        folder / "experiment.json",
        {
            "name": "micro-256-4",
            "title": "Micro-batch: (256, 4)",
            "question": "Does BKN hold its accuracy when only 4 examples share their statistics?",
            "dataset": "digits",
            "budget": 0.1,
            "stand_in": True,
            "origin": _origin(),
            "tables": [
                {
                    "title": "Top-1 accuracy, %",
                    "columns": ["method", "setting", "paper", "ours", "steps"],
                    "rows": [
                        ["BN", "(64, 64)", 76.4, {"mean": 98.8, "std": 0.2, "n": seeds}, 168],
                        ["BN", "(64, 2)", 72.3, {"mean": 98.7, "std": 0.2, "n": seeds}, 168],
                        ["BKN", "(64, 2)", 76.1, {"mean": 98.5, "std": 0.2, "n": seeds}, None],
                    ],
                    "note": "The paper's figures are of ImageNet; ours are of the stand-in.",
                }
            ],
            "figures": [
                {
                    "kind": "curves",
                    "title": "Validation accuracy",
                    "mode": "population",
                    "y": "accuracy",
                    "groups": [{"label": label, "runs": folders} for label, folders in runs.items()],
                },
                {
                    "kind": "variance-gap",
                    "title": "Batch variance minus moving variance",
                    "runs": [{"label": label, "run": folders[0]} for label, folders in runs.items()],
                },
            ],
            "notes": ["The stand-in has 8×8 images.", "Learning rates follow the linear rule."],
        },
    )
    return folder
