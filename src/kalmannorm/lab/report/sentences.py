"""Sentences about the numbers of these runs. The code does not assume which method is better.

Only rows that were trained on the same terms are compared, and only runs that learned something.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.report.comparison import Comparison, Variant, is_filter
from kalmannorm.lab.report.costs import hardware
from kalmannorm.lab.report.difference import difference
from kalmannorm.lab.report.gains import final
from kalmannorm.lab.report.trained import caveats, too_short
from kalmannorm.lab.words.naming import run_name
from kalmannorm.lab.words.spread import Spread
from kalmannorm.lab.words.wording import accuracy, counted, listed, number

_POINT = 1.0
"""The least change in accuracy that a verb describes, in %."""


_NOISY = 0.15
"""The largest relative standard deviation of speeds. Above it the machine probably had other load."""


def what(comparison: Comparison, named: bool = True) -> str:
    """What was compared, in one sentence. With the names of model and data set, unless a title has them."""
    seeds = {len(runs) for runs in comparison.cells.values()}
    epochs = comparison.common.get("epochs")
    methods, rows = len({variant.method for variant in comparison.variants}), len(comparison.variants)
    made = counted(methods, "method") + (f" in {rows} variants" if rows > methods else "")
    made += f" at {counted(len(comparison.settings), 'setting')}"
    if seeds:
        fewest, most = min(seeds), max(seeds)
        made += f", {counted(most, 'seed') if fewest == most else f'{fewest} to {most} seeds'} each"
    if epochs is not None:
        made += f", {counted(epochs, 'epoch')}"
    return f"{comparison.title}: {made}." if named else f"{made}."


def sentences(comparison: Comparison) -> list[str]:
    """Facts that a reader needs first, and the findings."""
    return [*caveats([run.ended for run in comparison.counting]), *findings(comparison)]


def findings(comparison: Comparison) -> list[str]:
    """Findings on accuracy, and on runs that did not end normally."""
    told = [_on_terms(comparison, said) for said in (*_falls(comparison), *_best(comparison))]
    return [*told, *_states(comparison)]


def _on_terms(comparison: Comparison, said: str) -> str:
    """Add the terms of training to the sentence, if there are several."""
    terms = comparison.alike[0].terms
    return f"With {terms}, {said[0].lower()}{said[1:]}" if terms else said


@dataclass(frozen=True)
class _Change:
    """A method at a setting, compared with itself at the largest statistics batch."""

    variant: Variant
    now: Spread
    before: Spread | None
    diverged: int
    images: int | None

    @property
    def verb(self) -> str:
        if self.diverged:
            return f"diverges in {self.diverged} of {counted(self.now.n, 'seed')} and averages"
        if self.before is None:
            return "reaches"
        change = self.now.mean - self.before.mean
        if abs(change) < _POINT:
            return "holds"
        if difference(self.now, self.before, self.images).beyond_chance is False:
            return "is at"
        return "falls to" if change < 0 else "rises to"


@dataclass(frozen=True)
class _Gap:
    """Batch norm compared with a filter."""

    mode: str
    one: _Change
    other: _Change

    @property
    def size(self) -> float:
        return abs(self.one.now.mean - self.other.now.mean)


def _falls(comparison: Comparison) -> list[str]:
    """Batch norm compared with a filter.

    The first comparison is fixed before any number is known: population mode at the smallest statistics batch, with the
    first filter. Then follows, for each smaller statistics batch, the largest of all gaps, and the number of gaps.
    """
    baselines = [row for row in comparison.alike if row.method == "bn"]
    filters = [row for row in comparison.alike if is_filter(row.method)]
    if not baselines or not filters:
        return []
    told: list[str] = []
    first: _Gap | None = None
    for setting in reversed(comparison.settings):
        if setting == comparison.settings[0] and len(comparison.settings) > 1:
            continue
        gaps = _gaps(comparison, baselines[0], filters, setting)
        if setting == comparison.settings[-1]:
            first = next((gap for gap in gaps if gap.mode == "population" and gap.other.variant == filters[0]), None)
            told += [f"At {setting} in population mode {_story(first)}"] if first is not None else []
        largest = max(gaps, key=lambda gap: gap.size, default=None)
        if largest is not None and largest is not first:
            told.append(
                f"The largest of {counted(len(gaps), 'gap')} to {baselines[0].name} at {setting}: "
                f"in {largest.mode} mode {_story(largest, len(gaps))}"
            )
    return told


def _shipped(comparison: Comparison, variant: Variant) -> list[str]:
    """The ways of inference in which a reader may ship this row.

    In `batch` mode the result of an image depends on others. A net with a closing phase is trained for population mode.
    """
    closed = any(
        run.run.recipe.closing_start is not None
        for (own, _), runs in comparison.cells.items()
        if own == variant
        for run in runs
    )
    return [mode for mode in comparison.modes if mode == "population" or not (closed or mode == "batch")]


def _gaps(comparison: Comparison, baseline: Variant, filters: Sequence[Variant], setting: Setting) -> list[_Gap]:
    found = []
    for mode in _shipped(comparison, baseline):
        one = _change(comparison, baseline, setting, mode)
        able = [variant for variant in filters if mode in _shipped(comparison, variant)]
        others = [_change(comparison, variant, setting, mode) for variant in able]
        found += [_Gap(mode, one, other) for other in others if one is not None and other is not None]
    return found


def _change(comparison: Comparison, variant: Variant, setting: Setting, mode: str) -> _Change | None:
    now = _sound(comparison, variant, setting, mode)
    if now is None:
        return None
    same = [s for s in comparison.settings if s.gradient_batch == setting.gradient_batch]
    before = None if same[0] == setting else _sound(comparison, variant, same[0], mode)
    return _Change(variant, now, before, comparison.diverged(variant, setting), comparison.images)


def _sound(comparison: Comparison, variant: Variant, setting: Setting, mode: str) -> Spread | None:
    """An accuracy that may be compared."""
    return comparison.accuracy(variant, setting, mode) if comparison.sound(variant, setting) else None


def _story(gap: _Gap, among: int = 1) -> str:
    """`among` is the number of gaps from which this one was picked."""
    one, other = gap.one, gap.other
    start = f"{one.variant.name} {one.verb} {accuracy(one.now)} %"
    if one.before is not None and one.verb.endswith(" to"):
        start += f" from {accuracy(one.before)}"
    found = difference(one.now, other.now, one.images, among)
    if found.beyond_chance is False and not one.diverged:
        name, value = other.variant.name, accuracy(other.now)
        if not found.level:
            return f"{start}, {name} at {value}, but that may be chance: {found.reason}."
        why = f": {found.reason}" if found.size else ""
        return f"{start}; {name}, at {value}, does not differ beyond chance{why}."
    verb = other.verb
    if verb == one.verb and not other.diverged:
        verb = verb.partition(" ")[2]  # "falls to 86.3, BKN to 91.0"
    alone = " (one seed: the spread is unknown)" if found.seeds is None else ""
    return f"{start}, {' '.join(filter(None, (other.variant.name, verb, accuracy(other.now))))}{alone}."


def _best(comparison: Comparison) -> list[str]:
    """The best at the smallest statistics batch, of all methods and ways of inference to ship, and the second best."""
    if not comparison.settings:
        return []
    setting = comparison.settings[-1]
    cells = [
        (value, variant, mode)
        for variant in comparison.alike
        for mode in _shipped(comparison, variant)
        if (value := _sound(comparison, variant, setting, mode)) is not None
    ]
    if len({variant for _, variant, _ in cells}) < 2:
        return []
    cells.sort(key=lambda cell: -cell[0].mean)
    value = cells[0][0]
    ways: dict[Variant, list[str]] = {}
    for other, variant, mode in cells:
        if math.isclose(other.mean, value.mean, abs_tol=1e-9):
            ways.setdefault(variant, []).append(mode)
    start = f"The best of {len(cells)} means at {setting}"
    names = [f"{variant.name} in {listed(modes)} mode" for variant, modes in ways.items()]
    if sum(map(len, ways.values())) == 1:
        text = f"{start} is {names[0]}, {accuracy(value)} %"
    else:
        text = f"{start}, {number(value.mean, 1)} %, is reached by {listed(names)} alike"
    rivals = [cell for cell in cells if cell[1] not in ways]
    if rivals:
        rival, second, way = rivals[0]
        text += f"; next is {second.name} in {way} mode, {accuracy(rival)}"
        if difference(value, rival, comparison.images, len(cells) - 1).beyond_chance is False:
            text += ", no difference beyond chance"
    return [text + "."]


def on_gains(comparison: Comparison) -> list[str]:
    told = []
    for variant in (row for row in comparison.variants if is_filter(row.method)):
        means = []
        for setting in comparison.settings:
            values = [q for run in comparison.seeds(variant, setting) for q in final(run).values()]
            if values:
                means.append(f"{number(statistics.fmean(values), 2)} at {setting}")
        if means:
            told.append(f"The gain q of {variant.label}, averaged over layers, ended at {listed(means)}.")
    return told


def on_speed(comparison: Comparison) -> list[str]:
    """Speed as a ratio to batch norm. Only for one kind of machine, if the seeds agree and there are many steps."""
    baselines = [row for row in comparison.alike if row.method == "bn"]
    hasty = any(too_short(*run.ended) for run in comparison.counting)
    if not baselines or hasty or len(hardware(comparison)) != 1:
        return []
    told, noise = [], 0.0
    for variant in comparison.alike:
        ratios = []
        for setting in comparison.settings:
            one = comparison.measured(variant, setting, "images_per_second")
            base = comparison.measured(baselines[0], setting, "images_per_second")
            if one is not None and base is not None and min(one.mean, base.mean) > 0:
                ratios.append(one.mean / base.mean)
                noise = max(noise, *((value.std or 0.0) / value.mean for value in (one, base)))
        if ratios and variant != baselines[0]:
            told.append(f"{variant.name} {number(statistics.median(ratios), 2)}")
    if told and noise > _NOISY:
        return [f"Seeds of one method differ in speed by up to {noise:.0%} (standard deviation): too much to compare."]
    name = baselines[0].name
    said = f"Training speed, as a ratio to {name} (median over settings): {', '.join(told)}."
    return [_on_terms(comparison, said)] if told else []


def _states(comparison: Comparison) -> list[str]:
    told = []
    for state, one, many in (
        ("diverged", "diverged and counts with its final accuracy", "diverged and count with their final accuracy"),
        ("unfinished", "is unfinished and enters no average", "are unfinished and enter no average"),
        ("repeated", "was repeated, and the last one counts", "were repeated, and the last ones count"),
    ):
        runs = [run.run.recipe for run in comparison.runs if run.state == state]
        if runs:
            labels = [run_name(recipe) for recipe in runs]
            names = listed(labels) if len(labels) <= 3 else f"{', '.join(labels[:3])} and {len(labels) - 3} more"
            told.append(f"{counted(len(runs), 'run')} {one if len(runs) == 1 else many}: {names}.")
    return told
