"""A comparison of runs: rows are methods, columns are settings, and the seeds of a cell are averaged.

A comparison has one model and one data set. If runs of one method and setting differ in more than the seed, such as the
initial q or the epochs, each kind gets its own row. Different runs are never averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kalmannorm._norms.grouped import INFERENCE_MODES
from kalmannorm.lab.data.catalogue import SOURCES
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.report import palette
from kalmannorm.lab.report.collecting import Collected, Experiment, Found, without_twins
from kalmannorm.lab.report.trained import caveats, sound
from kalmannorm.lab.words import naming
from kalmannorm.lab.words.naming import grouped
from kalmannorm.lab.words.spread import Spread, spread

_TASK = ("dataset", "model", "train_examples", "test_examples", "image_size", "pretrained")
"""Fields of a recipe that must be equal in a comparison."""


@dataclass(frozen=True)
class Variant:
    """A row: a method, and what distinguishes it from other rows; see `naming`."""

    name: str
    method: str
    colour: int
    terms: str = ""
    """The terms of its training, if rows differ in them."""

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, self.terms)))


@dataclass(frozen=True)
class Comparison:
    dataset: str
    model: str
    variants: list[Variant]
    settings: list[Setting]
    cells: dict[tuple[Variant, Setting], list[Found]]
    """Only runs that count, sorted by seed."""
    runs: list[Found]
    common: dict[str, Any]
    """Options that are equal in all recipes."""
    differing: dict[str, list[Any]]
    """Options that differ, besides method, setting and seed."""

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}"

    @cached_property
    def modes(self) -> list[str]:
        found = {mode for runs in self.cells.values() for run in runs for mode in run.result.get("accuracy") or {}}
        return [mode for mode in INFERENCE_MODES if mode in found]

    @cached_property
    def images(self) -> int | None:
        """The number of test images, from the results or else from the data set. None if unknown."""
        sizes: list[int | None] = [run.result.get("test_images") for run in self.counting]
        if not any(sizes):
            recipe = self.runs[0].run.recipe
            source = SOURCES.get(recipe.dataset)
            sizes = [recipe.test_examples, source.test_size if source is not None else None]
        return min((size for size in sizes if size is not None), default=None)

    @cached_property
    def counting(self) -> list[Found]:
        return [run for runs in self.cells.values() for run in runs]

    def seeds(self, variant: Variant, setting: Setting) -> list[Found]:
        """The runs of a cell. A method without groups has the same runs at every setting of its gradient batch."""
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

    def sound(self, variant: Variant, setting: Setting) -> bool:
        """Whether the cell may be compared: none of its runs is at chance level or too short."""
        return sound([run.ended for run in self.seeds(variant, setting)])

    @cached_property
    def alike(self) -> list[Variant]:
        """The rows that sentences compare: all trained on the same terms.

        If there are several terms, it takes those with both batch norm and a filter, and then those of most runs.
        """
        kinds: dict[str, list[Variant]] = {}
        for variant in self.variants:
            kinds.setdefault(variant.terms, []).append(variant)

        def weight(rows: list[Variant]) -> tuple[bool, int]:
            both = any(row.method == "bn" for row in rows) and any(is_filter(row.method) for row in rows)
            return both, sum(len(runs) for (row, _), runs in self.cells.items() if row in rows)

        return max(kinds.values(), key=weight, default=[])


def is_filter(method: str) -> bool:
    return method in METHODS and METHODS[method].to == "kalman"


def _number(record: Any, keys: Sequence[str]) -> float | None:
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record if isinstance(record, (int, float)) and not isinstance(record, bool) else None


@dataclass(frozen=True)
class Chapter:
    """An experiment with its runs, or runs that belong to no experiment."""

    experiment: Experiment | None
    runs: list[Found]
    comparisons: list[Comparison]

    @property
    def title(self) -> str:
        if self.experiment is not None:
            record = self.experiment.record
            return str(record.get("title") or record.get("name") or self.experiment.folder.name)
        return self.comparisons[0].title if self.comparisons else "Runs"

    @property
    def warnings(self) -> list[str]:
        """Facts that a reader needs before the results."""
        return caveats([run.ended for run in self.runs if run.counts])


def chapters(collected: Collected) -> list[Chapter]:
    """One chapter per experiment, then one per comparison of the other runs."""
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
    """The comparisons of these runs, in order of first appearance."""
    tasks: dict[tuple[Any, ...], list[Found]] = {}
    for found in runs:
        tasks.setdefault(_values(found.run.recipe, _TASK), []).append(found)
    return [_comparison(members) for members in tasks.values()]


def _values(recipe: Recipe, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(recipe, name) for name in names)


def _comparison(runs: list[Found]) -> Comparison:
    recipes = [found.run.recipe for found in runs]
    others = [name for name in naming.options(recipes[0]) if name not in _TASK]
    telling = naming.telling(recipes)
    rows: dict[tuple[Any, ...], Recipe] = {}
    for recipe in sorted(recipes, key=lambda recipe: _row_order(recipe, telling)):
        rows.setdefault(_values(recipe, ["method", *telling]), recipe)
    shades = _shades(rows, Counter(naming.terms(recipe, telling) for recipe in recipes), telling)
    variants = {
        key: Variant(
            naming.own_name(recipe, telling, recipes), recipe.method, shades[key], naming.terms(recipe, telling)
        )
        for key, recipe in rows.items()
    }
    cells: dict[tuple[Variant, Setting], list[Found]] = {}
    for found in sorted(runs, key=lambda found: found.run.recipe.seed):
        if found.counts:
            recipe = found.run.recipe
            cells.setdefault((variants[_values(recipe, ["method", *telling])], recipe.setting), []).append(found)
    values = {name: sorted({getattr(recipe, name) for recipe in recipes}, key=_missing_first) for name in others}
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


def _shades(
    rows: dict[tuple[Any, ...], Recipe], runs: Counter[str], telling: Sequence[str]
) -> dict[tuple[Any, ...], int]:
    """Colours of rows. Rows on the terms of most runs come first, so that they get the colours of their methods."""
    keys = sorted(rows, key=lambda key: -runs[naming.terms(rows[key], telling)])
    return dict(zip(keys, palette.colours([rows[key].method for key in keys]), strict=True))


def _settings(recipes: list[Recipe]) -> list[Setting]:
    """Large settings first. A method without groups adds no setting if other methods have statistics batches."""
    found = {recipe.setting for recipe in recipes if grouped(recipe.method)}
    batches = {setting.gradient_batch for setting in found}
    found |= {recipe.setting for recipe in recipes if recipe.gradient_batch not in batches}
    return sorted(found, key=lambda setting: (-setting.gradient_batch, -setting.statistics_batch))


def _row_order(recipe: Recipe, telling: Sequence[str]) -> tuple[int, list[tuple[bool, Any]]]:
    """Sort key: by method, then by the options that distinguish rows of one method."""
    return naming.order(recipe.method), [_missing_first(value) for value in _values(recipe, telling)]


def _missing_first(value: Any) -> tuple[bool, Any]:
    """Sort None first, because it cannot be compared with other values."""
    return value is not None, value
