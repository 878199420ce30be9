"""Measures what the README and the site show, and writes it to `records/`; `draw.py` draws it.

    python docs/figures/measure.py             digits, at most 10 minutes on two CPU cores
    python docs/figures/measure.py sizes       digits by statistics batch, about 15 minutes on two CPU cores
    python docs/figures/measure.py cifar10     on a GPU, after `kalmannorm data fetch cifar10`

Run it from the repository's root; the same command again goes on where it was broken off. The digits are those of
`kalmannorm demo`, with five seeds, by size with three.

| file | content |
| --- | --- |
| `accuracy.jsonl`, `cifar10.jsonl`, `digits-by-size.jsonl` | the test accuracy of each run |
| `sigma.csv` | how far the σ that a group is normalized with lies from the σ of a large batch, by layer |
| `one-group.json` | one channel of one group: its values, prior, observation and posterior |

The error of σ is measured in training mode on 896 training images in groups of m. Estimate and truth belong to the same
input of the same norm:

    error = σ of a group / σ of all 896 images - 1        per channel and group

Batch norm's σ of a group is that of its values. BKN's is that of the posterior. `rms` is the root mean square of the
error over channels and groups, and `bias` is its mean. `spread` is the standard deviation of σ over groups, divided by
the mean of σ over groups, as a root mean square over channels. A σ that is too small by the same factor in all groups
has a bias and no spread. Figures with `observed_` take the values of the group alone in the same net, and those with
`prior_` take the prior alone. Each figure is an average over seeds.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from kalmannorm import Moments, gains
from kalmannorm.lab.analysis.observing import Sight, observe, tracking_norms
from kalmannorm.lab.comparing.cells import grid
from kalmannorm.lab.comparing.compare import run_cells
from kalmannorm.lab.files.records import Record, Run
from kalmannorm.lab.recipes.presets import preset
from kalmannorm.lab.recipes.recipe import Execution
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.training.loading import load_run
from kalmannorm_command.demo import CHANGES, cells_of

RECORDS = Path(__file__).parent / "records"
NAMES = {"bn": "BN", "brn": "BRN", "gn": "GN", "bkn": "BKN weights", "bkn-learned": "BKN learned", "mabn": "MABN"}
NAMES |= {"bn-ws": "BN, recipe", "bkn-ws": "BKN, recipe"}
SIZES = (64, 32, 8, 4, 2, 1)
LARGE_BATCH = 896  # whole groups of every size, of the 901 training images
SHOWN_LAYER, SHOWN_SIZE = 3, 2
"""Of the group in `one-group.json`. The layer is in the middle of the net."""


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


def pooled(groups: Moments) -> Moments:
    """Mean and variance of all values, from those of groups of equal size: (G, C) to (1, C)."""
    mean = groups.mean.mean(0, keepdim=True)
    return Moments(mean, (groups.var + (groups.mean - mean).square()).mean(0, keepdim=True))


def relative(estimate: Moments, truth: Moments) -> Tensor:
    """σ of the estimate / σ of the truth - 1, per group and channel."""
    return (estimate.var / truth.var).double().sqrt() - 1


def spread(error: Tensor) -> Tensor:
    """The standard deviation of σ over groups / its mean over groups, as a root mean square over channels."""
    sigma = 1 + error
    return (sigma.std(0, correction=0) / sigma.mean(0)).square().mean().sqrt()


def sights(model: nn.Module, images: Tensor) -> dict[str, Sight]:
    """What each norm sees of these images in training mode, in groups of its statistics batch. Nothing is updated."""
    found: dict[str, Sight] = {}
    observe(model, [images], lambda name, _, sight: found.__setitem__(name, sight))
    return {name: found[name] for name in tracking_norms(model)}


def errors(sight: Sight) -> dict[str, float]:
    """Of one norm, against the σ of all images."""
    truth = pooled(sight.observation)
    shown = {"": sight.posterior, "observed_": sight.observation, "prior_": sight.prior}
    measured = {name: relative(moments, truth) for name, moments in shown.items() if moments is not None}
    return {
        f"{name}{figure}": float(value)
        for name, error in measured.items()
        for figure, value in (("rms", error.square().mean().sqrt()), ("bias", error.mean()), ("spread", spread(error)))
    }


def sigma_rows(runs: list[Run]) -> Iterable[Record]:
    """Of one method and statistics batch: a row per layer, averaged over the seeds."""
    by_seed: list[list[dict[str, float]]] = []
    for run in runs:
        model, images = of_training(run)
        trust = gains(model)  # a norm without a prior trusts the group alone
        by_seed.append([{"gain": trust.get(name, 1.0), **errors(s)} for name, s in sights(model, images).items()])
    for number, layer in enumerate(zip(*by_seed, strict=True), 1):
        figures = {name: [row[name] for row in layer] for name in layer[0]}
        yield {
            **cell(runs[0]),
            "layer": number,
            **{name: round(statistics.fmean(values), 4) for name, values in figures.items()},
            "least_rms": round(min(figures["rms"]), 4),
            "most_rms": round(max(figures["rms"]), 4),
            "seeds": len(runs),
            "images": LARGE_BATCH,
            **runs[0].record["origin"],
        }


def of_training(run: Run) -> tuple[nn.Module, Tensor]:
    """The trained model and the images of the large batch, in an order that no class governs."""
    loaded = load_run(run.folder, device="cpu")
    images, _ = next(iter(loaded.data.train_batches(LARGE_BATCH, seed=0, epoch=0, augment=False)))
    return loaded.model, images


def one_group(run: Run) -> Record:
    """A group whose σ is too large by the layer's typical error, in a channel whose prior has its typical error."""
    model, images = of_training(run)
    name, sight = list(sights(model, images).items())[SHOWN_LAYER - 1]
    assert sight.prior is not None
    truth = pooled(sight.observation)
    observed, prior = relative(sight.observation, truth), relative(sight.prior, truth)
    distance = sum((error.abs() / error.square().mean().sqrt()).log().square() for error in (observed, prior))
    distance = torch.where(observed > 0, distance, torch.inf)
    group, channel = divmod(int(distance.argmin()), distance.shape[1])

    def chosen(moments: Moments) -> list[float]:
        row = min(group, len(moments.mean) - 1)  # one row serves all groups
        return [round(float(part[row, channel]), 5) for part in (moments.mean, moments.var)]

    return {
        **cell(run),
        "layer": SHOWN_LAYER,
        "channel": channel,
        "group": group,
        "values": values(model, name, images, channel)[group],
        "prior": chosen(sight.prior),
        "observation": chosen(sight.observation),
        "posterior": chosen(sight.posterior),
        "large_batch": chosen(truth),
        "gain": round(gains(model)[name], 4),
        **run.record["origin"],
    }


