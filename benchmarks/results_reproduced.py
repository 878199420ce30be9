"""`kalmannorm reproduce cifar` beside the trials: the same rows of the paper's table, trained by other code."""

from __future__ import annotations

import statistics

import results_table3 as table3
from measured import ROOT, markdown
from results_evidence import round_rows
from results_lab import read
from results_trials import NAMES
from results_words import Row, Scores, mean, origin, paragraph, signed, spread
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


def reproduced() -> str:
    """A table for each data set."""
    rows = read(RECORD) if (ROOT / RECORD).is_file() else []
    by_data = {data: [row for row in rows if row["data"] == data] for data in table3.DATA}
    return "\n".join(_of_data(data, own) for data, own in by_data.items() if own)


def _of_data(data: str, rows: list[Row]) -> str:
    deviation, freedom = scatter(data)
    lines, inside = [], []
    for name, label in ROWS.items():
        lab: Scores = {row["seed"]: row["accuracy"]["population"] for row in rows if row["row"] == name}
        trials = table3.of_row(label, data=data)
        if not lab or not trials:
            continue
        away = mean(lab) - mean(trials)
        half = float(stats.t.ppf(0.975, freedom)) * deviation * (1 / len(lab) + 1 / len(trials)) ** 0.5
        inside.append(abs(away) <= half)
        counts, losses = f"{len(lab)} and {len(trials)}", [row["loss"] for row in rows if row["row"] == name]
        line = [label, counts, spread(lab), spread(trials), signed(away, 2), f"±{half:.2f}"]
        lines.append([*line, _between(losses), _between(last_losses(label, data))])
    text = paragraph(
        f"{NAMES[data]}, {LONG} epochs: test accuracy in %, `population` inference, of the lab's command and of the "
        f"trials. Two runs of a row that differ in the seed alone have a standard deviation of {deviation:.2f} points "
        f"(all rows of the trials, {freedom} degrees of freedom). So chance explains differences of the given size in "
        "19 of 20 cases. *Loss* is the mean training loss of the last epoch."
    )
    headings = ["", "n, lab and trials", "lab", "trials", "lab − trials", "chance, 95 %", "loss, lab", "loss, trials"]
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n"
    found = paragraph(f"{sum(inside)} of {len(inside)} differences are within it.")
    return text + found + "\n" + origin(rows, RECORD)


def scatter(data: str) -> tuple[float, int]:
    """The standard deviation of runs that differ in the seed, pooled over rows, and its degrees of freedom."""
    rows = [own for label in TABLE3 if len(own := table3.of_row(label, data=data)) > 1]
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
