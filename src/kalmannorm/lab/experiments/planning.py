"""Turns an experiment and the user's options into the recipes of its cells: data set, networks, length, seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kalmannorm.lab import models
from kalmannorm.lab.bounds import positive
from kalmannorm.lab.comparing.cells import seeds as first_seeds
from kalmannorm.lab.data.protocol import Data
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.experiments.spec import Arm, Experiment, Role
from kalmannorm.lab.experiments.widths import batchnorm_parameters, matching_width
from kalmannorm.lab.recipes.presets import FOLDER, at_setting, changed, preset
from kalmannorm.lab.recipes.recipe import Execution, Recipe

_IMAGENET: dict[Role, str] = {"inception": "bn-inception", "resnet": "resnet101"}
_CIFAR: dict[Role, str] = {"inception": "cifar-inception", "resnet": "cifar-resnet-32"}
MODELS: dict[str, dict[Role, str]] = {
    "digits": {"inception": "digits-net"},
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "tiny-imagenet": {"inception": "bn-inception"},
    "imagenet": _IMAGENET,
}
"""The network for each role and data set. An image folder is treated as ImageNet."""
BUDGET = positive(1000)
"""1 is the full length."""
EVALUATIONS = 20
"""The least number of evaluations in a training, for curves and for the steps to an accuracy."""


@dataclass(frozen=True)
class Wanted:
    """The user's options. `changes` are fields of every recipe, by name."""

    dataset: str | None = None
    model: str | None = None
    budget: float = 1.0
    seeds: int | None = None
    paper_only: bool = False
    rows: tuple[str, ...] = ()
    """Keys of the arms to run. None: all."""
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of an experiment. `folder` is its folder inside the experiment's folder."""

    folder: str
    recipe: Recipe
    arm: Arm
    role: Role


@dataclass(frozen=True)
class Plan:
    experiment: Experiment
    budget: float
    seeds: int
    stand_in: bool
    """Whether data set or network differ from the paper's, or only a part of the data is used."""
    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    rows: tuple[str, ...] = ()
    """Keys of the arms that the user chose. None: all."""

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(cell.recipe.dataset for cell in self.cells))

    @property
    def models(self) -> dict[Role, str]:
        return {cell.role: cell.recipe.model for cell in self.cells}

    def of(self, arm: Arm, role: Role, dataset: str) -> list[Cell]:
        """The cells of one arm, by seed."""
        return [c for c in self.cells if (c.arm, c.role, c.recipe.dataset) == (arm, role, dataset)]


def plan(experiment: Experiment, wanted: Wanted, execution: Execution) -> Plan:
    """All cells, checked against the data before anything runs."""
    BUDGET.check("budget", wanted.budget)
    _check_rows(experiment, wanted.rows)
    datasets = [wanted.dataset] if wanted.dataset else list(experiment.datasets)
    real = "imagenet" in datasets or any(name.startswith(FOLDER) for name in datasets)
    seeds = len(first_seeds((1 if real else 3) if wanted.seeds is None else wanted.seeds))
    cells: list[Cell] = []
    stand_in = False
    for dataset in datasets:
        start = dataclasses.replace(preset(dataset), **_of_data(wanted.changes))
        data = _data(experiment, start, execution)
        other = stands_in(experiment, dataset, data) or start.train_examples is not None
        if wanted.model is not None and data is not None:
            batchnorm_parameters(wanted.model, 1.0, data.classes, data.shape)  # raises if it is unknown or unfit
        for role, model in _models(experiment, dataset, wanted.model).items():
            stand_in = stand_in or other or model != _paper_models(experiment)[role]
            for arm in arms_of(experiment, wanted, model, cheap=other):
                recipe = _recipe(arm, dataset, model, wanted)
                if data is not None:
                    _check_size(recipe, data)
                    if arm.wide:
                        recipe = dataclasses.replace(recipe, width=matching_width(model, data.classes, data.shape))
                cells += _seeds(recipe, arm, role, seeds, prefix=len(datasets) > 1)
    arms = tuple(arm for arm in experiment.arms if any(cell.arm == arm for cell in cells))
    if not arms:
        raise LabError(
            f"the other options leave out every row of --rows {','.join(wanted.rows)}: leave one of them out"
        )
    # Seeds are the outermost loop, so that early results include every arm.
    ordered = tuple(sorted(cells, key=lambda cell: cell.recipe.seed))
    return Plan(experiment, wanted.budget, seeds, stand_in, arms, ordered, wanted.rows)


