"""What a method, a setting and a row are called: the same in terminal, tables, figures and sentences.

A row is a method, with what tells it from another row of the same method and setting: options of its own, such as where
q starts, and the terms on which it was trained, such as its epochs. What only changes how often a run is looked at
tells nothing.
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
"""Options of a recipe that no weight and no final number depends on."""
_OWN = ("gain",)
"""Options of a method itself; all others are terms."""


def title(method: str) -> str:
    return METHODS[method].title if method in METHODS else method


def order(method: str) -> int:
    """Batch norm first, as what the others are compared with; then as the methods are listed."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)


def grouped(method: str) -> bool:
    """Whether the statistics batch matters to it."""
    return method not in METHODS or METHODS[method].groups


def at(method: str, setting: Setting) -> str:
    """The setting, without a statistics batch where that does not matter."""
    return str(setting) if grouped(method) else f"({setting.gradient_batch}, –)"


def row_name(recipe: Recipe) -> str:
    return f"{title(recipe.method)} {at(recipe.method, recipe.setting)}"


def run_name(recipe: Recipe) -> str:
    return f"{row_name(recipe)} seed {recipe.seed}"


def essence(recipe: Recipe) -> Recipe:
    """Equal for runs that come to the same numbers."""
    return dataclasses.replace(recipe, **_IDLE)  # type: ignore[arg-type]


def options(recipe: Recipe) -> dict[str, Any]:
    """What a result depends on besides method, setting and seed, by name."""
    return {name: value for name, value in recipe.to_json().items() if name not in (*_CELL, *_IDLE, "seed")}


def telling(recipes: Sequence[Recipe]) -> list[str]:
    """The options that differ within a cell; a learning rate that follows the gradient batch, say, does not."""
    return [name for name in options(recipes[0]) if _varies_within_a_cell(recipes, name)] if recipes else []


def _varies_within_a_cell(recipes: Sequence[Recipe], name: str) -> bool:
    seen: dict[tuple[Any, ...], Any] = {}
    cells = [(tuple(getattr(recipe, key) for key in _CELL), getattr(recipe, name)) for recipe in recipes]
    return any(seen.setdefault(cell, value) != value for cell, value in cells)


def own_name(recipe: Recipe, told: Sequence[str], recipes: Sequence[Recipe]) -> str:
    """The method, with those of its own options in which its rows differ: "BKN, q₀ 0.9"."""
    kin = [other for other in recipes if other.method == recipe.method]
    apart = [name for name in told if name in _OWN and len({getattr(other, name) for other in kin}) > 1]
    return ", ".join([title(recipe.method), *(option(name, getattr(recipe, name)) for name in apart)])


def terms(recipe: Recipe, told: Sequence[str]) -> str:
    """On what it was trained, where that differs between rows: "15 epochs"."""
    return ", ".join(option(name, getattr(recipe, name)) for name in told if name not in _OWN)
