"""`kalmannorm reproduce cifar` beside the trials: the same rows of the paper's table, trained by other code."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import results_table3 as table3
from measured import ROOT, markdown
from results_evidence import round_rows
from results_lab import read
from results_trials import NAMES
from results_words import Row, Scores, difference, mean, origin, paragraph, signed, spread
from scipy import stats

from trials.evidence import LONG, TABLE3

RECORD = "benchmarks/records/reproduced-cifar-h200.jsonl"
ROWS = {
    "bn-128x128": table3.BASELINE,
    "bn-ws-128x128": table3.STANDARDIZED,
    "bn-128x2": "batch norm (128, 2)",
    "bkn-learned-128x2": "BKN learned (128, 2)",
    "bkn-128x2": "BKN (128, 2)",
    "bkn-closing-128x2": table3.CLOSED,
    "bkn-ws-closing-128x2": table3.RECIPE,
    "bn-closing-128x2": "batch norm (128, 2), closing phase",
    "bn-ws-closing-128x2": "batch norm (128, 2), recipe",
    "brn-128x2": "batch renorm (128, 2)",
    "mabn-128x2": "Moving Average Batch Norm (128, 2)",
    "gn-128x2": "group norm",
    "gn-ws-128x2": "group norm with standardized weights",
}
"""The rows of the lab, as `--rows` names them, and those of the trials."""
LOSSES = 0.002
"""How far a loss may be from those of the trials and still be called one of them."""


def reproduced() -> str:
    """A table for each data set."""
    rows = read(RECORD) if (ROOT / RECORD).is_file() else []
    by_data = {data: [row for row in rows if row["data"] == data] for data in table3.DATA}
    return "\n".join(_of_data(data, own) for data, own in by_data.items() if own)


def _of_data(data: str, rows: list[Row]) -> str:
    shown = {
        name: label
        for name, label in ROWS.items()
        if any(row["row"] == name for row in rows) and table3.of_row(label, data=data)
    }
    deviation, freedom = scatter(data, shown.values())
    lines, inside, learned = [], [], []
    for name, label in shown.items():
        lab, trials = of_lab(rows, name), table3.of_row(label, data=data)
        away = mean(lab) - mean(trials)
        half = float(stats.t.ppf(0.975, freedom)) * deviation * (1 / len(lab) + 1 / len(trials)) ** 0.5
        inside.append(abs(away) <= half)
        counts, losses = f"{len(lab)} and {len(trials)}", [row["loss"] for row in rows if row["row"] == name]
        line = [label, counts, spread(lab), spread(trials), signed(away, 2), f"±{half:.2f}"]
        theirs = last_losses(label, data)
        learned.append(all(min(theirs) - LOSSES <= loss <= max(theirs) + LOSSES for loss in losses))
        lines.append([*line, _between(losses), _between(theirs)])
    text = paragraph(
        f"{NAMES[data]}, {LONG} epochs: test accuracy in %, `population` inference, of the lab's command and of the "
        f"trials. In these rows, runs of the trials that differ in the seed alone have a standard deviation of "
        f"{deviation:.2f} points. If the lab's runs vary as much, chance alone stays within the size *by chance* in 19 "
        "of 20 cases. *Loss* is the mean training loss of the last epoch."
    )
    headings = ["", "n, lab and trials", "lab", "trials", "lab − trials", "by chance", "loss, lab", "loss, trials"]
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n"
    wider, _ = scatter(data, TABLE3)
    verb = "is" if sum(inside) == 1 else "are"
    told = [f"{sum(inside)} of {len(inside)} differences {verb} within it."]
    if not all(inside):
        told.append(
            "So it is open whether lab and trials agree. "
            + ("Losses of the lab are those of the trials. " if all(learned) else "")
            + f"Runs of other rows vary more: over all rows the standard deviation is {wider:.2f} points."
        )
    own, base = (of_lab(rows, name) for name in ("bkn-closing-128x2", "bn-128x128"))
    if own and base:
        found = difference(table3.of_row(table3.CLOSED, data=data), table3.of_row(table3.BASELINE, data=data))
        told.append(
            f"BKN with a closing phase minus batch norm at 128 is {signed(mean(own) - mean(base), 2)} points in the "
            f"lab, and {found.shown(2)} in the trials."
        )
    return text + paragraph(" ".join(told)) + "\n" + origin(rows, RECORD)


def of_lab(rows: list[Row], name: str) -> Scores:
    return {row["seed"]: row["accuracy"]["population"] for row in rows if row["row"] == name}


def scatter(data: str, labels: Iterable[str]) -> tuple[float, int]:
    """The standard deviation of runs that differ in the seed, pooled over these rows, and its degrees of freedom."""
    rows = [own for label in labels if len(own := table3.of_row(label, data=data)) > 1]
    freedom = sum(len(own) - 1 for own in rows)
    squares = sum((len(own) - 1) * statistics.variance(own.values()) for own in rows)
    return (squares / freedom) ** 0.5, freedom


def last_losses(label: str, data: str) -> list[float]:
    """Mean training losses of the last epoch in the trials, whose curves have a point for each epoch."""
    rows = [row for row in round_rows("table3") if row["cell"] == data]
    mine = [row for row in rows if row["key"].startswith(f"{data} | {TABLE3[label].name} | ")]
    return [row["curve"][LONG - 1] for row in mine if row["loss"] is not None]


def _between(values: list[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"
