"""The table of docs/results.md about the first steps of trainings at m = 1 and 2: see trials/early.py."""

from __future__ import annotations

import math
import sys

from measured import ROOT, markdown
from results_words import Row, bullets, paragraph, said

sys.path.append(str(ROOT))
from trials import early
from trials.early import PART
from trials.forms import Form
from trials.rounds import RAPID, ROUNDS

CELL = "cifar100"
SHOWN = (0, 3, 5, 7)
"""Which parts of the record have a column."""


def early_table() -> str:
    """The block of the page."""
    rows = {row["key"]: row for row in early.read()}
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
    recipe, lower = ROUNDS[early.ROUND][3].form, ROUNDS[early.ROUND][0].form
    assert (recipe.gain, lower.gain, recipe.close, lower.close) == (None, 0.1, RAPID, RAPID)
    start, end = found[recipe]["losses"], found[lower]["losses"]
    return [
        said(
            f"With a gain from 0.5, BKN at m = 1 learns nothing in these steps. With a gain from 0.1 the loss falls to "
            f"{end[-1]:.2f}.",
            abs(start[-1] - math.log(100)) < 0.05,
            end[-1] < 4,
        ),
        "Whether the trained network is more accurate has not been measured yet (round `fifteenth` of the trials).",
    ]
