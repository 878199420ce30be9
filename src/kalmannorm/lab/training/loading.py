"""Builds the data and the model of a recipe, and loads trained runs from disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from kalmannorm._model.fusion import fuse
from kalmannorm.lab import data, models
from kalmannorm.lab.data.protocol import Data
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files import checkpoint
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.machine.devices import resolve
from kalmannorm.lab.machine.memory import check_fits
from kalmannorm.lab.recipes.methods import method, normalized
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.evaluate import prepared


@dataclass(frozen=True)
class Loaded:
    """A run from disk after `step` of `steps` steps: the model in `eval()`, and its data set."""

    run: Run
    model: nn.Module
    data: Data
    device: torch.device
    step: int
    steps: int

    @property
    def position(self) -> str:
        """ ", at step 4 of 8" for an unfinished run, else "". The end of a title."""
        return "" if self.step == self.steps else f", at step {self.step} of {self.steps}"


def data_of(recipe: Recipe, device: torch.device, execution: Execution) -> Data:
    found = data.load(
        recipe.dataset,
        root=execution.data_root,
        device=device,
        image_size=recipe.image_size,
        train_examples=recipe.train_examples,
        test_examples=recipe.test_examples,
        workers=execution.workers,
    )
    if found.train_size < recipe.gradient_batch:
        raise LabError(
            f"a gradient batch of {recipe.gradient_batch} is more than the {found.train_size} training images of "
            f"{recipe.dataset}: give a smaller setting or another --dataset"
        )
    images = f"{recipe.gradient_batch:,} images of {found.shape[1]}×{found.shape[2]}"
    check_fits(images, (recipe.gradient_batch, *found.shape), 4, "give a smaller --image-size or --setting")
    return found


def steps_of(recipe: Recipe, data: Data) -> int:
    """Optimizer steps of the whole training. Each epoch skips the images that do not fill a batch."""
    return max(round(recipe.epochs * (data.train_size // recipe.gradient_batch)), 1)


def model_of(recipe: Recipe, data: Data, device: torch.device) -> nn.Module:
    """The model before training. For one seed, all methods and settings have the same weights."""
    torch.manual_seed(recipe.seed)
    model = models.build(
        recipe.model, classes=data.classes, shape=data.shape, width=recipe.width, pretrained=recipe.pretrained
    ).to(device)
    if recipe.precision == "float64":
        model.double()
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    example = prepared(torch.zeros(2, *data.shape, device=device), recipe)
    return normalized(
        model,
        recipe.method,
        example,
        statistics_batch=recipe.statistics_batch,
        steps=steps_of(recipe, data),
        gain=recipe.gain,
        momentum=recipe.statistics_momentum,
    )


def fused(model: nn.Module, recipe: Recipe, shape: tuple[int, int, int]) -> nn.Module:
    """Fuse the norms of a model with the sum and ReLU after them. Methods with torch's own norms stay unchanged."""
    if not method(recipe.method).groups:
        return model
    # `fuse` compares outputs on these images. Zeros could hide a difference.
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return fuse(model, prepared(images.to(next(model.parameters()).device), recipe), inplace=True)


def load_run(
    folder: Path, *, device: str | torch.device = "auto", data_root: Path | None = None, workers: int = 4
) -> Loaded:
    """Load a finished run, or the last checkpoint of an unfinished one."""
    run = Run.read(folder)
    where = resolve(str(device))
    found = data_of(run.recipe, where, Execution(data_root=data_root, workers=workers))
    model = model_of(run.recipe, found, where)
    weights = folder / "model.safetensors"
    steps = steps_of(run.recipe, found)
    step = steps if run.result is None else int(run.result.get("steps", steps))  # a diverged run ends early
    if weights.is_file() or run.finished:
        checkpoint.load_weights(weights, model, run.remedy("it and result.json"))
    else:
        step = checkpoint.newest(folder, lambda saved: _load(saved, model)) or 0
        if not step:
            raise LabError(f"{folder} holds no weights yet: train it with kalmannorm train --resume {folder}")
    return Loaded(run, model.eval(), found, where, step, steps)


def _load(saved: Path, model: nn.Module) -> int:
    """Load the weights of a checkpoint into the model, and return its step."""
    checkpoint.load_weights(saved / "model.safetensors", model)
    return checkpoint.step_of(saved)
