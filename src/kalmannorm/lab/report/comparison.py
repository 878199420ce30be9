"""Runs set side by side: rows are methods, columns are settings, and the seeds of a cell are averaged.

A comparison is of one model on one data set. Where runs of one method and setting differ in more than the seed, such as
the start of q, each gets a row of its own: unlike runs are never averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kalmannorm.grouped import INFERENCE_MODES
from kalmannorm.lab.methods import METHODS
from kalmannorm.lab.recipe import Recipe
from kalmannorm.lab.report import palette
from kalmannorm.lab.report.collecting import Collected, Experiment, Found, without_twins
from kalmannorm.lab.report.spread import Spread, spread
from kalmannorm.lab.report.wording import option
from kalmannorm.lab.setting import Setting

# What makes two runs incomparable, and what a cell of the table stands for.
_TASK = ("dataset", "model", "train_examples", "test_examples", "image_size", "pretrained")
_CELL = ("method", "gradient_batch", "statistics_batch")


@dataclass(frozen=True)
class Variant:
    """A row: a method, with what sets it apart from another row of the same method."""

    label: str
    method: str
    colour: int


@dataclass(frozen=True)
class Comparison:
    dataset: str
    model: str
    variants: list[Variant]
    settings: list[Setting]
    cells: dict[tuple[Variant, Setting], list[Found]]
    """Only runs that count; by seed."""
    runs: list[Found]
    common: dict[str, Any]
    """What all recipes agree on."""
    differing: dict[str, list[Any]]
    """What they do not, besides method, setting and seed."""

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}"

    @cached_property
    def modes(self) -> list[str]:
        found = {mode for runs in self.cells.values() for run in runs for mode in run.result.get("accuracy") or {}}
        return [mode for mode in INFERENCE_MODES if mode in found]

    @cached_property
    def counting(self) -> list[Found]:
        return [run for runs in self.cells.values() for run in runs]

    def seeds(self, variant: Variant, setting: Setting) -> list[Found]:
        """The runs of a cell. A method without groups has the same ones at every setting of its gradient batch."""
        own = self.cells.get((variant, setting))
        if own is not None or grouped(variant.method):
            return own or []
        kin = (
            runs for (v, s), runs in self.cells.items() if v == variant and s.gradient_batch == setting.gradient_batch
        )
        return next(kin, [])

    def accuracy(self, variant: Variant, setting: Setting, mode: str) -> Spread | None:
        return self.measured(variant, setting, "accuracy", mode)

    def measured(self, variant: Variant, setting: Setting, *keys: str) -> Spread | None:
        """A number of the results, averaged over the seeds of a cell."""
        return spread(_number(run.result, keys) for run in self.seeds(variant, setting))

    def diverged(self, variant: Variant, setting: Setting) -> int:
        return sum(run.state == "diverged" for run in self.seeds(variant, setting))


def grouped(method: str) -> bool:
    """Whether the statistics batch matters to it."""
    return method not in METHODS or METHODS[method].groups


def _number(record: Any, keys: Sequence[str]) -> float | None:
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record if isinstance(record, (int, float)) and not isinstance(record, bool) else None


@dataclass(frozen=True)
class Chapter:
    """An experiment with its runs, or runs that belong to none."""

    experiment: Experiment | None
    runs: list[Found]
    comparisons: list[Comparison]

    @property
    def title(self) -> str:
        if self.experiment is not None:
            record = self.experiment.record
            return str(record.get("title") or record.get("name") or self.experiment.folder.name)
        return self.comparisons[0].title if self.comparisons else "Runs"


def chapters(collected: Collected) -> list[Chapter]:
    """One per experiment, then one per comparison of the runs outside of experiments."""
    owned: dict[Path, list[Found]] = {experiment.folder: [] for experiment in collected.experiments}
    loose: list[Found] = []
    for found in collected.runs:
        owner = next((folder for folder in found.run.folder.resolve().parents if folder in owned), None)
        (loose if owner is None else owned[owner]).append(found)
    made = []
    for experiment in collected.experiments:
        runs = without_twins(owned[experiment.folder])
        made.append(Chapter(experiment, runs, compare(runs)))
    for comparison in compare(without_twins(loose)):
        made.append(Chapter(None, comparison.runs, [comparison]))
    return made


def compare(runs: Sequence[Found]) -> list[Comparison]:
    """The comparisons that these runs make, in the order in which they are met."""
    tasks: dict[tuple[Any, ...], list[Found]] = {}
    for found in runs:
        tasks.setdefault(_values(found.run.recipe, _TASK), []).append(found)
    return [_comparison(members) for members in tasks.values()]


def _values(recipe: Recipe, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(recipe, name) for name in names)


def _comparison(runs: list[Found]) -> Comparison:
    recipes = [found.run.recipe for found in runs]
    others = [name for name in recipes[0].to_json() if name not in (*_TASK, *_CELL, "seed")]
    telling = [name for name in others if _varies_within_a_cell(recipes, name)]
    rows: dict[tuple[Any, ...], Recipe] = {}
    for recipe in sorted(recipes, key=_row_order):
        rows.setdefault(_values(recipe, ["method", *telling]), recipe)
    shades = palette.colours([recipe.method for recipe in rows.values()])
    variants = {
        key: Variant(_label(recipe, telling, list(rows.values())), recipe.method, shade)
        for (key, recipe), shade in zip(rows.items(), shades, strict=True)
    }
    cells: dict[tuple[Variant, Setting], list[Found]] = {}
    for found in sorted(runs, key=lambda found: found.run.recipe.seed):
        if found.counts:
            recipe = found.run.recipe
            cells.setdefault((variants[_values(recipe, ["method", *telling])], recipe.setting), []).append(found)
    values = {name: list(dict.fromkeys(getattr(recipe, name) for recipe in recipes)) for name in others}
    return Comparison(
        recipes[0].dataset,
        recipes[0].model,
        list(variants.values()),
        _settings(recipes),
        cells,
        runs,
        {name: getattr(recipes[0], name) for name in _TASK[2:]} | {n: v[0] for n, v in values.items() if len(v) == 1},
        {name: found for name, found in values.items() if len(found) > 1},
    )


def _settings(recipes: list[Recipe]) -> list[Setting]:
    """Large ones first. A method without groups adds none where others say which statistics batches matter."""
    found = {recipe.setting for recipe in recipes if grouped(recipe.method)}
    batches = {setting.gradient_batch for setting in found}
    found |= {recipe.setting for recipe in recipes if recipe.gradient_batch not in batches}
    return sorted(found, key=lambda setting: (-setting.gradient_batch, -setting.statistics_batch))


def _varies_within_a_cell(recipes: list[Recipe], name: str) -> bool:
    seen: dict[tuple[Any, ...], Any] = {}
    return any(seen.setdefault(_values(r, _CELL), getattr(r, name)) != getattr(r, name) for r in recipes)


def _row_order(recipe: Recipe) -> int:
    """Batch norm first, as what the others are compared with; then as the methods are listed."""
    return list(METHODS).index(recipe.method) if recipe.method in METHODS else len(METHODS)


def _label(recipe: Recipe, telling: list[str], rows: list[Recipe]) -> str:
    title = METHODS[recipe.method].title if recipe.method in METHODS else recipe.method
    same = [row for row in rows if row.method == recipe.method]
    apart = [name for name in telling if len({getattr(row, name) for row in same}) > 1]
    return ", ".join([title, *(option(name, getattr(recipe, name)) for name in apart)])
