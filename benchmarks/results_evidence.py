"""The tables of docs/results.md from the rounds of trials/evidence.py, and what of them has no record yet."""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from measured import ABSENT, ROOT, markdown
from results_words import (
    Difference,
    Row,
    Scores,
    bullets,
    compared,
    difference,
    mean,
    origin,
    paragraph,
    said,
    spread,
    standard_error,
)

sys.path.append(str(ROOT))
from results_trials import NAMES, SHORT, origin_of

from trials import chosen, evidence, table
from trials.cells import CELLS
from trials.chosen import LABELS, Point
from trials.evidence import ABLATIONS, DIGIT_SIZES, EVIDENCE, PAPER, RACED, SINGLE, VIRTUAL, methods
from trials.forms import Form
from trials.table import Score

SIGMA = "docs/figures/records/sigma.csv"
QUESTIONS = {
    "sizes": "accuracy against m",
    "rates": "three learning rates for every method at m = 2 and 1",
    "seeds": "two more seeds at m = 2 and 1",
    "ablations": "ablations",
    "ablations-digits": "ablations on digits",
    "settings": "the paper's ImageNet settings on Tiny-ImageNet",
    "table3": "the paper's CIFAR table, 30 epochs and 3 seeds",
}
MODES = ("population", "batch", "example", "recalibrated")
SAME_M = "batch norm with the same groups"
AUTHORS = {"batch norm": 8.7, "group norm": 8.5, "BKN": 7.6}
"""Final errors in % of ResNet-32 on the validation images of CIFAR-10, as the authors' code reports them."""


@cache
def rows() -> tuple[Row, ...]:
    return tuple(chosen.evidence())


def ran() -> list[Row]:
    """The records without those of failed runs."""
    return [row for row in rows() if "failed" not in row]


def round_rows(name: str) -> list[Row]:
    return [row for row in ran() if row["round"] == name]


def recipe_ran() -> bool:
    """Whether there is a run of the recipe as `convert` builds it."""
    return any((row["form"]["kind"], row["form"].get("filters")) == ("kalman", "scaled") for row in ran())


def phase_at_128_ran() -> bool:
    """Whether there is a run of batch norm at 128 with standardized filters and a closing phase."""
    forms = (row["form"] for row in ran() if row["form"]["kind"] == "ghost" and row["form"]["m"] == 128)
    return any(form["closing"] and form.get("filters") == "scaled" for form in forms)


def any_score(cell: str = "", kind: str = "", m: int = 0) -> bool:
    """Whether a run of these rounds has this cell, kind of norm and m."""
    return any(
        cell in row["cell"] and kind in ("", row["form"]["kind"]) and m in (0, row["form"]["m"]) for row in ran()
    )


def not_yet(*names: str) -> str:
    """The sentence for a section without records."""
    told = " and ".join(f"`python -m trials --round {name}`" for name in names)
    return paragraph(f"No run has a record yet. To run them: {told}.")


def missing() -> list[str]:
    """What these rounds lack, one line each."""
    lines = []
    for name, question in QUESTIONS.items():
        found = chosen.missing(name, rows())
        count, total = (sum(pair[part] for pair in found.values()) for part in (0, 1))
        if count:
            cells = ", ".join(f"{NAMES[cell]} {some} of {all_}" for cell, (some, all_) in found.items())
            whole = f"{question[0].upper()}{question[1:]} (round `{name}`): {count} of {len(EVIDENCE[name])} runs"
            lines.append(f"{whole}{'' if total == count == len(EVIDENCE[name]) else f' ({cells})'}.")
    return [*lines, *(f"Failed: `{key}`." for key in chosen.failed(rows()))]


# Accuracy against m


def against_m() -> str:
    cells = chosen.cells(rows())
    return "\n".join(_against_m(cell) for cell in cells) if cells else not_yet("sizes")


