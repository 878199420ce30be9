"""The scoreboard of a cell, from the records of all rounds: `python -m trials.table --cell tiny100`.

A line is a setting: a form, a learning rate, a weight decay, and a warm-up if it has one. The best come first, by the
accuracy of their lowest seed in population inference. `--test` shows the settings that were scored on test images, the
others were scored on held-out images. The loss is the mean of the last hundred steps of training.

A setting may have been run again, because the code had changed. Then the last record of a seed counts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.cells import BATCH, CELLS
from trials.forms import Form
from trials.rounds import ROUNDS

RECORDS = Path(__file__).parent / "records"
HELD_OUT = 5_000
"""Images that a run is scored on, in every cell: the held-out tenth."""
TEST = {"tiny100": 5_000, "cifar10": 10_000, "cifar100": 10_000, "digits": 896}
"""Test images of a data set."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What a run is besides its seed."""

    cell: str
    form: Form
    rate: float
    decay: float
    epochs: int
    warmup: float = 0.0
    test: bool = False
    batch: int = BATCH

    @property
    def images(self) -> int:
        """The number that the accuracy is measured on."""
        return TEST[CELLS[self.cell].images] if self.test else HELD_OUT


@dataclass
class Score:
    """The results of one setting, by seed: the last record of each."""

    setting: Setting
    rows: dict[int, Row] = field(default_factory=dict)

    def accuracies(self, mode: str = "population", images: str = "") -> dict[int, float]:
        """In %, by seed. A run that diverged has none, and neither has one without this way of inference.

        `images`: "tested" for the test images of a run that was scored on them besides the held-out ones.
        """
        name = images or ("test" if self.setting.test else "held_out")
        rows = {seed: row for seed, row in sorted(self.rows.items()) if row["loss"] is not None}
        return {seed: row[name][mode] for seed, row in rows.items() if mode in row.get(name, {})}

    @property
    def diverged(self) -> bool:
        return not self.accuracies()

    @property
    def first(self) -> float:
        """The accuracy of the lowest seed, 0 if all runs diverged. Settings are compared by it: most have one seed."""
        return next(iter(self.accuracies().values()), 0.0)

    @property
    def rounds(self) -> list[str]:
        return list(dict.fromkeys(row["round"] for row in self.rows.values()))


