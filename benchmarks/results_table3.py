"""The paper's CIFAR table, from the records of the round `table3`: whole for docs/results.md, in short for README and
guides, and the differences that other sentences name."""

from __future__ import annotations

from measured import ABSENT, markdown
from results_evidence import MODES, not_yet, round_rows
from results_trials import NAMES, SHORT, origin_of
from results_words import Difference, Scores, bullets, compared, difference, paragraph, said, spread

from kalmannorm.lab.experiments.catalogue import experiment
from trials import table
from trials.evidence import LONG, TABLE3, WIDE


def table3() -> str:
    """Both data sets."""
    if not round_rows("table3"):
        return not_yet("table3")
    return "\n".join(text for data in ("cifar10", "cifar100") if (text := _of_data(data)))


BASELINE = "batch norm (128, 128)"
PAPERS = {
    (BASELINE, ""): "bn-128x128",
    ("batch norm (128, 2)", ""): "bn-128x2",
    ("BKN learned (128, 2)", ""): "bkn-learned-128x2",
    (BASELINE, "-wide"): "bn-wide-128x128",
    ("batch norm (128, 2)", "-wide"): "bn-wide-128x2",
}


def _of_data(data: str) -> str:
    scores = {(score.setting.cell, score.setting.form): score for score in table.scores(round_rows("table3"))}
    base = scores.get((data, TABLE3[BASELINE]))
    lowered = {} if base is None else base.accuracies("population")
    lines, records = [], []
    for wide in ("", "-wide"):
        for label in TABLE3 if not wide else WIDE:
            score = scores.get((data + wide, TABLE3[label]))
            if score is None:
                continue
            records += list(score.rows.values())
            by_mode = {mode: score.accuracies(mode) for mode in MODES}
            own = by_mode["population"]
            change = difference(own, lowered).shown(2) if set(own) & set(lowered) and score is not base else ""
            gap = difference(by_mode["batch"], own).shown() if by_mode["batch"] else ""
            paper = experiment("cifar").paper(PAPERS.get((label, wide), ""), "population", "inception", data)
            shown = label + (", wide" if wide else "")
            lost = len(score.rows) - len(own)
            count = f"{len(own)} ({lost} diverged)" if lost else str(len(own))
            told = "" if paper is None else f"{paper:.1f}"
            spreads = {mode: (spread(by_mode[mode]) if by_mode[mode] else ABSENT) for mode in MODES}
            lines.append([shown, count, spreads.pop("population"), change, *spreads.values(), gap, told])
    if not lines:
        return ""
    headings = [f"{SHORT[data]}, test accuracy, %", "n", "population", f"difference to {BASELINE}", *list(MODES)[1:]]
    headings += ["batch − population", "the paper, moving statistics"]
    text = paragraph(
        f"{NAMES[data]}, {LONG} epochs on all training images, scored on {table.TEST[data]:,} test images. Differences "
        "are in points, of `population` inference."
    )
    cells = list(dict.fromkeys(row["cell"] for row in records))
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n" + origin_of(records, cells)
    found = _sentences(data)
    return text + ("\nIn `population` inference:\n\n" + bullets(found) if found else "")


PAIRS = (
    ("BKN learned (128, 2)", "batch norm (128, 2)"),
    ("BKN (128, 2)", "BKN learned (128, 2)"),
    ("BKN (128, 2), closing phase", "BKN (128, 2)"),
    ("BKN (128, 2), recipe", "batch norm (128, 128), standardized filters"),
    ("BKN (128, 2), recipe", "batch norm (128, 2), recipe"),
    ("BKN (128, 2), recipe", "BKN (128, 2), closing phase"),
    ("BKN (128, 2), closing phase", "Moving Average Batch Norm (128, 2)"),
    ("BKN (128, 2), closing phase", "group norm with standardized weights"),
)
"""Rows of the table that answer a question: the paper's form, ours, the phase, the recipe, and its strongest peers."""