def _against_m(cell: str) -> str:
    found = chosen.points(cell, rows())
    sizes = sorted({m for name, m in found if name not in SINGLE}, reverse=True)
    lines = []
    for way in ("population", "chosen"):
        for name, label in LABELS.items():
            own = [found.get((name, 1 if name in SINGLE else m), ABSENT) for m in sizes]
            if name in SINGLE:
                own = own[:1] * len(sizes[:1]) + [""] * (len(sizes) - 1)  # it has no m
            several = any(isinstance(each, Point) and len(each.ways) > 1 for each in own)
            ran = any(each is None or isinstance(each, Point) for each in own)
            if several or (ran and way == "population"):
                lines.append([way, label, *(_shown(each, way) for each in own)])
    used = [point for point in found.values() if point is not None]
    records = [row for point in used for row in point.score.rows.values()]
    images = table.TEST[CELLS[cell].images]
    rates = sorted({point.score.setting.rate for point in used})
    several = any(point.tried > 1 for point in used)
    setting = ": each method has the best on held-out images" if several else ", the same for every method"
    text = paragraph(
        f"{NAMES[cell]}, {CELLS[cell].epochs} epochs of nine tenths of the training images, scored on {images:,} test "
        f"images. Weight decay {_list(sorted({point.score.setting.decay for point in used}))}, learning rate "
        f"{_list(rates)}{setting}. A closing phase is from 30 to "
        "60 % of the training for BKN, and from 5 to 35 % for batch norm. Both group norms have a warm-up of 7 %."
    )
    headings = ["inference", f"{SHORT[cell]}, test accuracy, % (n)", *(f"m = {m}" for m in sizes)]
    text += "\n" + "\n".join(markdown(headings, lines, 2)) + "\n\n" + origin_of(records, [cell]) + "\n"
    lines_below = [told for m in sizes if (told := _best(found, m, images))]
    if cell == "cifar10-resnet32":
        told = ", ".join(f"{name} {error:.1f} %" for name, error in AUTHORS.items())
        lines_below.append(
            "[The authors' code](errata.md) reports these errors of this network at (128, 2), after a longer schedule: "
            f"{told}. Its BKN has a constant gain and no learned matrix."
        )
    return text + bullets(lines_below)


def beside_groups() -> list[list[str]]:
    """Lines: m, net and images, BKN and batch norm on the same groups, without and with a closing phase, advice."""
    found = {cell: chosen.points(cell, rows()) for cell in chosen.cells(rows())}
    made = (_beside_groups(cell, found[cell], m) for m in (32, 8, 4, 2, 1) for cell in found)
    return [line for line in made if line is not None]


def _beside_groups(cell: str, found: dict[tuple[str, int], Point | None], m: int) -> list[str] | None:
    """Each norm with or without a phase, as held-out images choose. A training that diverged is not chosen."""
    norms = ("BKN", "BKN, closing phase"), ("groups", "groups, closing phase")
    if not all((name, m) in found for names in norms for name in names):
        return None
    told, best = [], list[tuple[str, float]]()
    for names in norms:
        points = {name: found[name, m] for name in names}
        told += ["diverged" if each is None else f"{mean(each.tested()):.1f}" for each in points.values()]
        held = {name: mean(point.score.accuracies()) for name, point in points.items() if point is not None}
        if not held:
            return None
        first = max(held, key=held.__getitem__)
        point = points[first]
        assert point is not None
        best.append((first, mean(point.tested())))
    images = table.TEST[CELLS[cell].images]
    error = sum(standard_error(score, images) ** 2 for _, score in best) ** 0.5
    ahead = best[0][1] - best[1][1]
    phase = ", with a closing phase"
    if ahead > 2 * error:
        use = "BKN" + phase * ("phase" in best[0][0])
    else:
        use = "batch norm on groups" + phase * ("phase" in best[1][0]) + ", which is simpler" * (ahead > -2 * error)
    return [str(m), NAMES[cell], *told, use]


def _shown(point: Point | None | str, way: str) -> str:
    if point is None:
        return "diverged"
    if isinstance(point, str):
        return point
    mode = point.way if way == "chosen" else way
    by_seed = point.tested(mode)
    return f"{spread(by_seed)} ({len(by_seed)})" + (f", {mode}" if way == "chosen" else "")


def _list(values: Iterable[float]) -> str:
    return " or ".join(f"{value:g}" for value in values)