def records(folder: Path = RECORDS) -> list[Row]:
    """All records, in the order of the rounds. `round` is added to each."""
    order = list(ROUNDS)
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: order.index(path.stem) if path.stem in order else 99)
    return [
        {**json.loads(line), "round": path.stem}
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def setting_of(row: Row) -> Setting:
    """Old records lack the weight decay and fields of the form that came later. Their key has what was not usual."""
    named = dict(re.findall(r"\| (\w+)=([\d.e-]+)", row["key"]))
    fields: Row = {name: tuple(value) if isinstance(value, list) else value for name, value in row["form"].items()}
    decay = row["decay"] if row.get("decay") is not None else float(named.get("decay", CELLS[row["cell"]].decay))
    warmup = float(named.get("warmup", 0))
    batch = row.get("batch", BATCH)
    return Setting(row["cell"], Form(**fields), row["rate"], decay, row["epochs"], warmup, "test" in row, batch)


def scores(rows: Iterable[Row]) -> list[Score]:
    """One per setting, in the order of the first record of each. Records of failed runs are left out."""
    found: dict[Setting, Score] = {}
    for row in rows:
        if "failed" in row:
            continue
        setting = setting_of(row)
        found.setdefault(setting, Score(setting)).rows[row["seed"]] = row
    return list(found.values())


KINDS = {
    "batch": "batch norm at 128",
    "ghost": "batch norm on groups of {m}",
    "renorm": "batch renorm, m = {m}",
    "group": "group norm",
    "standardized": "group norm with standardized weights",
    "moving": "Moving Average Batch Norm, m = {m}",
    "online": "Online Normalization",
    "kalman": "BKN, m = {m}",
    "time": "time filter, m = {m}",
}
BACKWARDS = {
    "feedback": "gradient averages by error feedback",
    "depth": "gradient through the depth prior",
    "none": "no gradient averages",
}


def described(form: Form, *, size: bool = True) -> str:
    """The form in words. What is usual is left out, and so is m without `size`."""
    usual = Form(kind=form.kind, m=form.m)
    kind = KINDS[form.kind].replace("BKN", "BKN learned" if form.transition == "learned" else "BKN")
    words = [kind.format(m=form.m) if size else kind.removesuffix(", m = {m}").removesuffix(" of {m}")]
    if form.filters != "plain":
        words.append(f"{'standardized and scaled' if form.filters == 'scaled' else form.filters} filters")
    if form.level != usual.level:
        words.append(
            {"drift": "moved by the drift of the depth prior", "mixture": "mixed with the depth prior"}[form.level]
        )
    if form.error is not None:
        words.append(f"gain {'by noise' if form.fixed else 'learned from that by noise'}, error {form.error:g}")
    elif form.gain is not None:
        words.append(f"gain {'fixed at' if form.fixed else 'from'} {form.gain:g}")
    elif form.fixed:
        words.append("gain fixed")
    if form.channels:
        words.append("a gain for each channel")
    if form.start != usual.start:
        words.append({"small": "A from a tenth of Glorot's", "identity": "A from the identity"}[form.start])
    if form.rank is not None:
        words.append(f"A of rank {form.rank}")
    if form.noise != usual.noise:
        words.append(f"r for each {form.noise}")
    if form.blind:
        words.append("no gradient through the prior")
    if not form.total:
        words.append("no total variance")
    if form.momentum is not None:
        words.append(f"momentum {form.momentum:g}")
    if form.closing:
        words.append(f"closing phase from {_percent(form.close)}" + (", own sums" if form.means == "own" else ""))
    if form.ramp != usual.ramp:
        words.append(f"λ from {_percent(form.ramp)}")
    if form.top != usual.top:
        words.append(f"λ at most {form.top:g}")
    if form.fade:
        words.append("the depth prior fades")
    if form.backward != usual.backward:
        words.append(BACKWARDS[form.backward])
    words += [
        f"{word} {getattr(form, name):g}"
        for name, word in (("alpha", "α ="), ("gradient_alpha", "α of the gradients ="), ("power", "power"))
        if getattr(form, name) != getattr(usual, name)
    ]
    if form.real != usual.real:
        words.append(f"as {form.real} examples")
    return ", ".join(words)


def _percent(shares: tuple[float, float]) -> str:
    return f"{100 * shares[0]:.0f} to {100 * shares[1]:.0f} %"


def best(found: Iterable[Score]) -> Score | None:
    """The setting with the highest accuracy of its lowest seed."""
    return max((score for score in found if not score.diverged), key=lambda score: score.first, default=None)


def scoreboard(cell: str, *, test: bool = False, rows: Iterable[Row] | None = None) -> list[list[str]]:
    """Lines of cells, the headings first."""
    found = scores(records() if rows is None else rows)
    mine = [score for score in found if (score.setting.cell, score.setting.test) == (cell, test)]
    lines = [["form", "rate", "decay", "n", "by seed", "mean", "loss", "rounds"]]
    for score in sorted(mine, key=lambda score: -score.first):
        setting, by_seed = score.setting, score.accuracies()
        losses = [row["loss"] for row in score.rows.values() if row["loss"] is not None]
        words = described(setting.form) + (f", warm-up of {100 * setting.warmup:.0f} %" if setting.warmup else "")
        words += f", {setting.epochs} epochs" if setting.epochs != CELLS[cell].epochs else ""
        words += f", {setting.batch} images per step" if setting.batch != BATCH else ""
        shown = " ".join(f"{by_seed[seed]:.1f}" if seed in by_seed else "diverged" for seed in sorted(score.rows))
        lines.append(
            [
                words, f"{setting.rate:g}", f"{setting.decay:g}", str(len(score.rows)), shown,
                f"{statistics.fmean(by_seed.values()):.2f}" if by_seed else "",
                f"{statistics.fmean(losses):.2f}" if losses else "",
                ", ".join(score.rounds),
            ]
        )  # fmt: skip
    return lines


def columns(lines: list[list[str]]) -> list[str]:
    """Lines of cells as text."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", choices=CELLS, required=True)
    parser.add_argument("--test", action="store_true", help="settings that were scored on test images")
    arguments = parser.parse_args()
    print("\n".join(columns(scoreboard(arguments.cell, test=arguments.test))))


if __name__ == "__main__":
    main()