def _sentences(data: str) -> list[str]:
    """What the differences of these rows say, as far as both were run."""
    told = []
    for label, other in PAIRS:
        own, base = of_row(label, data=data), of_row(other, data=data)
        if set(own) & set(base):
            told.append(f"{compared(label, difference(own, base), other)}.")
    own, base = of_row("BKN (128, 2)", "example", data), of_row(BASELINE, data=data)
    if set(own) & set(base):
        what = "Without a closing phase, BKN (128, 2) in `example` inference"
        told.append(f"{compared(what, difference(own, base), f'{BASELINE} in `population` inference')}.")
    return told


SUMMARY = (
    BASELINE,
    "batch norm (128, 128), standardized filters",
    "batch norm (128, 2)",
    "batch renorm (128, 2)",
    "group norm",
    "group norm with standardized weights",
    "Moving Average Batch Norm (128, 2)",
    "BKN learned (128, 2)",
    "BKN (128, 2)",
    "BKN (128, 2), closing phase",
    "BKN (128, 2), recipe",
    "batch norm (128, 2), recipe",
)
"""The rows of the short table for README and guides."""


def summary() -> str:
    """Table 3 on CIFAR-10 in short: the inferences that need no other test images."""
    rows = {label: {mode: of_row(label, mode) for mode in ("population", "example")} for label in SUMMARY}
    lines = []
    for label, own in rows.items():
        if not own["population"]:
            continue
        change = difference(own["population"], rows[BASELINE]["population"]).shown(2) if label != BASELINE else ""
        few = "" if len(own["population"]) == 3 else f" ({len(own['population'])} seeds)"
        shown = f"**{label}**" if label.startswith("BKN") else label
        lines.append([shown + few, spread(own["population"]), change, spread(own["example"]) if own["example"] else ""])
    headings = ["", "`population`", "difference", "`example`"]
    text = paragraph(
        "CIFAR-10 and the paper's CIFAR Inception net, 30 epochs on all training images, one H200: test accuracy in %, "
        "mean ± standard deviation over 3 seeds. *Difference* is that of `population` inference to batch norm at 128, "
        "in points, with half of its interval of 95 %. (128, 2) means: an optimizer step has 128 examples, in groups "
        "of m = 2. This corresponds to 64 devices with 2 examples each."
    )
    return text + "\n" + "\n".join(markdown(headings, lines, 1)) + "\n"


def of_row(label: str, mode: str = "population", data: str = "cifar10") -> Scores:
    """A row of table 3, by seed."""
    form = TABLE3[label]
    own = (score for score in table.scores(round_rows("table3")) if score.setting.cell == data)
    return next((score.accuracies(mode) for score in own if score.setting.form == form), {})


def after_long_runs(label: str, base: str = BASELINE) -> str:
    """Difference of two rows of CIFAR-10 in `population` inference, with its number of seeds. Empty without runs."""
    own, other = of_row(label), of_row(base)
    seeds = len(set(own) & set(other))
    if not seeds:
        return ""
    return f"{difference(own, other).shown()} points ({'one seed' if seeds == 1 else f'{seeds} seeds'})"


def gap_after_long_runs(label: str) -> Difference:
    """`batch` minus `population` inference of a row of CIFAR-10."""
    return difference(of_row(label, "batch"), of_row(label))


CLOSED = "BKN (128, 2), closing phase"
COMPARED = (CLOSED, "BKN (128, 2)", "BKN (128, 2), recipe", "Moving Average Batch Norm (128, 2)", "batch norm (128, 2)")


def advice() -> list[list[str]]:
    """A line for the table of advice: m, net and images, what was measured, what to use."""
    changes = {label: difference(of_row(label), of_row(BASELINE)) for label in COMPARED}
    told = "; ".join(f"{label.replace(' (128, 2)', '')} {change.shown(2)}" for label, change in changes.items())
    use = said(
        "BKN with a closing phase, BKN by [the recipe](recipe.md) or Moving Average Batch Norm",
        difference(of_row(CLOSED), of_row("BKN (128, 2)")).above,
        difference(of_row(CLOSED), of_row("BKN (128, 2), recipe")).open,
        difference(of_row(CLOSED), of_row("Moving Average Batch Norm (128, 2)")).open,
    )
    return [["2", "CIFAR Inception on CIFAR-10, 30 epochs, test", f"against batch norm at 128, 3 seeds: {told}", use]]
