"""From a recipe to its data and its model, and from a run on disk back to what it trained."""

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
    """A trained run, after `step` of its `steps`: its model in `eval()`, and the data that it was trained on."""

    run: Run
    model: nn.Module
    data: Data
    device: torch.device
    step: int
    steps: int

    @property
    def position(self) -> str:
        """Of a run that is not at its end, for the end of a title."""
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
            f"{recipe.dataset}; give a smaller setting or another --dataset"
        )
    images = f"{recipe.gradient_batch:,} images of {found.shape[1]}×{found.shape[2]}"
    check_fits(images, (recipe.gradient_batch, *found.shape), 4, "give a smaller --image-size or --setting")
    return found


def steps_of(recipe: Recipe, data: Data) -> int:
    """Optimizer steps of the whole training: the images that do not fill a batch are left out of each epoch."""
    return max(round(recipe.epochs * (data.train_size // recipe.gradient_batch)), 1)


def model_of(recipe: Recipe, data: Data, device: torch.device) -> nn.Module:
    """The model as training starts from it: the same weights for every method and setting of a seed."""
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
    )


def fused(model: nn.Module, recipe: Recipe, shape: tuple[int, int, int]) -> nn.Module:
    """The same model with what follows its norms in their own passes; as it is, where its norms are torch's own."""
    if not method(recipe.method).groups:
        return model
    # Not zeros: on them a forward that is another might not show.
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return fuse(model, prepared(images.to(next(model.parameters()).device), recipe), inplace=True)


def load_run(
    folder: Path, *, device: str | torch.device = "auto", data_root: Path | None = None, workers: int = 4
) -> Loaded:
    """What a finished run trained, or an unfinished one at its last checkpoint."""
    run = Run.read(folder)
    where = resolve(str(device))
    found = data_of(run.recipe, where, Execution(data_root=data_root, workers=workers))
    model = model_of(run.recipe, found, where)
    weights = folder / "model.safetensors"
    steps = steps_of(run.recipe, found)
    step = steps if run.result is None else int(run.result.get("steps", steps))  # a diverged run ends sooner
    if weights.is_file() or run.finished:
        checkpoint.load_weights(weights, model, run.remedy("it and result.json"))
    else:
        step = checkpoint.newest(folder, lambda saved: _load(saved, model)) or 0
        if not step:
            raise LabError(f"{folder} holds no weights yet: kalmannorm train --resume {folder}")
    return Loaded(run, model.eval(), found, where, step, steps)


def _load(saved: Path, model: nn.Module) -> int:
    """Into the model the weights of a checkpoint, whose step is returned."""
    checkpoint.load_weights(saved / "model.safetensors", model)
    return checkpoint.step_of(saved)
