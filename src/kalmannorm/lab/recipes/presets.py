"""How each data set is trained unless one says otherwise: the defaults of `train`, `compare` and `reproduce`.

The paper gives neither learning rate nor schedule. Where it gives a length (170,000 steps of 256 on ImageNet, which is
34 epochs) that is the length here. The schedule falls smoothly to zero: unlike steps it needs no milestones, so that a
run shortened by `--budget` has the same shape as a full one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kalmannorm.lab.errors import LabError, one_of
from kalmannorm.lab.recipes.methods import method
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import Setting

FOLDER = "folder:"
"""What the name of a data set that is an image folder starts with."""

_CIFAR = Recipe(
    model="cifar-inception",
    dataset="cifar10",
    gradient_batch=128,
    epochs=30,
    learning_rate=0.1,
    weight_decay=5e-4,
    schedule="linear",
)
_IMAGENET = Recipe(
    model="bn-inception",
    dataset="imagenet",
    gradient_batch=256,
    statistics_batch=4,
    epochs=34,
    learning_rate=0.1,
    weight_decay=1e-4,
    schedule="linear",
)
PRESETS: dict[str, Recipe] = {
    "digits": Recipe(),  # whose own defaults are those of digits
    "cifar10": _CIFAR,
    "cifar100": dataclasses.replace(_CIFAR, dataset="cifar100"),
    "tiny-imagenet": dataclasses.replace(_IMAGENET, dataset="tiny-imagenet", epochs=30, weight_decay=5e-4),
    "imagenet": _IMAGENET,
}


def preset(dataset: str, model: str | None = None) -> Recipe:
    """The recipe of this data set, with its own model or the one given. `folder:PATH` is trained as ImageNet is."""
    if dataset.startswith(FOLDER):
        recipe = dataclasses.replace(_IMAGENET, dataset=dataset)
    else:
        recipe = PRESETS[one_of("dataset", dataset, [*PRESETS, f"{FOLDER}PATH"])]
    return recipe if model is None else dataclasses.replace(recipe, model=model)


ADAMW_RATE = 0.01
"""Of the rate of SGD: AdamW's steps do not shrink with the gradient."""


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with what a user gave instead; AdamW gets a rate of its own unless one was given.

    What says nothing to its method is left out, so that a gain may be given to a comparison with other methods.
    """
    if changes.get("optimizer") == "adamw" and "momentum" in changes:
        raise LabError("--momentum is of sgd: leave it out with --optimizer adamw")
    takes = method(recipe.method).takes
    recipe = dataclasses.replace(recipe, **{name: value for name, value in changes.items() if takes(name)})
    if changes.get("optimizer") == "adamw" and "learning_rate" not in changes:
        recipe = dataclasses.replace(recipe, learning_rate=ADAMW_RATE * recipe.learning_rate)
    return recipe


def at_setting(recipe: Recipe, setting: Setting) -> Recipe:
    """The recipe at another setting, its learning rate in proportion to the gradient batch (the linear scaling rule:
    Goyal et al. 2017): as many examples move the weights as far, in many small steps or in few large ones."""
    return dataclasses.replace(
        recipe,
        gradient_batch=setting.gradient_batch,
        statistics_batch=setting.statistics_batch,
        learning_rate=recipe.learning_rate * setting.gradient_batch / recipe.gradient_batch,
    )