def values(model: nn.Module, name: str, images: Tensor, channel: int) -> list[list[float]]:
    """The inputs of one channel of a norm, a row per group."""
    seen: list[Tensor] = []
    norm = model.get_submodule(name)
    handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, channel].detach()))
    sights(model, images)
    handle.remove()
    groups = seen[0].reshape(len(images) // SHOWN_SIZE, -1)
    return [[round(float(value), 4) for value in row] for row in groups]


def write(name: str, records: Iterable[Record]) -> None:
    (RECORDS / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def measure_digits() -> None:
    runs = run_cells(cells_of(5), Path("runs/figures"), Execution(device="cpu", tensorboard=False))
    write("accuracy.jsonl", map(accuracy, runs))


def measure_sizes() -> None:
    settings = [Setting(64, size) for size in SIZES]
    cells = grid(preset("digits"), ("bn", "bkn-learned", "bkn"), settings, range(3), CHANGES)
    runs = run_cells(cells, Path("runs/figures-sizes"), Execution(device="cpu", tensorboard=False))
    write("digits-by-size.jsonl", map(accuracy, runs))
    of: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        of.setdefault((run.recipe.method, run.recipe.statistics_batch), []).append(run)
    rows = [row for own in of.values() for row in sigma_rows(own)]
    columns = list(max(rows, key=len))  # a row with a prior has all
    with (RECORDS / "sigma.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    write("one-group.json", [one_group(of["bkn", SHOWN_SIZE][0])])


def measure_cifar() -> None:
    changes = {"epochs": 8.0, "precision": "bf16", "channels_last": True, "evaluate_every": 4.0}
    warmed = {**changes, "warmup_epochs": 1.0}  # without which group norm may never leave the start
    settings = [Setting(128, 128), Setting(128, 2)]
    cells = grid(preset("cifar10"), ("bn", "gn", "bkn-learned", "bkn"), settings, range(3), changes)
    cells += [(f"{name}-warm", cell) for name, cell in grid(preset("cifar10"), ("gn",), settings[:1], range(3), warmed)]
    execution = Execution(device="cuda", cuda_graph=True, tensorboard=False)
    write("cifar10.jsonl", map(accuracy, run_cells(cells, Path("runs/figures-cifar10"), execution, jobs=4)))


if __name__ == "__main__":
    {"": measure_digits, "sizes": measure_sizes, "cifar10": measure_cifar}["".join(sys.argv[1:])]()
