"""The table of docs/results.md about the first steps of trainings at m = 1 and 2: see trials/early.py."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

from measured import ROOT, markdown
from results_words import Row, bullets, paragraph, said

sys.path.append(str(ROOT))
from trials import early, table
from trials.early import PART
from trials.forms import Form
from trials.rounds import GENTLE, RAPID, ROUNDS, SHORT

CELL = "cifar100"
SHOWN = (0, 3, 5, 7)
"""Which parts of the record have a column."""
STEPS = 200


def early_table() -> str:
    """The block of the page."""
    rows = {row["key"]: row for row in early.read(early.RECORD) if row["steps"] == STEPS}
    found = {run.form: rows[run.key] for run in ROUNDS[early.ROUND] if run.cell == CELL and run.key in rows}
    headings = ["mean loss (n = 1) in steps", *(f"{part * PART + 1} to {(part + 1) * PART}" for part in SHOWN)]
    lines = [[_named(form), *(f"{row['losses'][part]:.2f}" for part in SHOWN)] for form, row in found.items()]
    places = sorted({f"{row['hardware']}; torch {row['torch'].split('+')[0]}" for row in found.values()})
    commits = dict.fromkeys(row["commit"][:7] for row in found.values())
    text = "\n".join(markdown(headings, lines, 1)) + "\n\n"
    text += paragraph(
        f"{' and '.join(places)}; commit {', '.join(commits)}; `python -m trials.early --match {CELL}` "
        f"([records](../trials/records/early/losses.jsonl)). A loss of {math.log(100):.2f}, the logarithm of 100, is "
        "that of guessing."
    )
    return text + "\n" + bullets(_sentences(found))


def _named(form: Form) -> str:
    words = ["batch norm on groups" if form.kind == "ghost" else "BKN", f"m = {form.m}"]
    if form.kind == "kalman":
        words.append(f"gain from {form.gain or 0.5:g}")
    if form.close != RAPID:
        words.append(f"λ rises from {100 * form.close[0]:g} to {100 * form.close[1]:g} %")
    return ", ".join(words)


def _sentences(found: dict[Form, Row]) -> list[str]:
    start, end = (found[form]["losses"] for form in (SHORT[1], replace(SHORT[1], gain=0.1)))
    sooner = [row["losses"][-1] for form, row in found.items() if form.m == 1 and form.close != RAPID]
    two = {form.gain: row["losses"][-1] for form, row in found.items() if (form.m, form.close) == (2, RAPID)}
    return [
        said(
            "With a gain from 0.5 and λ as in the recipe, BKN at m = 1 learns nothing in these steps. With a gain from "
            f"0.1 the loss falls to {end[-1]:.2f}. If λ rises from the first step on, it falls to {min(sooner):.2f} to "
            f"{max(sooner):.2f}.",
            abs(start[-1] - math.log(100)) < 0.05,
            end[-1] < min(sooner) <= max(sooner) < 4.3,
        ),
        said(
            f"At m = 2 the loss falls to {two[0.1]:.2f} with a gain from 0.1, and to {two[None]:.2f} with 0.5.",
            two[0.1] < two[None] - 0.1,
        ),
        *_trained(),
    ]


def _trained() -> list[str]:
    """What whole trainings with these starts gave on held-out images."""
    scores = {cell: _scores(cell) for cell in (CELL, "tiny100")}
    one = {form: score for form, score in scores[CELL].items() if form.m == 1}
    told = "; ".join(f"{_named(form)}, {'diverged' if s.diverged else f'{s.first:.1f}'}" for form, s in one.items())
    lost = {form for form, score in scores["tiny100"].items() if score.diverged}
    return [
        f"After the whole training (held-out images, %, seed 0): {told}.",
        said(
            "On Tiny-ImageNet at m = 1 the trainings diverged in which λ rises from the first step on, and so did the "
            "one with a gain from 0.03.",
            {form for form in scores["tiny100"] if form.m == 1} - lost == {SHORT[1], GENTLE[1]},
        ),
    ]


def _scores(cell: str) -> dict[Form, table.Score]:
    """Those of the round, by form."""
    rows = [row for row in table.records() if row["round"] == early.ROUND]
    return {score.setting.form: score for score in table.scores(rows) if score.setting.cell == cell}
