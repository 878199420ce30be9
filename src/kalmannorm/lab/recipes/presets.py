"""Default recipe of each data set, for `train`, `compare` and `reproduce`.

The paper gives neither learning rate nor schedule. It gives the length for ImageNet: 170,000 steps of 256 images, or 34
epochs. We use that length. The schedule falls smoothly to zero. It has no milestones, so a run shortened by `--budget`
has the same schedule, only compressed.
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
"""Prefix of the name of a data set that is an image folder."""

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
    "digits": Recipe(),  # the defaults of the class
    "cifar10": _CIFAR,
    "cifar100": dataclasses.replace(_CIFAR, dataset="cifar100"),
    "tiny-imagenet": dataclasses.replace(_IMAGENET, dataset="tiny-imagenet", epochs=30, weight_decay=5e-4),
    "imagenet": _IMAGENET,
}


def preset(dataset: str, model: str | None = None) -> Recipe:
    """The recipe of this data set, with the given model or the default one. `folder:PATH` has ImageNet's recipe."""
    if dataset.startswith(FOLDER):
        recipe = dataclasses.replace(_IMAGENET, dataset=dataset)
    else:
        recipe = PRESETS[one_of("dataset", dataset, [*PRESETS, f"{FOLDER}PATH"])]
    return recipe if model is None else dataclasses.replace(recipe, model=model)


ADAMW_RATE = 0.01
"""AdamW's learning rate relative to SGD's. AdamW's steps do not shrink with the gradient."""


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with the changes of a user. AdamW gets another learning rate unless the user gave one.

    Changes that have no effect on the method are ignored. So --gain may be given to a comparison with other methods.
    """
    if changes.get("optimizer") == "adamw" and "momentum" in changes:
        raise LabError("--momentum is an option of sgd: leave it out with --optimizer adamw")
    takes = method(recipe.method).takes
    recipe = dataclasses.replace(recipe, **{name: value for name, value in changes.items() if takes(name)})
    if changes.get("optimizer") == "adamw" and "learning_rate" not in changes:
        recipe = dataclasses.replace(recipe, learning_rate=ADAMW_RATE * recipe.learning_rate)
    return recipe


def at_setting(recipe: Recipe, setting: Setting) -> Recipe:
    """The recipe at another setting. The learning rate changes in proportion to the gradient batch.

    This is the linear scaling rule of Goyal et al. 2017.
    """
    return dataclasses.replace(
        recipe,
        gradient_batch=setting.gradient_batch,
        statistics_batch=setting.statistics_batch,
        learning_rate=recipe.learning_rate * setting.gradient_batch / recipe.gradient_batch,
    )
