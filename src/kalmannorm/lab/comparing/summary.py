"""The summary of a comparison: mean and spread over seeds of every method at every setting, as text or data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from kalmannorm._norms.grouped import INFERENCE_MODES
from kalmannorm.lab.files.records import Record, Run
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.words import naming
from kalmannorm.lab.words.spread import Spread, spread
from kalmannorm.lab.words.wording import MISSING, accuracy, number


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed, by their indices in the original list."""

    recipe: Recipe
    """The recipe of the first run."""
    members: list[int]
    title: str
    """The method, and the options in which this row differs from others: "BKN, 15 epochs"."""

    @property
    def setting(self) -> str:
        return naming.at(self.recipe.method, self.recipe.setting)


def rows(recipes: Sequence[Recipe]) -> list[Row]:
    """The recipes as rows, sorted by method, then by setting."""
    members: dict[Recipe, list[int]] = {}
    for place, recipe in enumerate(recipes):
        members.setdefault(dataclasses.replace(naming.essence(recipe), seed=0), []).append(place)
    told = naming.telling(recipes)
    found = []
    for recipe, own in members.items():
        parts = naming.own_name(recipe, told, recipes), naming.terms(recipe, told)
        found.append(Row(recipes[own[0]], own, ", ".join(filter(None, parts))))
    order = list(dict.fromkeys(row.title for row in found))
    return sorted(found, key=lambda row: order.index(row.title))


def summarize(runs: Sequence[Run]) -> list[Record]:
    """One record per row. Runs without a result are counted, but not averaged."""
    results = [run.result for run in runs]
    found = []
    for row in rows([run.recipe for run in runs]):
        own = [result for place in row.members if (result := results[place]) is not None]
        found.append(
            {
                "method": row.recipe.method,
                "title": row.title,
                "setting": list(row.recipe.setting),
                "setting_title": row.setting,
                "runs": [runs[place].folder.name for place in row.members],
                "finished": len(own),
                "diverged": sum(bool(result.get("diverged")) for result in own),
                "accuracy": _by_mode(own, "accuracy"),
                "loss": _by_mode(own, "loss"),
                **{
                    name: _json(spread(result.get(name) for result in own)) for name in ("images_per_second", "seconds")
                },
            }
        )
    return found


def _by_mode(results: Sequence[Record], name: str) -> Record:
    found = [result.get(name) or {} for result in results]
    modes = [mode for mode in INFERENCE_MODES if any(mode in values for values in found)]
    return {mode: _json(spread(values.get(mode) for values in found)) for mode in modes}


def _json(found: Spread | None) -> Record | None:
    return None if found is None else found.to_json()


def table(records: Sequence[Record]) -> str:
    """The records of `summarize` as text, for a terminal or a file."""
    modes = [mode for mode in INFERENCE_MODES if any(mode in record["accuracy"] for record in records)]
    head = ["", "setting", *modes, "images/s", "runs"]
    body = [
        [
            record["title"],
            record["setting_title"],
            *(_accuracy(record["accuracy"].get(mode)) for mode in modes),
            MISSING if record["images_per_second"] is None else number(record["images_per_second"]["mean"], 0),
            _counted(record),
        ]
        for record in records
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    lines = [head, ["─" * width for width in widths], *body]
    return "\n".join(
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(both))
        for both in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _accuracy(found: Record | None) -> str:
    return MISSING if found is None else accuracy(Spread(**found))


def _counted(record: Record) -> str:
    missing = len(record["runs"]) - record["finished"]
    notes = [f"{record['diverged']} diverged"] if record["diverged"] else []
    notes += [f"{missing} missing"] if missing else []
    return f"{len(record['runs'])}" + (f" ({', '.join(notes)})" if notes else "")