def _best(found: dict[tuple[str, int], Point | None], m: int, images: int) -> str:
    """The best method at m, and those that cannot be told from it. Empty without a run of BKN at m."""
    if not any("BKN" in LABELS[name] and size == m for name, size in found):
        return ""
    own = {name: point for (name, size), point in found.items() if point is not None and (size == m or name in SINGLE)}
    scores = {name: mean(point.tested(point.way)) for name, point in own.items()}
    first = max(scores, key=scores.__getitem__)
    near = [
        LABELS[name]
        for name in scores
        if name != first
        and scores[first] - scores[name]
        <= 2 * (standard_error(scores[first], images) ** 2 + standard_error(scores[name], images) ** 2) ** 0.5
    ]
    told = f"Within two standard errors of it: {'; '.join(near)}" if near else "No other is within two standard errors"
    most = f"{LABELS[first]} has the most: {scores[first]:.1f} %"
    counts = {len(point.tested(point.way)) for point in own.values()}
    seeds = "one seed each" if counts == {1} else f"{min(counts)} to {max(counts)} seeds"
    return f"At m = {m}, in the way of inference that was chosen, {most} ({seeds}). {told}."


# Ablations


def scores_of(name: str) -> dict[Form, Score]:
    """The runs of a round, by form. They have one setting each."""
    return {score.setting.form: score for score in table.scores(round_rows(name))}


def ablations() -> str:
    found = scores_of("ablations")
    if not found:
        return not_yet("ablations")
    lines, widths = [], []
    for label, form in ABLATIONS.items():
        score = found.get(form)
        if score is None or score.diverged:
            lines.append([label, ABSENT if score is None else "diverged", *[""] * (len(MODES) + 1)])
            continue
        cells = [_spread(score.accuracies(mode, "tested")) for mode in MODES]
        own, change = score.accuracies("population", "tested"), _change(found, ABLATIONS, label, "tested")
        against = change.shown() if change else ""
        lines.append([label, str(len(own)), *cells, against])
        if form in (methods(2)["BKN"], methods(2)["BKN learned"], methods(2)["groups"]):
            sizes = sorted((2, *VIRTUAL))
            modes = ["example" if size == 2 else f"example {size}" for size in sizes]
            widths.append([label, *(_spread(score.accuracies(mode, "tested")) for mode in modes), cells[0]])
    records = [row for score in found.values() for row in score.rows.values()]
    headings = ["CIFAR-10, m = 2, test accuracy, %", "n", *MODES, "population, difference to the first row of its name"]
    text = "\n".join(markdown(headings, lines, 1)) + "\n\n"
    if widths:
        text += paragraph(
            "`example` inference gives an image the weight 1/k in a virtual group of k, and k is m unless it is set:"
        )
        shown = [f"k = {size}" for size in sorted((2, *VIRTUAL))]
        text += "\n" + "\n".join(markdown(["`example`, test accuracy, %", *shown, "population"], widths, 1)) + "\n\n"
    return text + origin_of(records, ["cifar10"])


def ablations_on_digits() -> str:
    found = scores_of("ablations-digits")
    if not found:
        return not_yet("ablations-digits")
    lines = []
    for label in ABLATIONS:
        parts = [_ablated(found, evidence.ablations(m), label) for m in DIGIT_SIZES]
        lines.append([label, *(cell for part in parts for cell in part)])
    records = [row for score in found.values() for row in score.rows.values()]
    headings = ["digits, test accuracy, % (n)"]
    headings += [f"m = {m}, {column}" for m in DIGIT_SIZES for column in ("population", "example", "difference")]
    text = "\n".join(markdown(headings, lines, 1)) + "\n\n"
    return text + origin_of(records, ["digits"]) + "\n" + bullets(_of_digits(found))


def _ablated(found: dict[Form, Score], forms: dict[str, Form], label: str) -> list[str]:
    """Accuracies in population and example inference, and the first's difference to the row that the label begins with.

    Of runs that diverged, only their number is told.
    """
    score, against = found.get(forms[label]), _change(found, forms, label)
    if score is None or score.diverged:
        return [ABSENT if score is None else "diverged", "", ""]
    own = score.accuracies()
    lost = len(score.rows) - len(own)
    count = f"({len(own)}; {lost} diverged)" if lost else f"({len(own)})"
    return [f"{_spread(own)} {count}", _spread(score.accuracies("example")), against.shown() if against else ""]


