"""Names of methods, settings and rows: the same in the terminal, tables, figures and sentences.

A row is named by its method, and by what distinguishes it from other rows of the same method and setting. These are
options of the method, such as the initial q, and terms of the training, such as its epochs. Options that only change
how often a run is evaluated are not named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.words.wording import option

_CELL = ("method", "gradient_batch", "statistics_batch")
_IDLE = {"evaluate_every": 0.0}
"""Options of a recipe that affect neither weights nor final numbers."""
_OWN = ("gain",)
"""Options of a method itself. All others are terms of the training."""


def title(method: str) -> str:
    return METHODS[method].title if method in METHODS else method


def order(method: str) -> int:
    """Batch norm first, because the others are compared with it. Then the order of the list of methods."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)


def grouped(method: str) -> bool:
    """Whether the method depends on the statistics batch."""
    return method not in METHODS or METHODS[method].groups


def at(method: str, setting: Setting) -> str:
    """The setting, without a statistics batch if the method does not depend on it."""
    return str(setting) if grouped(method) else f"({setting.gradient_batch}, –)"


def row_name(recipe: Recipe) -> str:
    return f"{title(recipe.method)} {at(recipe.method, recipe.setting)}"


def run_name(recipe: Recipe) -> str:
    return f"{row_name(recipe)} seed {recipe.seed}"


def essence(recipe: Recipe) -> Recipe:
    """The recipe without options that affect no numbers. It is equal for runs with equal numbers."""
    return dataclasses.replace(recipe, **_IDLE)  # type: ignore[arg-type]


def options(recipe: Recipe) -> dict[str, Any]:
    """The options, by name, that a result depends on besides method, setting and seed."""
    return {name: value for name, value in recipe.to_json().items() if name not in (*_CELL, *_IDLE, "seed")}


def telling(recipes: Sequence[Recipe]) -> list[str]:
    """The options that differ within a cell. A learning rate that follows the gradient batch does not count."""
    return [name for name in options(recipes[0]) if _varies_within_a_cell(recipes, name)] if recipes else []


def _varies_within_a_cell(recipes: Sequence[Recipe], name: str) -> bool:
    seen: dict[tuple[Any, ...], Any] = {}
    cells = [(tuple(getattr(recipe, key) for key in _CELL), getattr(recipe, name)) for recipe in recipes]
    return any(seen.setdefault(cell, value) != value for cell, value in cells)


def own_name(recipe: Recipe, told: Sequence[str], recipes: Sequence[Recipe]) -> str:
    """The method, with those of its own options in which its rows differ: "BKN, q₀ 0.9".

    A closing phase that other methods do not have is named, too. If it is told, `terms` has it.
    """
    kin = [other for other in recipes if other.method == recipe.method]
    apart = [name for name in told if name in _OWN and len({getattr(other, name) for other in kin}) > 1]
    parts = [title(recipe.method), *(option(name, getattr(recipe, name)) for name in apart)]
    closed = recipe.closing_start is not None and any(other.closing_start is None for other in recipes)
    return ", ".join([*parts, *(["closing phase"] if closed and "closing_start" not in told else [])])


def terms(recipe: Recipe, told: Sequence[str]) -> str:
    """The terms of training in which rows differ: "15 epochs"."""
    idle = () if recipe.closing_start is not None else ("closing_end",)
    return ", ".join(option(name, getattr(recipe, name)) for name in told if name not in (*_OWN, *idle))