def _check_rows(experiment: Experiment, rows: Sequence[str]) -> None:
    known = [arm.key for arm in experiment.arms]
    for name in rows:
        if name not in known:
            raise LabError(f"{experiment.name} has no row {name!r}: use some of {', '.join(known)}")


def arms_of(experiment: Experiment, wanted: Wanted, model: str, *, cheap: bool) -> list[Arm]:
    """Without the arms that the user's options, the data set or the network leave out."""

    def fits(arm: Arm) -> bool:
        if (arm.cheap and not cheap) or (arm.ours and wanted.paper_only):
            return False
        if wanted.rows and arm.key not in wanted.rows:
            return False
        if arm.closing is not None and wanted.changes.get("finish_epochs"):
            return False  # statistics that are frozen at the end exclude a closing phase
        return not arm.wide or experiment.widened or model in models.names()

    return [arm for arm in experiment.arms if fits(arm)]


def _of_data(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: changes[name] for name in ("image_size", "train_examples", "test_examples") if name in changes}


def _data(experiment: Experiment, recipe: Recipe, execution: Execution) -> Data | None:
    """None if only steps are timed, because that needs no images."""
    if experiment.timed:
        return None
    import torch

    from kalmannorm.lab.training.loading import data_of

    # On the CPU, because only its size is needed here.
    return data_of(dataclasses.replace(recipe, gradient_batch=1, statistics_batch=1), torch.device("cpu"), execution)


def stands_in(experiment: Experiment, dataset: str, data: Data | None) -> bool:
    """Whether this is not the paper's data set. An image folder with ImageNet's size and classes counts as ImageNet."""
    if dataset.startswith(FOLDER) and data is not None and "imagenet" in experiment.datasets:
        return data.classes != 1000 or data.train_size < 1_200_000
    return dataset not in experiment.datasets


def _models(experiment: Experiment, dataset: str, model: str | None) -> dict[Role, str]:
    """The networks to train, by role. A network that the user chose gets the role that its name suggests."""
    if model is not None:
        role: Role = "resnet" if "resnet" in model and "resnet" in experiment.roles else "inception"
        return {role: model}
    known = MODELS["imagenet" if dataset.startswith(FOLDER) else dataset]
    return {role: known[role] for role in experiment.roles if role in known}


def _paper_models(experiment: Experiment) -> dict[Role, str]:
    return MODELS[experiment.datasets[0]]


def _recipe(arm: Arm, dataset: str, model: str, wanted: Wanted) -> Recipe:
    start, end = arm.closing or (None, None)
    recipe = dataclasses.replace(
        at_setting(preset(dataset, model), arm.setting),
        method=arm.method,
        closing_start=start,
        closing_end=end,
        fade_prior=arm.fades,
        warmup_epochs=arm.warmup,
    )
    scaled = {name: getattr(recipe, name) * wanted.budget for name in ("epochs", "warmup_epochs")}
    recipe = changed(dataclasses.replace(recipe, **scaled), wanted.changes)
    if "evaluate_every" not in wanted.changes:
        recipe = dataclasses.replace(recipe, evaluate_every=min(1.0, recipe.epochs / EVALUATIONS))
    return recipe.checked()


def _check_size(recipe: Recipe, data: Data) -> None:
    if data.train_size < recipe.gradient_batch:
        raise LabError(
            f"a gradient batch of {recipe.gradient_batch} is larger than the {data.train_size} training images of "
            f"{recipe.dataset} here: use more --train-examples or another --dataset"
        )


def _seeds(recipe: Recipe, arm: Arm, role: Role, seeds: int, *, prefix: bool) -> list[Cell]:
    found = []
    for seed in range(seeds):
        own = dataclasses.replace(recipe, seed=recipe.seed + seed)
        name = own.name.replace(f"-{own.method}-", f"-{arm.kind}-")
        found.append(Cell(f"{own.dataset}-{name}" if prefix else name, own, arm, role))
    return found


def default_folder(experiment: Experiment, wanted: Wanted) -> Path:
    """runs/NAME-DATASET in the current folder."""
    dataset = wanted.dataset or "+".join(experiment.datasets)
    short = Path(dataset.removeprefix(FOLDER)).name if dataset.startswith(FOLDER) else dataset
    return Path("runs") / f"{experiment.name}-{short}"