def _change(found: dict[Form, Score], forms: dict[str, Form], label: str, images: str = "") -> Difference | None:
    """To the row that the label begins with, on these images. None: it is that row, or one is missing or diverged."""
    name = label.split(", ")[0]
    score, base = found.get(forms[label]), found.get(forms[name])
    if label == name or score is None or base is None:
        return None
    own, others = (each.accuracies("population", images) for each in (score, base))
    return difference(own, others) if set(own) & set(others) else None


def _of_digits(found: dict[Form, Score]) -> list[str]:
    """What the prior and its transition do, and which changes can be told apart, at each m."""
    told, count, apart = [], 0, 0
    for m in DIGIT_SIZES:
        forms = evidence.ablations(m)
        own = {label: score.accuracies() for label, form in forms.items() if (score := found.get(form))}
        for label, base, words in (("BKN", "batch norm", SAME_M), ("BKN", "BKN learned", "BKN learned")):
            if set(own.get(label, {})) & set(own.get(base, {})):
                change = difference(own[label], own[base])
                told.append(f"In `population` inference {compared(f'{label} at m = {m}', change, words)}.")
        changes = {label: change for label in forms if (change := _change(found, forms, label))}
        clear = [f"{label} ({change.shown(2)})" for label, change in changes.items() if change.above or change.below]
        count, apart = count + len(changes), apart + len(clear)
        verb = (
            f"{len(clear)} have an interval without 0: {'; '.join(clear)}"
            if clear
            else "none has an interval without 0"
        )
        told.append(f"Of {len(changes)} changes at m = {m}, {verb}.")
    by_chance = count / 20
    more = " So small differences may be chance." if apart < 4 * by_chance else ""
    return [*told, f"Of {count} intervals, about {by_chance:.0f} would leave out 0 by chance, and {apart} do.{more}"]


def _spread(by_seed: Scores) -> str:
    return spread(by_seed) if by_seed else ABSENT


# The paper's ImageNet settings


def settings() -> str:
    found = {(score.setting.batch, score.setting.form.m, _name(score)): score for score in _raced()}
    if not found:
        return not_yet("settings")
    lines = []
    for batch, m in PAPER:
        base = found.get((batch, m, "groups"))
        target = None if base is None else _highest(base)
        for name in RACED:
            score = found.get((batch, m, name))
            if score is None:
                continue
            cells = [_spread(score.accuracies(mode, "tested")) for mode in ("population", "batch", "example")]
            steps = _reached(score, target)
            lines.append(
                [f"({batch}, {m})", str(score.setting.epochs), LABELS[name], str(len(score.rows)), *cells, steps]
            )
    records = [row for score in found.values() for row in score.rows.values()]
    headings = ["setting", "epochs", "test accuracy, %", "n", "population", "batch", "example"]
    headings += ["steps to the best accuracy of batch norm there"]
    return "\n".join(markdown(headings, lines, 3)) + "\n\n" + origin_of(records, ["tiny100-inception"])


def fewer_steps() -> str:
    """The paper's claim about the steps at (256, 32)."""
    found = {_name(score): score for score in _raced() if (score.setting.batch, score.setting.form.m) == PAPER[0]}
    if not {"groups", "BKN learned", "BKN"} <= set(found):
        return "*BKN needs fewer steps* was not measured here."
    target = _highest(found["groups"])
    steps = {name: _reached(found[name], target) for name in ("groups", "BKN learned", "BKN")}
    return (
        "*BKN needs fewer steps* (the paper: 100,000 instead of 170,000 at (256, 32)). On the stand-in the best "
        f"accuracy of batch norm on held-out images is {target:.1f} %. Steps to it: batch norm {steps['groups']}, "
        f"BKN learned {steps['BKN learned']}, BKN {steps['BKN']} (one seed, 20 evaluations)."
    )


def _raced() -> list[Score]:
    return table.scores(round_rows("settings"))


def _name(score: Score) -> str:
    form = score.setting.form
    plain = Form(**{**vars(form), "momentum": None})
    return next(name for name in RACED if methods(form.m)[name] == plain)


def _curve(score: Score) -> list[tuple[int, float]]:
    row = score.rows[min(score.rows)]
    return [(int(step), float(accuracy)) for step, accuracy in row.get("reached", [])]


