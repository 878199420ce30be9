"""Made-up records of the rounds of trials/evidence.py."""

from __future__ import annotations

import math
import zlib

from trials.cells import CELLS
from trials.evidence import EVIDENCE
from trials.table import Row
from trials.training import MODES, RECALIBRATED, Run


def accuracy(run: Run, mode: str = "population") -> float:
    """Higher with more examples in a group, and different for every method and way of inference."""
    own = zlib.crc32(f"{run.form.kind} {run.form.closing} {run.form.transition} {mode}".encode()) % 100 / 25
    return round(80 + own + 0.5 * math.log2(run.form.m) - 8 * (run.form.kind == "ghost" and run.form.m == 1), 2)


def record(name: str, run: Run, **changes: object) -> Row:
    cell, form = CELLS[run.cell], run.form
    modes = ["population", "batch", "example"][: MODES.get(form.kind, 1)]
    modes += [f"example {size}" for size in run.virtual if len(modes) > 2]
    modes += ["recalibrated"] if form.kind in RECALIBRATED else []
    scores = {mode: round(accuracy(run, mode) + 0.1 * run.seed, 2) for mode in modes}
    steps = 1000
    row: Row = {
        "round": name, "key": run.key, "cell": run.cell, "seed": run.seed,
        "epochs": cell.epochs if run.epochs is None else run.epochs,
        "rate": cell.rate if run.rate is None else run.rate,
        "decay": cell.decay if run.decay is None else run.decay,
        "batch": run.batch or 128, "form": dict(vars(form)), "loss": 1.0, "curve": [1.0], "steps": steps,
        "hardware": "made up", "torch": "2.0.0", "commit": "abcdef0123",
    }  # fmt: skip
    row["test" if run.test else "held_out"] = scores
    if run.both:
        row["tested"] = {mode: round(score - 1, 2) for mode, score in scores.items()}
    if run.evaluations:
        ends = range(1, run.evaluations + 1)
        row["reached"] = [[part * steps // len(ends), scores["population"] * part / len(ends)] for part in ends]
    return {**row, **changes}


def records(*names: str) -> list[Row]:
    """One for every run of these rounds, or of all."""
    return [record(name, run) for name in names or EVIDENCE for run in EVIDENCE[name]]
