"""The tables of docs/results.md from the trials: confirmed on test images, chosen on held-out images, tried."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from measured import ABSENT, ROOT, markdown
from results_words import Difference, Row, bullets, difference, paragraph, said, signed, spread, standard_error

sys.path.append(str(ROOT))
from trials import table
from trials.cells import CELLS
from trials.chosen import SMALL
from trials.evidence import EVIDENCE
from trials.forms import Form
from trials.rounds import ROUNDS
from trials.table import Score, Setting, described

NAMES = {
    "tiny100": "ResNet-18 on 100 classes of Tiny-ImageNet",
    "cifar10": "CIFAR Inception on CIFAR-10",
    "cifar100": "CIFAR Inception on CIFAR-100",
    "cifar10-resnet32": "ResNet-32 on CIFAR-10",
    "cifar10-wide": "wide CIFAR Inception on CIFAR-10",
    "cifar100-wide": "wide CIFAR Inception on CIFAR-100",
    "tiny100-inception": "BN-Inception on 100 classes of Tiny-ImageNet",
    "digits": "digits-net on digits",
}
SHORT = {"tiny100": "Tiny-ImageNet", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
SHORT |= {"cifar10-resnet32": "ResNet-32, CIFAR-10", "tiny100-inception": "BN-Inception, Tiny-ImageNet"}


@cache
def all_scores() -> tuple[Score, ...]:
    """Of the rounds that choose. `results_evidence.py` and `results_small.py` have the others."""
    return tuple(table.scores(row for row in table.records() if row["round"] not in {*EVIDENCE, *SMALL}))


def cells(*, test: bool = False) -> list[str]:
    """Those with a record on held-out images, or on test images, in the order of the page."""
    found = {score.setting.cell for score in all_scores()}
    if found - set(NAMES):
        sys.exit(f"give these cells a name for docs/results.md, in {Path(__file__).name}: {sorted(found - set(NAMES))}")
    scored = {score.setting.cell for score in all_scores() if score.setting.test == test}
    return [cell for cell in NAMES if cell in scored]


def with_plain_filters() -> list[str]:
    """Cells where forms with plain filters were tried on held-out images."""
    return [cell for cell in cells() if any(not computed(score.setting.form) for score in held_out(cell))]


def held_out(cell: str) -> list[Score]:
    """Settings of the usual length that were scored on held-out images."""
    own = (score for score in all_scores() if score.setting.cell == cell and not score.setting.test)
    return [score for score in own if score.setting.epochs == CELLS[cell].epochs]


USUAL = 0.1, 5e-4
"""Learning rate and weight decay of most runs."""


def at(cell: str, form: Form, rate: float = USUAL[0], decay: float = USUAL[1]) -> float:
    """The held-out accuracy of one setting, that of its lowest seed. A diverged run has 0."""
    setting = Setting(cell, form, rate, decay, CELLS[cell].epochs)
    found = [score for score in held_out(cell) if score.setting == setting]
    if not found:
        sys.exit(f"docs/results.md speaks of a trial that has no record: {setting}")
    return found[0].first


def is_plain(form: Form) -> bool:
    """Nothing but a norm, with or without a closing phase up to λ = 1."""
    usual = Form(kind=form.kind, m=form.m, real=form.real)
    return form == replace(usual, closing=form.closing, close=form.close, means=form.means)


def best(
    cell: str, kind: str, m: int, *, phase: bool, accept: Callable[[Setting], bool] = lambda _: True
) -> Score | None:
    """The best setting of a plain norm on held-out images."""

    def right(form: Form) -> bool:
        return (form.kind, form.m, form.closing) == (kind, m, phase) and is_plain(form)

    return table.best(score for score in held_out(cell) if right(score.setting.form) and accept(score.setting))


# Confirmed on test images


def computed(form: Form) -> bool:
    """Whether filters are computed from the weights. Moving Average Batch Norm centres them."""
    return form.filters != "plain" or form.kind in ("moving", "standardized")


def on_test_images(cell: str, *, filters: bool) -> list[Score]:
    """Settings with computed filters, or with plain ones. `results_filters.py` has the former."""
    found = [score for score in all_scores() if score.setting.cell == cell and score.setting.test]
    return [score for score in found if computed(score.setting.form) == filters]


def confirmed(cell: str) -> list[Score]:
    """With plain filters. Batch norm alone confirms nothing: there it is what computed filters are compared with."""
    found = on_test_images(cell, filters=False)
    return found if any(score.setting.form.kind != "batch" for score in found) else []


def tested(cell: str, kind: str, m: int, *, phase: bool) -> dict[int, float]:
    """Accuracies on test images, by seed."""
    found = [score for score in confirmed(cell) if _kind(score) == (kind, m, phase)]
    if len(found) != 1:
        sys.exit(f"docs/results.md speaks of one confirmed setting, and there are {len(found)}: {cell} {kind} m = {m}")
    return found[0].accuracies()


def confirmed_difference(m: int) -> Difference:
    """BKN with a closing phase minus batch norm at 128, on the test images of Tiny-ImageNet."""
    return difference(tested("tiny100", "kalman", m, phase=True), tested("tiny100", "batch", 128, phase=False))


def confirm_table() -> str:
    return "\n".join(_confirmed(cell) for cell in cells(test=True) if confirmed(cell))


def _confirmed(cell: str) -> str:
    found = confirmed(cell)
    base = tested(cell, "batch", 128, phase=False)
    lines = []
    for score in found:
        by_seed = score.accuracies()
        shown = " ".join(f"{each:.1f}" for each in by_seed.values())
        against = "" if score.setting.form.kind == "batch" else difference(by_seed, base).shown(2)
        mean = sum(by_seed.values()) / len(by_seed)
        lines.append(
            [described(score.setting.form), optimizer_of(score), str(len(by_seed)), shown, f"{mean:.2f}", against]
        )
    headings = [
        f"{SHORT[cell]}, test accuracy, %",
        "setting",
        "n",
        "by seed",
        "mean",
        "difference to batch norm at 128",
    ]
    rows = [row for score in found for row in score.rows.values()]
    images = found[0].setting.images
    text = paragraph(
        f"{NAMES[cell]}, {CELLS[cell].epochs} epochs, trained on all training images, scored on {images:,} test images."
    )
    text += "\n" + "\n".join(markdown(headings, lines, 2)) + "\n\n" + origin_of(rows, [cell]) + "\n"
    return text + bullets(_confirm_sentences(cell))


def _confirm_sentences(cell: str) -> list[str]:
    if cell != "tiny100":
        return []
    two, one = confirmed_difference(2), confirmed_difference(1)
    without = at(cell, Form(kind="kalman", m=2)) - at(cell, Form(kind="batch"))
    return [
        said(
            f"BKN with a closing phase is {two.size()} points below batch norm at 128 at m = 2, and {one.size()} "
            "points at m = 1. Both intervals exclude 0.",
            two.below and one.below,
        ),
        said(
            f"Without a closing phase BKN at m = 2 was {-without:.1f} points below batch norm at 128. This is one "
            "seed, on held-out images, at a weight decay of 5e-4, so do not compare it with the table.",
            without < 0,
        ),
    ]


def optimizer_of(score: Score) -> str:
    """Learning rate, weight decay, and a warm-up if there is one."""
    setting = score.setting
    warm = f", warm-up of {100 * setting.warmup:.0f} %" if setting.warmup else ""
    return f"rate {setting.rate:g}, decay {power(setting.decay)}{warm}"


def power(decay: float) -> str:
    return f"{decay:.0e}".replace("e-0", "e-")


def origin_of(rows: Sequence[Row], own: Iterable[str]) -> str:
    """Where the rows were measured. Each round has its own commits."""
    rounds: dict[str, dict[str, None]] = {}
    for row in rows:
        rounds.setdefault(row["round"], {})[row["commit"][:7]] = None
    machines = ", ".join(dict.fromkeys(row["hardware"] for row in rows))
    torches = ", ".join(dict.fromkeys(row["torch"].split("+")[0] for row in rows))
    own = list(own)
    named = {"ROUND"} if len(rounds) > 1 else set(rounds)
    commands = " and ".join(f"`python -m trials --round {name} --cell {cell}`" for name in named for cell in own)
    order = [name for name in ROUNDS if name in rounds]
    shown = [f"[{name}](../trials/records/{name}.jsonl) {', '.join(rounds[name])}" for name in order]
    return paragraph(f"{machines}; torch {torches}; {commands}; rounds, with their commits: {'; '.join(shown)}.")


# Chosen on held-out images

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("batch norm at 128", {"kind": "batch", "m": 128, "closing": False}),
    *(
        (
            f"batch norm on groups of {m}{', closing phase' if phase else ''}",
            {"kind": "ghost", "m": m, "closing": phase},
        )
        for phase in (False, True)
        for m in (4, 2, 1)
    ),
    ("BKN, m = 128", {"kind": "kalman", "m": 128, "closing": False}),
    ("BKN, m = 2", {"kind": "kalman", "m": 2, "closing": False}),
    *((f"BKN, m = {m}, closing phase", {"kind": "kalman", "m": m, "closing": True}) for m in (2, 1)),
    *((f"time filter, m = {m}", {"kind": "time", "m": m, "level": "time"}) for m in (2, 1)),
    *(
        (f"time filter mixed with the depth prior, m = {m}", {"kind": "time", "m": m, "level": "mixture"})
        for m in (2, 1)
    ),
]
OTHERS = ("renorm", "group", "standardized", "moving", "online")


def _matching(cell: str, wanted: dict[str, Any]) -> list[Score]:
    """Settings with these fields. Norms with λ below 1 or a prior that fades are ideas, not settings."""

    def right(form: Form) -> bool:
        usual = (form.kind == "time" or (form.top == 1 and not form.fade)) and form.filters == "plain"
        return usual and all(getattr(form, name) == value for name, value in wanted.items())

    return [score for score in held_out(cell) if right(score.setting.form)]


def chosen_table() -> str:
    return "\n".join(_chosen(cell) for cell in with_plain_filters())


def _chosen(cell: str) -> str:
    lines, rows = [], []
    wanted = list(ROWS)
    for kind in OTHERS:
        sizes = {score.setting.form.m for score in held_out(cell) if score.setting.form.kind == kind}
        wanted += [(table.KINDS[kind].format(m=m), {"kind": kind, "m": m}) for m in sorted(sizes, reverse=True)]
    for label, fields in wanted:
        found = _matching(cell, fields)
        top = table.best(found)
        if top is None:
            lines.append([label, "not run" if not found else "diverged", ABSENT, ABSENT, ABSENT, str(len(found))])
            continue
        by_seed = top.accuracies()
        shown = " ".join(f"{each:.1f}" for each in by_seed.values())
        rows += list(top.rows.values())
        lines.append([label, _words(top), str(len(by_seed)), shown, spread(by_seed), str(len(found))])
    error = standard_error(at(cell, Form(kind="batch")), table.HELD_OUT)
    text = paragraph(
        f"{NAMES[cell]}, {CELLS[cell].epochs} epochs, scored on {table.HELD_OUT:,} images that were held out of the "
        f"training images. One standard error of an accuracy is {error:.1f} points, from the number of images alone."
    )
    headings = [f"{SHORT[cell]}, held-out accuracy, %", "best setting", "n", "by seed", "mean", "settings tried"]
    return text + "\n" + "\n".join(markdown(headings, lines, 2)) + "\n\n" + origin_of(rows, [cell])


def _words(score: Score) -> str:
    form = score.setting.form
    details = described(form).removeprefix(table.KINDS[form.kind].format(m=form.m)).removeprefix(", ")
    for each in ("mixed with the depth prior, ", "mixed with the depth prior"):
        details = details.removeprefix(each)
    return f"{optimizer_of(score)}" + (f"; {details}" if details else "")


# Tried

LEARNED = [("batch", 128, False), ("ghost", 4, True), ("ghost", 2, True), ("kalman", 2, True), ("kalman", 1, True)]


def rates_table() -> str:
    return "\n".join(_rates(cell) for cell in with_plain_filters())


def _rates(cell: str) -> str:
    plain = [score for score in held_out(cell) if is_plain(score.setting.form) and not score.setting.warmup]
    mine = [score for score in plain if _kind(score) in LEARNED]
    pairs = sorted({(score.setting.decay, score.setting.rate) for score in mine})
    lines = []
    for decay, rate in pairs:
        line = []
        for kind in LEARNED:
            found = [s for s in mine if _kind(s) == kind and (s.setting.decay, s.setting.rate) == (decay, rate)]
            top = table.best(found)
            line.append(
                " ".join(f"{each:.1f}" for each in top.accuracies().values()) if top else "diverged" if found else ""
            )
        lines.append([power(decay), f"{rate:g}", *line])
    names = ["batch norm at 128", "groups of 4, closing phase", "groups of 2, closing phase"]
    names += ["BKN, m = 2, closing phase", "BKN, m = 1, closing phase"]
    headings = ["weight decay", "rate", *names]
    rows = [row for score in mine for row in score.rows.values()]
    title = f"{SHORT[cell]}, held-out accuracy in % by seed, of the best closing phase that was tried there:\n\n"
    return title + "\n".join(markdown(headings, lines, 2)) + "\n\n" + origin_of(rows, [cell])


def _kind(score: Score) -> tuple[str, int, bool]:
    form = score.setting.form
    return form.kind, form.m, form.closing


def reference(score: Score) -> Score | None:
    """The best closing phase with the same m, rate and decay, of BKN or of batch norm on groups. At 128 batch norm."""
    setting = score.setting
    kind = "kalman" if setting.form.kind == "time" else setting.form.kind

    def right(other: Setting) -> bool:
        same = (other.rate, other.decay, other.warmup) == (setting.rate, setting.decay, 0)
        return same and other.form != setting.form

    if setting.form.m == 128:
        return best(setting.cell, "batch", 128, phase=False, accept=right)
    return best(setting.cell, kind, setting.form.m, phase=True, accept=right)


def idea_of(score: Score) -> str | None:
    """What a setting tries, in words without m. None: it is in the table of rates and decays alone, or in that of
    computed filters.
    """
    setting, form = score.setting, score.setting.form
    if form.kind in ("batch", *OTHERS) or form.filters != "plain":
        return None
    usual = (setting.rate, setting.decay) == USUAL
    if is_plain(form) and form.closing and not usual and (form.close == (0.3, 0.6) or setting.rate != USUAL[0]):
        return None
    if form.kind == "ghost" and is_plain(form) and form.closing and not usual:
        return None
    if form.closing and form.kind == "kalman" and form.top in (0.875, 0.912):
        words = "BKN, closing phase that leaves the noise of a batch of 128: λ at most 0.875 at m = 2, 0.912 at m = 1"
        return words + (", the depth prior fades" if form.fade else "")
    words = described(form, size=False) + ("" if form.closing or form.kind == "time" else ", no closing phase")
    return words + (f", warm-up of {100 * setting.warmup:.0f} %" if setting.warmup else "")


def ideas() -> dict[str, list[Score]]:
    """Settings by idea, in the order of the rounds."""
    found: dict[str, list[Score]] = {}
    for cell in with_plain_filters():
        for score in held_out(cell):
            words = idea_of(score)
            if words is not None:
                found.setdefault(words, []).append(score)
    order = list(ROUNDS)
    return dict(sorted(found.items(), key=lambda item: min(order.index(s.rounds[0]) for s in item[1])))


def ideas_table() -> str:
    lines, rows = [], []
    for words, own in ideas().items():
        cells_of = [
            "; ".join(_tried(score) for score in sorted(own, key=place) if score.setting.cell == cell)
            for cell in with_plain_filters()
        ]
        rounds = {name for score in own for name in score.rounds}
        lines.append([words, ", ".join(name for name in ROUNDS if name in rounds), *cells_of])
        rows += [row for score in own for row in score.rows.values()]
    headings = ["idea", "round", *(f"{SHORT[cell]}, held-out accuracy, %" for cell in with_plain_filters())]
    text = "\n".join(markdown(headings, lines, 2)) + "\n\n" + origin_of(rows, with_plain_filters())
    return text + "\n" + bullets(_idea_sentences())


def place(score: Score) -> tuple[float, ...]:
    """By which settings are sorted in a cell of a table."""
    return -score.setting.form.m, score.setting.decay


def _tried(score: Score) -> str:
    """One setting: m, rate and decay if they are not the usual ones, the accuracy, the difference to its reference."""
    setting = score.setting
    where = f"m = {setting.form.m}"
    where += f", rate {setting.rate:g}" if setting.rate != USUAL[0] else ""
    where += f", decay {power(setting.decay)}" if setting.decay != USUAL[1] else ""
    where += ": "
    if score.diverged:
        return f"{where}diverged"
    base = reference(score)
    return where + f"{score.first:.1f}" + (f" ({signed(score.first - base.first)})" if base else "")


def off(words: str) -> list[float]:
    """Differences to the references, of all runs of an idea that did not diverge."""
    found = []
    for score in ideas()[words]:
        base = reference(score)
        if base is not None and not score.diverged:
            found.append(score.first - base.first)
    return found


def _idea_sentences() -> list[str]:
    late = {m: Form(kind="time", m=m, level="mixture", ramp=(0.5, 0.8)) for m in (2, 1)}
    tiny, cifar, batch = "tiny100", "cifar10", Form(kind="batch")
    drift = Form(kind="time", m=1, level="drift")
    noise = "BKN, closing phase that leaves the noise of a batch of 128: λ at most 0.875 at m = 2, 0.912 at m = 1"
    fade = "BKN, closing phase from 30 to 60 %, the depth prior fades"
    both = f"{noise}, the depth prior fades"
    own = {m: Form(kind="kalman", m=m, closing=True) for m in (2, 1)}
    averages = replace(own[1], means="average", close=(0.3, 0.6))
    usual = [score for score in held_out(tiny) if (score.setting.rate, score.setting.decay) == USUAL]
    return [
        said(
            "At a rate of 0.1 and a decay of 5e-4, one form was above batch norm at 128 on Tiny-ImageNet: the "
            f"mixture with a late rise of λ at m = 2, {at(tiny, late[2]):.1f} against {at(tiny, batch):.1f} %. It is "
            f"one run. The same form ends at {at(cifar, late[2]):.1f} % on CIFAR-10, and diverges on Tiny-ImageNet at "
            "a decay of 1e-3.",
            [score.setting.form for score in usual if score.first > at(tiny, batch)] == [late[2]],
            at(cifar, late[2]) < 20,
            at(tiny, late[2], decay=1e-3) == 0,
        ),
        said(
            "The time filter whose moments follow the drift of the depth prior diverges on both nets.",
            at(tiny, drift) == at(cifar, drift) == 0,
        ),
        said(
            f"A closing phase whose backward uses the group's own sums loses at m = 1: {at(tiny, own[1]):.1f} against "
            f"{at(tiny, averages):.1f} % with averages over steps.",
            at(tiny, averages) - at(tiny, own[1]) > 2,
        ),
        said(
            "A phase that leaves the noise of a batch of 128 (round `ninth`) loses "
            f"{-max(off(noise)):.1f} to {-min(off(noise)):.1f} points against λ = 1.",
            max(off(noise)) < 0,
        ),
        said(
            f"A prior that fades while running statistics come in (round `tenth`) changes the accuracy by "
            f"{signed(max(off(fade)))} to {signed(min(off(fade)))} points. Together with the noise of 128 it gains "
            f"{off(both)[0]:.1f} points in one run. That run is still below the best setting of BKN at m = 2.",
            max(off(fade)) <= 0,
            len(off(both)) == 1 and off(both)[0] > 0,
            (top := best(tiny, "kalman", 2, phase=True)) is not None and ideas()[both][0].first < top.first,
        ),
        said(
            "At a learning rate of 0.4 BKN does not train on Tiny-ImageNet "
            f"({at(tiny, own[2], rate=0.4):.1f} and {at(tiny, averages, rate=0.4):.1f} %), and batch norm at 128 has "
            f"{at(tiny, batch, rate=0.4):.1f} %.",
            max(at(tiny, own[2], rate=0.4), at(tiny, averages, rate=0.4)) < 30 < at(tiny, batch, rate=0.4),
        ),
        said(
            f"Already at m = 128 BKN is below batch norm on Tiny-ImageNet, {at(tiny, Form(kind='kalman')):.1f} "
            f"against {at(tiny, batch):.1f} %, with the lower training loss. So part of the difference does not come "
            "from small groups.",
            at(tiny, Form(kind="kalman")) < at(tiny, batch),
            _loss(tiny, Form(kind="kalman")) < _loss(tiny, batch),
        ),
    ]


def _loss(cell: str, form: Form) -> float:
    setting = Setting(cell, form, *USUAL, CELLS[cell].epochs)
    (score,) = (score for score in held_out(cell) if score.setting == setting)
    return float(score.rows[0]["loss"])
