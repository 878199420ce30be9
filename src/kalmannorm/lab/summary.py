"""A comparison in numbers: mean and spread over seeds of every method at every setting, as text or for scripts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kalmannorm.grouped import INFERENCE_MODES
from kalmannorm.lab.methods import method
from kalmannorm.lab.recipe import Recipe
from kalmannorm.lab.records import Record, Run

_NAMED = {"method", "gradient_batch", "statistics_batch", "seed"}


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed alone, by their place in the list they came from."""

    recipe: Recipe
    """Of the first of them."""
    members: list[int]
    remark: str = ""
    """What else tells this row from the others: "gain 0.9"."""

    @property
    def title(self) -> str:
        return " ".join(part for part in (method(self.recipe.method).title, self.remark) if part)

    @property
    def setting(self) -> str:
        """Without a statistics batch where it does not matter."""
        chosen = method(self.recipe.method)
        return str(self.recipe.setting) if chosen.groups else f"({self.recipe.gradient_batch}, –)"


def rows(recipes: Sequence[Recipe]) -> list[Row]:
    """The recipes by rows, in the order of their methods, then of their settings."""
    members: dict[Recipe, list[int]] = {}
    for place, recipe in enumerate(recipes):
        members.setdefault(dataclasses.replace(recipe, seed=0), []).append(place)
    names = [field.name for field in dataclasses.fields(Recipe) if field.name not in _NAMED]
    varying = [name for name in names if len({getattr(recipe, name) for recipe in recipes}) > 1]
    found = []
    for own in members.values():
        recipe = recipes[own[0]]
        remark = ", ".join(f"{name.replace('_', ' ')} {getattr(recipe, name)}" for name in varying)
        found.append(Row(recipe, own, remark))
    order = list(dict.fromkeys((row.recipe.method, row.remark) for row in found))
    return sorted(found, key=lambda row: order.index((row.recipe.method, row.remark)))


def spread(values: Iterable[float | None]) -> Record | None:
    """{"mean", "std", "n"}; std is that of a sample, None for one value; None for no value at all."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "std": std, "n": len(known)}


def text_of(found: Record | None, digits: int = 1) -> str:
    """ "97.1 ± 0.3", "97.1", or a dash."""
    if found is None:
        return "–"
    std = "" if found["std"] is None else f" ± {found['std']:.{digits}f}"
    return f"{found['mean']:.{digits}f}{std}"


def summarize(runs: Sequence[Run]) -> list[Record]:
    """One record per row; runs without a result are counted, not averaged."""
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
                "diverged": sum(bool(result["diverged"]) for result in own),
                "accuracy": _by_mode(own, "accuracy"),
                "loss": _by_mode(own, "loss"),
                **{name: spread(result[name] for result in own) for name in ("images_per_second", "seconds")},
            }
        )
    return found


def _by_mode(results: Sequence[Record], name: str) -> Record:
    modes = [mode for mode in INFERENCE_MODES if any(mode in result[name] for result in results)]
    return {mode: spread(result[name].get(mode) for result in results) for mode in modes}


def table(records: Sequence[Record]) -> str:
    """What `summarize` gives, for a terminal or a file."""
    modes = [mode for mode in INFERENCE_MODES if any(mode in record["accuracy"] for record in records)]
    head = ["", "setting", *modes, "images/s", "runs"]
    body = [
        [
            record["title"],
            record["setting_title"],
            *(text_of(record["accuracy"].get(mode)) for mode in modes),
            text_of(_mean_only(record["images_per_second"]), digits=0),
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


def _mean_only(found: Record | None) -> Record | None:
    return None if found is None else {**found, "std": None}


def _counted(record: Record) -> str:
    missing = len(record["runs"]) - record["finished"]
    notes = [f"{record['diverged']} diverged"] if record["diverged"] else []
    notes += [f"{missing} missing"] if missing else []
    return f"{len(record['runs'])}" + (f" ({', '.join(notes)})" if notes else "")
