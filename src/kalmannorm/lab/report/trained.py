"""Whether runs have learned anything.

Runs at chance level, or with only a few steps, show no difference between methods. The page says so first, and no
sentence compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kalmannorm.lab.data.catalogue import SOURCES
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.words.naming import order, row_name
from kalmannorm.lab.words.wording import counted, number

FEW_STEPS = 20
_CLASSES = {"imagenet": 1000}

Ended = tuple[Recipe, Record]
"""A run and its result."""


def classes(recipe: Recipe) -> int | None:
    """The number of classes. None if it depends on the user's own files."""
    source = SOURCES.get(recipe.dataset)
    return _CLASSES.get(recipe.dataset, source.classes if source is not None else None)


def at_chance(recipe: Recipe, result: Record) -> bool:
    """Whether the best way of inference is at chance level.

    It is, if its accuracy is at most 1.5 times that of guessing, and at most a twentieth of the way from there to 100
    %. If only one of the ways is at chance level, that is a finding about that way. Diverged runs are reported
    separately.
    """
    count = classes(recipe)
    scores = [value for value in (result.get("accuracy") or {}).values() if isinstance(value, (int, float))]
    if count is None or not scores or result.get("diverged"):
        return False
    guess = 100 / count
    return max(scores) <= min(1.5 * guess, guess + 0.05 * (100 - guess))


def too_short(recipe: Recipe, result: Record) -> bool:
    """Whether the training had less than an epoch, or only a few steps."""
    steps = result.get("steps")
    return recipe.epochs < 1 or (not result.get("diverged") and steps is not None and steps < FEW_STEPS)


def sound(ended: Sequence[Ended]) -> bool:
    """Whether these runs can be compared with others."""
    return not any(at_chance(*run) or too_short(*run) for run in ended)


def caveats(ended: Sequence[Ended]) -> list[str]:
    """Facts about these runs that a reader needs first."""
    short = [run for run in ended if too_short(*run)]
    lost = [run for run in ended if at_chance(*run)]
    told = []
    if short:
        verb = "was" if len(short) == 1 else "were"
        told.append(f"{_who(short, ended)} {verb} trained for {_length(short)}: too short to compare.")
    if lost:
        verb = "ends" if len(lost) == 1 else "end"
        guess = sorted({classes(recipe) or 0 for recipe, _ in lost})
        chance = " or ".join(f"{number(100 / count, 0 if count <= 100 else 1)} %" for count in guess)
        where = f"at chance level ({chance}) in every way of inference"
        told.append(f"{_who(lost, ended)} {verb} {where}{_names(lost, ended)}.")
    return told


def _who(some: Sequence[Ended], ended: Sequence[Ended]) -> str:
    if len(some) < len(ended):
        return f"{len(some)} of {counted(len(ended), 'run')}"
    return "All runs" if len(ended) > 1 else "The run"


def _length(short: Sequence[Ended]) -> str:
    steps = sorted({result["steps"] for _, result in short if result.get("steps") is not None})
    epochs = sorted({recipe.epochs for recipe, _ in short})
    long = counted(epochs[0], "epoch") if len(epochs) == 1 else f"{epochs[0]:g} to {epochs[-1]:g} epochs"
    if not steps:
        return long
    return f"{counted(steps[0], 'step') if len(steps) == 1 else f'{steps[0]} to {steps[-1]} steps'} ({long})"


def _names(some: Sequence[Ended], ended: Sequence[Ended]) -> str:
    """The rows of these runs, if other rows have none of them."""
    if len(some) == len(ended):
        return ""
    all_seeds = Counter(row_name(recipe) for recipe, _ in ended)
    names = []
    listed = sorted((recipe for recipe, _ in some), key=lambda recipe: order(recipe.method))
    for row, seeds in Counter(map(row_name, listed)).items():
        names.append(row if seeds == all_seeds[row] else f"{row}, {seeds} of {counted(all_seeds[row], 'seed')}")
    return f": {'; '.join(names)}"
