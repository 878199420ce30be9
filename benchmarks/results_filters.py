"""The tables of docs/results.md about computed filters: tried on held-out images, confirmed on test images, the recipe.

Runs on test images come in parts. A sentence about a part without records says so, and changes when they are there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal

from measured import ABSENT, ROOT, markdown
from results_words import Difference, bullets, compared, difference, mean, paragraph, said, signed, spread

sys.path.append(str(ROOT))
from results_evidence import not_yet
from results_trials import (
    NAMES,
    SHORT,
    all_scores,
    best,
    cells,
    computed,
    held_out,
    on_test_images,
    optimizer_of,
    origin_of,
    place,
    power,
)

from trials import table
from trials.cells import BATCH, CELLS
from trials.forms import Form
from trials.rounds import CONTROLS, GENTLE, RECIPE, ROUNDS
from trials.rounds import SHORT as USUAL_GAIN
from trials.table import Score, described

ROUND = "confirm-filters"
CONFIRMING = (ROUND, "confirm-gain", "confirm-groups")
"""The rounds on test images."""
PLAIN = "batch norm at 128 with plain filters"
SAME = "batch norm at 128 with standardized filters"
STANDARDIZED = Form(kind="batch", filters="standardized")
FAILED = "cifar100"
"""The cell on whose test images the first recipe was clearly below batch norm."""


# Tried on held-out images


def with_filters(cell: str) -> list[Score]:
    """Settings with centred or standardized filters."""
    return [score for score in held_out(cell) if score.setting.form.filters != "plain"]


def filters_table() -> str:
    """Forms with centred or standardized filters, beside the best setting of batch norm at 128 with plain ones."""
    lines, rows = [], []
    found = {cell: with_filters(cell) for cell in cells()}
    forms = dict.fromkeys(score.setting.form for own in found.values() for score in own)
    for form in sorted(forms, key=lambda form: (-form.m, form.kind, form.filters, form.fade, form.close)):
        shown = []
        for own in found.values():
            mine = sorted((s for s in own if s.setting.form == form), key=place)
            rows += [row for score in mine for row in score.rows.values()]
            shown.append("; ".join(f"{power(s.setting.decay)}: {_by_seed(s)}" for s in mine))
        lines.append([described(form), *shown])
    plain = [best(cell, "batch", 128, phase=False) for cell in cells()]
    first = [f"{power(top.setting.decay)}: {_by_seed(top)}" if top else "" for top in plain]
    headings = ["weight decay: held-out accuracy, % by seed", *(SHORT[cell] for cell in cells())]
    lines.insert(0, ["batch norm at 128, plain filters, its best decay", *first])
    text = "\n".join(markdown(headings, lines, 1)) + "\n\n" + origin_of(rows, cells())
    return text + "\n" + bullets(_filter_sentences())


def _by_seed(score: Score) -> str:
    if score.diverged:
        return "diverged"
    by_seed = score.accuracies()
    return " ".join(f"{by_seed[seed]:.1f}" if seed in by_seed else "diverged" for seed in sorted(score.rows))


def held(cell: str, kind: str, m: int) -> float | None:
    """The held-out accuracy of the best setting with standardized filters."""
    own = (score for score in with_filters(cell) if score.setting.form.filters == "standardized")
    top = table.best(s for s in own if (s.setting.form.kind, s.setting.form.m) == (kind, m))
    return None if top is None else top.first


def _filtered(cell: str, kind: str, m: int) -> float:
    found = held(cell, kind, m)
    assert found is not None, (cell, kind, m)
    return found


def _filter_sentences() -> list[str]:
    cells_of = ("tiny100", "cifar10")
    base = {cell: top.first for cell in cells_of if (top := best(cell, "batch", 128, phase=False)) is not None}
    norms = {"kalman": "BKN", "ghost": "batch norm on groups"}
    first = {cell: max(norms, key=lambda kind: _filtered(cell, kind, 2)) for cell in cells_of}
    two = {cell: _filtered(cell, first[cell], 2) for cell in cells_of}
    one = {cell: {kind: _filtered(cell, kind, 1) for kind in ("ghost", "kalman")} for cell in cells_of}
    large = {cell: _filtered(cell, "batch", 128) for cell in cells_of}
    return [
        said(
            "With standardized filters and a closing phase, the best norm at m = 2 is above batch norm at 128 with "
            f"plain filters: by {signed(two['tiny100'] - base['tiny100'])} points on Tiny-ImageNet "
            f"({norms[first['tiny100']]}), and by {signed(two['cifar10'] - base['cifar10'])} on CIFAR-10 "
            f"({norms[first['cifar10']]}).",
            all(two[cell] > base[cell] for cell in cells_of),
        ),
        said(
            f"At m = 1 BKN is {base['tiny100'] - one['tiny100']['kalman']:.1f} points below it on Tiny-ImageNet and "
            f"{one['cifar10']['kalman'] - base['cifar10']:.1f} points above it on CIFAR-10. At the same "
            f"phase and with a gain from 0.5 it has, against batch norm on groups of 1, {_prior_at_one()} points (one "
            "seed). Groups of 1 with these filters were not run on test images.",
            0 < base["tiny100"] - one["tiny100"]["kalman"] < 1,
            one["cifar10"]["kalman"] > base["cifar10"],
        ),
        said(
            "Batch norm at 128 gains from standardized filters too: "
            f"{signed(large['tiny100'] - base['tiny100'])} and {signed(large['cifar10'] - base['cifar10'])} points.",
            all(large[cell] > base[cell] for cell in cells_of),
        ),
        "Most figures are one seed, and the best of several settings is too high. " + _scored_on_test_images(),
    ]


def same_phase(cell: str, m: int) -> dict[tuple[float, float], float]:
    """BKN with a fading prior and a gain from 0.5 minus batch norm on groups, on held-out images, by phase."""
    found: dict[tuple[tuple[float, float], float], dict[str, float]] = {}
    for score in with_filters(cell):
        form = score.setting.form
        known = form.m == m and form.filters == "standardized" and form.gain is None
        if known and (form.kind == "ghost" or form.fade == 1) and not score.diverged:
            found.setdefault((form.close, score.setting.decay), {})[form.kind] = score.first
    both = {close: own for (close, _), own in found.items() if {"kalman", "ghost"} <= set(own)}
    return {close: own["kalman"] - own["ghost"] for close, own in both.items()}


def _prior_at_one() -> str:
    told = []
    for cell in cells():
        for (start, end), points in sorted(same_phase(cell, 1).items()):
            told.append(f"{signed(points)} ({SHORT[cell]}, {100 * start:g} to {100 * end:g} %)")
    return ", ".join(told)


def _scored_on_test_images() -> str:
    found = {cell: own for cell in cells(test=True) if (own := differences(cell))}
    where = "On [test images](#computed-filters) of"
    told = [f"{where} {SHORT[cell]}, {_by_m(own, PLAIN)}." for cell, own in found.items()]
    return " ".join(told) or "They are not confirmed on test images yet."


# Confirmed on test images


def batch_norm(cell: str, filters: Literal["plain", "standardized"]) -> Score | None:
    """Batch norm at 128 on test images."""
    return with_form(cell, Form(kind="batch", filters=filters))


def with_form(cell: str, form: Form) -> Score | None:
    """On test images. None: not run."""
    found = [score for score in on_test_images(cell, filters=computed(form)) if score.setting.form == form]
    if len(found) > 1:
        sys.exit(f"docs/results.md speaks of one confirmed setting, and there are {len(found)}: {cell} {form.name}")
    return found[0] if found else None


def against(score: Score | None, base: Score | None) -> Difference | None:
    """None: one of them was not run or diverged, or they have no seed in common."""
    if score is None or base is None or not set(score.accuracies()) & set(base.accuracies()):
        return None
    return difference(score.accuracies(), base.accuracies())


def differences(cell: str, filters: Literal["plain", "standardized"] = "plain") -> dict[int, Difference]:
    """BKN by the recipe minus batch norm at 128 with these filters, by m. What was not run is missing."""
    base = batch_norm(cell, filters)
    found = {m: against(with_form(cell, form), base) for m, form in RECIPE.items()}
    return {m: each for m, each in found.items() if each is not None}


def seeds(cell: str) -> set[int]:
    """How many the runs of the recipe have."""
    found = (with_form(cell, form) for form in RECIPE.values())
    return {len(score.accuracies()) for score in found if score is not None}


def _by_m(found: dict[int, Difference], other: str) -> str:
    """What BKN has against `other`, which is named once."""
    names = [other, *["it"] * len(found)]
    return ", and ".join(compared(f"BKN at m = {m}", found[m], name) for m, name in zip(found, names, strict=False))


def confirm_table() -> str:
    own = [cell for cell in cells(test=True) if on_test_images(cell, filters=True)]
    return "\n".join(_confirmed(cell) for cell in own) if own else not_yet(ROUND)


def _order(score: Score) -> tuple[int, bool, bool, int, bool]:
    """Batch norm first. Forms of others come last. The recipe comes before its variants."""
    form = score.setting.form
    others = form.kind == "moving", form.kind == "ghost"
    return -form.m if form.kind == "batch" else 0, *others, -form.m, form != RECIPE.get(form.m)


def _confirmed(cell: str) -> str:
    plain, same = batch_norm(cell, "plain"), batch_norm(cell, "standardized")
    found = [*([plain] if plain else []), *sorted(on_test_images(cell, filters=True), key=_order)]
    lines = []
    for score in found:
        form, by_seed = score.setting.form, score.accuracies()
        words = "batch norm at 128, plain filters" if score is plain else described(form)
        values = [f"{mean(by_seed):.2f}" if by_seed else ABSENT, _cell(score, plain)]
        if same is not None:
            values.append(_cell(score, same) if form.filters == "standardized" else "")
        lines.append([words, optimizer_of(score), str(len(by_seed)), _by_seed(score), *values])
    headings = [f"{SHORT[cell]}, test accuracy, %", "setting", "n", "by seed", "mean", f"difference to {PLAIN}"]
    headings += [f"difference to {SAME}"] if same is not None else []
    rows = [row for score in found for row in score.rows.values()]
    text = paragraph(
        f"{NAMES[cell]}, {CELLS[cell].epochs} epochs, trained on all training images, scored on "
        f"{found[0].setting.images:,} test images."
    )
    text += "\n" + "\n".join(markdown(headings, lines, 2)) + "\n\n" + origin_of(rows, [cell]) + "\n"
    sentences = [_by_m(found, PLAIN) + "." for found in [differences(cell)] if found]
    return text + bullets([*sentences, *same_filters(cell), *gains(cell), *same_groups(cell), *moving(cell)])


def _cell(score: Score, base: Score | None) -> str:
    found = against(score, base)
    return "" if found is None or score is base else found.shown(2)


def same_filters(cell: str) -> list[str]:
    """How much of the difference the filters make: BKN beside batch norm at 128 with standardized filters."""
    own = batch_norm(cell, "standardized")
    if own is not None and own.diverged:
        return [f"{SAME[0].upper()}{SAME[1:]} diverged on test images."]
    if own is not None:
        gain, found = against(own, batch_norm(cell, "plain")), differences(cell, "standardized")
        told = [] if gain is None else [compared(SAME[0].upper() + SAME[1:], gain, PLAIN)]
        return [f"{text}." for text in [*told, *([_by_m(found, SAME)] if found else [])]]
    text = f"{SAME[0].upper()}{SAME[1:]} has not been run on test images yet."
    plain, large = best(cell, "batch", 128, phase=False), held(cell, "batch", 128)
    if plain is None or large is None:
        return [text]
    more = large - plain.first
    text += f" On held-out images it gained {more:.1f} points from these filters (seed 0)"
    above = any(each.above for each in differences(cell).values())
    text += ", so part of the difference comes from the filters." if above else "."
    bkn = [f"{each:.1f} % at m = {m}" for m in RECIPE if (each := held(cell, "kalman", m)) is not None]
    if bkn:
        text += f" It had {large:.1f} % there, and BKN with these filters had {' and '.join(bkn)}."
    return [said(text, more > 0)]


GROUPS = replace(RECIPE[2], kind="ghost", fade=0.0)
"""Batch norm on groups of 2, with the filters and the phase of the recipe."""
GROUPED = "batch norm on groups"


def others(cell: str, m: int) -> dict[str, Difference]:
    """Other norms on groups minus BKN by the recipe, on test images, as far as they were run."""
    forms = {"Moving Average Batch Norm": Form(kind="moving", m=m), **({GROUPED: GROUPS} if m == GROUPS.m else {})}
    found = {name: against(with_form(cell, form), with_form(cell, RECIPE[m])) for name, form in forms.items()}
    return {name: each for name, each in found.items() if each is not None}


def gains(cell: str) -> list[str]:
    """What a gain from 0.1 does, at every m that was run with it."""
    found = {m: against(with_form(cell, GENTLE[m]), with_form(cell, USUAL_GAIN[m])) for m in GENTLE}
    words = "BKN at m = {m} with a gain from 0.1"
    told = [compared(words.format(m=m), each, "the same with 0.5") + "." for m, each in found.items() if each]
    told += [changed_gain()] if cell == FAILED and changed_gain() else []
    return [" ".join(told)] if told else []


def same_groups(cell: str, where: str = "") -> list[str]:
    """The simpler method with the same filters and the same phase. `where` names the cell."""
    words = f"Batch norm on groups of 2 with the same filters and the same phase{where}"
    own = with_form(cell, GROUPS)
    if own is not None:
        found = against(own, with_form(cell, RECIPE[2]))
        told = compared(words, found, "BKN at m = 2") if found else f"{words} diverged" if own.diverged else ""
        return [f"{told}."] if told else []
    text = f"{words} has not been run on test images yet."
    groups, bkn = held(cell, "ghost", 2), held(cell, "kalman", 2)
    if groups is not None and bkn is not None:
        text += (
            f" On held-out images groups of 2 had {groups:.1f} % with these filters, and BKN at m = 2 had {bkn:.1f} % "
            "(seed 0, each at its best phase)."
        )
    return [text]


OF_MOVING = "Its filters are centred. Its learning rate and weight decay are BKN's, and were not chosen for it."


def moving(cell: str) -> list[str]:
    """Moving Average Batch Norm beside BKN at the same m, where it was run."""
    name = "Moving Average Batch Norm"
    found = {m: others(cell, m)[name] for m in RECIPE if name in others(cell, m)}
    told = [compared(f"{name} at m = {m}", each, f"BKN at m = {m}") + "." for m, each in found.items()]
    return told and [f"{' '.join(told)} {OF_MOVING}"]


# The recipe on all data sets


def data_sets(own: list[str]) -> str:
    return "one data set" if len(own) == 1 else f"{len(own)} data sets"


def overview(shown: list[str], *, short: bool = False) -> list[str]:
    """A small table: a column for each cell. Larger groups are left out until they were run.

    `short`: without forms that were given up or not run.
    """
    control = "batch norm on groups of {m}, by the recipe"
    forms = {"batch norm at 128": Form(kind="batch"), "batch norm at 128, standardized filters": STANDARDIZED}
    forms |= {f"**BKN by the recipe, m = {m}**": form for m, form in RECIPE.items()}
    forms |= {"BKN by the first recipe, m = 1 (gain from 0.5)": USUAL_GAIN[1], control.format(m=2): GROUPS}
    ran = {m: form for m, form in CONTROLS.items() if m == 1 or any(with_form(cell, form) for cell in shown)}
    forms |= {control.format(m=m): form for m, form in ran.items()}
    forms |= {f"Moving Average Batch Norm, m = {m}": Form(kind="moving", m=m) for m in RECIPE}
    lines = [[words, *(_overview(cell, form) for cell in shown)] for words, form in forms.items()]
    if short:
        lines = [line for line in lines if "first recipe" not in line[0] and set(line[1:]) != {"not run"}]
    return markdown(["", *(NAMES[cell] for cell in shown)], lines, 1)


def _overview(cell: str, form: Form) -> str:
    """Says the number of seeds where the base has more."""
    score, base = with_form(cell, form), batch_norm(cell, "plain")
    if score is None:
        return "not run"
    if score.diverged or base is None:
        return "diverged" if score.diverged else f"{mean(score.accuracies()):.1f}"
    seeds = len(score.accuracies())
    notes = [_cell(score, base), f"{seeds} seeds" if seeds < len(base.accuracies()) else ""]
    told = "; ".join(note for note in notes if note)
    return f"{mean(score.accuracies()):.1f}" + (f" ({told})" if told else "")


def comparisons() -> str:
    """BKN by the recipe minus other norms, on all cells, as a table. Empty without runs."""
    found: dict[str, dict[str, Difference]] = {}
    for cell in cells(test=True):
        for filters, words in (("plain", "plain"), ("standardized", "standardized")):
            for m, each in differences(cell, filters).items():  # type: ignore[arg-type]
                found.setdefault(f"m = {m}, minus batch norm at 128, {words} filters", {})[cell] = each
        grouped = others(cell, 2).get(GROUPED)
        if grouped is not None:
            words = "m = 2, minus batch norm on groups of 2, by the recipe"
            found.setdefault(words, {})[cell] = Difference(-grouped.points, grouped.half)
    if not found:
        return ""
    known = [cell for cell in cells(test=True) if any(cell in row for row in found.values())]
    rows = [
        [words, *(row[cell].shown(2) if cell in row else ABSENT for cell in known)]
        for words, row in sorted(found.items(), key=lambda each: each[0][:5], reverse=True)
    ]
    return "\n".join(markdown(["BKN by the recipe, points", *(SHORT[cell] for cell in known)], rows, 1)) + "\n"


def beside_others() -> list[str]:
    """The differences of `comparisons` to norms of the same filters, as sentences."""
    shown = cells(test=True)
    same = {cell: differences(cell, "standardized") for cell in shown}
    told = [
        f"{listed({cell: same[cell][m] for cell in shown})} points at m = {m}"
        for m in RECIPE
        if all(m in own for own in same.values())
    ]
    grouped = {cell: others(cell, 2).get(GROUPED) for cell in shown}
    known = {cell: Difference(-each.points, each.half) for cell, each in grouped.items() if each is not None}
    sentences = []
    if told:
        sentences.append(
            f"Against batch norm at 128 with the same filters, BKN by the recipe has {', and '.join(told)}."
        )
    if known:
        sentences.append(f"Against batch norm on groups of 2 by the recipe it has {listed(known)} points.")
    return sentences


def listed(found: dict[str, Difference]) -> str:
    """Differences of cells, without the cells that have none."""
    return ", ".join(f"{each.shown(2)} ({SHORT[cell]})" for cell, each in found.items())


def larger_groups() -> list[list[str]]:
    """Lines of the table of advice: batch norm on larger groups by the recipe, beside batch norm at 128."""
    lines = []
    for m in (4, 8):
        scores = {cell: with_form(cell, CONTROLS[m]) for cell in cells(test=True)}
        found = {
            cell: each
            for cell, score in scores.items()
            if (each := against(score, batch_norm(cell, "standardized"))) is not None
        }
        if found:
            least = min(len(score.accuracies()) for score in scores.values() if score is not None)
            told = (
                f"batch norm on groups, with the filters and the phase of the recipe, against batch norm at 128 with "
                f"the same filters: {listed(found)} points, {least} seeds"
            )
            below = any(each.below for each in found.values())
            use = "larger groups, or SyncBatchNorm" if below else "batch norm on groups by [the recipe](recipe.md)"
            lines.append([str(m), "the nets of the recipe, test", told, f"{use}; BKN was not run"])
    return lines


def without_prior() -> list[str]:
    """On which cells batch norm on groups of 2 was not run by the recipe."""
    left = [cell for cell in cells(test=True) if with_form(cell, GROUPS) is None]
    return [text for cell in left for text in same_groups(cell, f" on {SHORT[cell]}")]


def changed_gain() -> str:
    """That the recipe was changed after a score on test images. Empty: what it says is not in the records."""
    first, now = (against(with_form(FAILED, form), batch_norm(FAILED, "plain")) for form in (USUAL_GAIN[1], GENTLE[1]))
    if first is None or now is None or not first.below or now.below:
        return ""
    return (
        f"At m = 1 the recipe first had a gain from 0.5. It was {first.size(2)} points below batch norm at 128 on the "
        f"test images of {SHORT[FAILED]}. Then a gain from 0.1 was chosen on held-out images, and scored on the same "
        f"test images. So the figure of {SHORT[FAILED]} at m = 1 is not an independent confirmation."
    )


def missing() -> list[str]:
    """What the rounds lack, by cell."""
    done = {row["key"] for score in all_scores() for row in score.rows.values()}
    return [text for name in CONFIRMING for text in _missing(name, done)]


def _missing(name: str, done: set[str]) -> list[str]:
    runs = ROUNDS[name]
    own_cells = dict.fromkeys(run.cell for run in runs)
    counts = {cell: [run.key not in done for run in runs if run.cell == cell] for cell in own_cells}
    told = ", ".join(f"{NAMES[cell]} {sum(own)} of {len(own)}" for cell, own in counts.items() if any(own))
    total = sum(sum(own) for own in counts.values())
    return [f"Computed filters on test images: {total} of {len(runs)} runs of `{name}` ({told})."] if total else []


# The recipe


def recipe_table() -> str:
    """What was measured with the recipe of docs/recipe.md, for that page."""
    own = [cell for cell in cells(test=True) if differences(cell)]
    if not own:
        return not_yet(ROUND)
    return paragraph(f"Measured on {data_sets(own)}.") + "\n" + "\n".join(_recipe(cell) for cell in own)


def _recipe(cell: str) -> str:
    plain, same = batch_norm(cell, "plain"), batch_norm(cell, "standardized")
    found = {PLAIN: plain, SAME: same}
    found |= {f"BKN by this recipe, m = {m}": with_form(cell, form) for m, form in RECIPE.items()}
    lines = []
    for words, score in found.items():
        if score is not None and score.diverged:
            lines.append([words, "0", "diverged", "", *([""] if same is not None else [])])
        elif score is not None:
            line = [words, str(len(score.accuracies())), spread(score.accuracies()), _cell(score, plain)]
            lines.append([*line, _cell(score, same) if score is not plain else ""] if same is not None else line)
    headings = [f"{SHORT[cell]}, test accuracy, %", "n", "population", f"difference to {PLAIN}"]
    headings += [f"difference to {SAME}"] if same is not None else []
    shown = [score for score in found.values() if score is not None]
    text = paragraph(
        f"{NAMES[cell]}: {CELLS[cell].epochs} epochs, {BATCH} images per optimizer step in groups of m, "
        f"learning rate {shown[-1].setting.rate:g}, weight decay {power(shown[-1].setting.decay)}, "
        f"{shown[-1].setting.images:,} test images."
    )
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n"
    text += origin_of([row for score in shown for row in score.rows.values()], [cell]) + "\n"
    return text + bullets([*same_filters(cell), *gains(cell), *same_groups(cell), *moving(cell)])