def _highest(score: Score) -> float | None:
    return max((accuracy for _, accuracy in _curve(score)), default=None)


def _reached(score: Score, target: float | None) -> str:
    if target is None or not _curve(score):
        return ABSENT
    step = next((step for step, accuracy in _curve(score) if accuracy >= target), None)
    return "not reached" if step is None else f"{step:,} of {_curve(score)[-1][0]:,}"


def diverged(kind: str, close: tuple[float, float]) -> tuple[int, int]:
    """Of the runs of a norm with plain filters and this closing phase: how many diverged, and how many there are."""
    own = [row for name in ("sizes", "table3") for row in round_rows(name)]
    own = [row for row in own if row["form"]["kind"] == kind and row["form"]["closing"]]
    own = [row for row in own if row["form"].get("filters", "plain") == "plain"]
    own = [row for row in own if tuple(row["form"]["close"]) == close]
    return sum(row["loss"] is None for row in own), len(own)


def tested(cell: str) -> dict[tuple[str, int], float]:
    """Mean accuracies in `population` inference on test images, by method and m."""
    points = chosen.points(cell, rows())
    return {key: mean(point.tested("population")) for key, point in points.items() if point is not None}


def near(cell: str, m: int) -> bool:
    """Whether BKN and groups, both with plain filters and a closing phase, are within two standard errors."""
    found = tested(cell)
    both = [found[f"{norm}, closing phase", m] for norm in ("BKN", "groups")]
    error = sum(standard_error(each, table.TEST[CELLS[cell].images]) ** 2 for each in both) ** 0.5
    return abs(both[0] - both[1]) <= 2 * error


def at_32(cell: str) -> float:
    """BKN learned minus batch norm at m = 32 in `population` inference, in points."""
    found = tested(cell)
    return found["BKN learned", 32] - found["groups", 32]


# The error of σ


def sigma_rows() -> list[dict[str, str]]:
    with Path(ROOT, SIGMA).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sigma_of(method: str, m: int, figure: str) -> float:
    """In %: root mean square over the layers that have a prior. The average of layers, for the signed bias."""
    own = [
        float(row[figure])
        for row in sigma_rows()
        if (row["method"], int(row["statistics_batch"])) == (method, m) and int(row["layer"]) > 1
    ]
    if figure == "bias":
        return 100 * statistics.fmean(own)
    return 100 * statistics.fmean(value**2 for value in own) ** 0.5


def sigma() -> str:
    """The error of σ against that of a large batch."""
    found = sigma_rows()
    sizes = sorted({int(row["statistics_batch"]) for row in found}, reverse=True)
    names = {"BN": "batch norm", "BKN learned": "BKN learned", "BKN weights": "BKN"}
    words = {"rms": "error", "bias": "mean error", "spread": "spread over groups"}
    lines = [
        [what, label, *(f"{sigma_of(method, m, figure):.1f}".replace("-", "−") for m in sizes)]
        for figure, what in words.items()
        for method, label in names.items()
    ]
    first = found[0]
    text = (
        "\n".join(markdown([f"of σ, in %, n = {first['seeds']}", "method", *(f"m = {m}" for m in sizes)], lines, 2))
        + "\n\n"
    )
    text += origin([{**first}], SIGMA) + "\n"
    two = {name: sigma_of(name, 2, "rms") for name in names}
    spreads = {name: sigma_of(name, 2, "spread") for name in names}
    return text + bullets(
        [
            said(
                f"At m = 2 the σ of BKN is off by {two['BKN weights']:.0f} %, that of batch norm by {two['BN']:.0f} %. "
                "At every m the error of BKN is the larger one. It is a bias: the prior is too small.",
                all(sigma_of("BKN weights", m, "rms") > sigma_of("BN", m, "rms") for m in sizes),
                sigma_of("BKN weights", 2, "bias") < -0.8 * two["BKN weights"],
            ),
            said(
                f"From group to group σ varies by {spreads['BN']:.0f} % with batch norm and by "
                f"{spreads['BKN weights']:.0f} % with BKN, at m = 2. A factor that is the same in all groups can be "
                "undone by γ, and one that varies cannot.",
                spreads["BKN weights"] < 0.6 * spreads["BN"],
            ),
        ]
    )
