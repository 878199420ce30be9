"""The cells of a comparison: methods × settings × seeds. Each is a run with a name; some may be finished on disk."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kalmannorm.lab.bounds import whole
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.methods import method
from kalmannorm.lab.recipes.presets import at_setting, changed
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import Setting

Cell = tuple[str, Recipe]
"""The name of a run's folder, and the run."""


def seeds(count: int) -> range:
    """Seeds 0, 1, … up to this count. An error if the count makes no sense."""
    whole(1, 1000).check("seeds", count)
    return range(count)


def grid(
    recipe: Recipe,
    methods: Sequence[str],
    settings: Sequence[Setting],
    seeds: Iterable[int],
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> list[Cell]:
    """Every method at every setting with every seed, in the order in which they run. All else is from the recipe.

    The learning rate follows the gradient batch. `changes` of the recipe are applied last. Seeds are the outermost
    loop, so that early results include every method. A method that ignores the statistics batch runs once per gradient
    batch.
    """
    found: dict[Recipe, str] = {}
    for seed, setting, name in itertools.product(seeds, settings, methods):
        if not method(name).groups:
            setting = Setting(setting.gradient_batch, setting.gradient_batch)
        cell = dataclasses.replace(at_setting(recipe, setting.checked()), method=name, seed=seed)
        cell = changed(cell, changes).checked()
        found[cell] = cell.name
    return [(name, cell) for cell, name in found.items()]


def checked(cells: Sequence[Cell]) -> list[Cell]:
    """These cells, if their names are different and can be folder names."""
    twice = [name for name, count in Counter(name for name, _ in cells).items() if count > 1]
    if twice:
        raise LabError(f"two runs are named {twice[0]}: give each run a different name")
    return [(name, recipe.checked()) for name, recipe in cells]


def finished(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder contains the result of this recipe. An error if it contains a run of another recipe."""
    if not (folder / "recipe.json").is_file():
        return False
    run = Run.read(folder)
    if run.recipe != recipe:
        raise LabError(
            f"{folder} contains another run ({differences(run.recipe, recipe)}): give another --out, or delete it"
        )
    return run.finished


def differences(there: Recipe, wanted: Recipe) -> str:
    """ "epochs 20 there, 30 wanted; …"."""
    pairs = (
        (field.name, getattr(there, field.name), getattr(wanted, field.name)) for field in dataclasses.fields(there)
    )
    return "; ".join(f"{name} {old} there, {new} wanted" for name, old, new in pairs if old != new)
