"""The paper's CIFAR table, from the records of the round `table3`: whole for docs/results.md, in short for README and
guides, and the differences that other sentences name."""

from __future__ import annotations

import statistics

from measured import ABSENT, markdown
from results_evidence import MODES, not_yet, round_rows
from results_trials import NAMES, SHORT, origin_of
from results_words import Difference, Row, Scores, bullets, compared, difference, paragraph, said, spread

from kalmannorm.lab.experiments.catalogue import experiment
from trials import table
from trials.cells import CELLS
from trials.evidence import LONG, TABLE3, WARMUP, WIDE
from trials.queue import read

DATA = ("cifar10", "cifar100")


def table3() -> str:
    """Both data sets."""
    if not round_rows("table3"):
        return not_yet("table3")
    return "\n".join(text for data in DATA if (text := _of_data(data)))


BASELINE = "batch norm (128, 128)"
PAPERS = {
    (BASELINE, ""): "bn-128x128",
    ("batch norm (128, 2)", ""): "bn-128x2",
    ("BKN learned (128, 2)", ""): "bkn-learned-128x2",
    (BASELINE, "-wide"): "bn-wide-128x128",
    ("batch norm (128, 2)", "-wide"): "bn-wide-128x2",
}


def named(label: str) -> str:
    """A row with its closing phase in % of the training."""
    first, *_ = label.split(", closing phase")
    start, end = (f"{100 * share:.0f}" for share in TABLE3[label].close)
    return label if first == label else f"{first}, closing phase {start}–{end} %"


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
            shown = named(label) + (", wide" if wide else "")
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
        f"{NAMES[data]}, {LONG} epochs on all training images, scored on {table.TEST[data]:,} test images. Every row "
        f"has a learning rate of {CELLS[data].rate:g} and a weight decay of {CELLS[data].decay:g}. Both group norms "
        f"have a warm-up of {100 * WARMUP:.0f} %. Differences are in points, of `population` inference, over the seeds "
        "that both rows have."
    )
    cells = list(dict.fromkeys(row["cell"] for row in records))
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n" + origin_of(records, cells)
    found = _sentences(data)
    found += _doubts(records, found)
    return text + ("\nIn `population` inference:\n\n" + bullets(found) if found else "")


CLOSED, RECIPE = "BKN (128, 2), closing phase", "BKN (128, 2), recipe"
STANDARDIZED = "batch norm (128, 128), standardized filters"
PAIRS = (
    ("BKN learned (128, 2)", "batch norm (128, 2)"),
    ("BKN (128, 2)", "BKN learned (128, 2)"),
    (CLOSED, "BKN (128, 2)"),
    (RECIPE, STANDARDIZED),
    (RECIPE, "batch norm (128, 2), recipe"),
    (RECIPE, CLOSED),
    (CLOSED, "Moving Average Batch Norm (128, 2)"),
    (CLOSED, "group norm with standardized weights"),
    (CLOSED, "batch norm (128, 2), recipe"),
    (RECIPE, "group norm with standardized weights"),
)
"""Rows of the table that answer a question: the paper's form, ours, the phase, the recipe, and its strongest peers."""


def _sentences(data: str) -> list[str]:
    """What the differences of these rows say, as far as both were run."""
    told = []
    for label, other in PAIRS:
        own, base = of_row(label, data=data), of_row(other, data=data)
        if set(own) & set(base):
            told.append(f"{compared(label, difference(own, base), other)}.")
    for other in (BASELINE, STANDARDIZED):
        own, base = (of_row(label, "example", data) for label in ("BKN (128, 2)", other))
        if set(own) & set(base):
            what = "In `example` inference, without a closing phase, BKN (128, 2)"
            told.append(f"{compared(what, difference(own, base), other)}.")
    return told


FIRST = "f4ff8d4"
"""The oldest commit of the table."""


def _doubts(records: list[Row], told: list[str]) -> list[str]:
    """What a reader has to know about the intervals, and about rows of different commits."""
    doubts = []
    if any("±" in each for each in told):
        doubts.append(
            "The intervals are Student's t over seeds. They do not contain the error of the test images. About one in "
            "20 such intervals misses the true difference, and there are many of them here. The same run, repeated, "
            f"has a standard deviation of {repeated():.2f} points (15 epochs of CIFAR-10)."
        )
    commits = {row["commit"][:7] for row in records}
    if len(commits) > 1:
        text = (
            f"The runs come from {len(commits)} commits. Between them max pooling, ReLUs, sums of gradients, means "
            "over positions and the optimizer got other kernels with the same arithmetic. No run was repeated to "
            "compare the commits."
        )
        doubts.append(said(text, commits <= {FIRST, "5fde5f9", "fa84e00"}))
    if FIRST in commits:
        doubts.append(
            f"In the runs of commit {FIRST} (seed 0 of CIFAR-10) the output of group norm was float32. Later it was "
            "bf16, as that of the other norms."
        )
    return doubts


def repeated() -> float:
    """The standard deviation of a run that is repeated, in points: of half of the variance of the differences."""
    first, again = (read(table.RECORDS / folder / "confirm-filters.jsonl") for folder in ("", "again"))
    known = {row["key"]: row["test"]["population"] for row in first}
    return statistics.stdev(row["test"]["population"] - known[row["key"]] for row in again) / 2**0.5


SUMMARY = (
    BASELINE,
    STANDARDIZED,
    "batch norm (128, 2)",
    "batch norm (128, 2), closing phase",
    "batch norm (128, 2), closing phase of BKN",
    "batch renorm (128, 2)",
    "group norm",
    "group norm with standardized weights",
    "Moving Average Batch Norm (128, 2)",
    "BKN learned (128, 2)",
    "BKN (128, 2)",
    CLOSED,
    RECIPE,
    "batch norm (128, 2), recipe",
)
"""The rows of the short table for README and guides."""


FAIR = "batch norm (128, 2), closing phase of BKN"


def summary() -> str:
    """Table 3 in short: `population` inference on both data sets."""
    (seeds,) = {len(of_row(BASELINE, data=data)) for data in DATA}
    lines = []
    for label in SUMMARY:
        line = [f"**{named(label)}**" if label.startswith("BKN") else named(label)]
        for data in DATA:
            own, base = of_row(label, data=data), of_row(BASELINE, data=data)
            few = f" ({len(own)} seeds)" if own and len(own) < seeds else ""
            lost = "diverged" if _ran(label, data) else "not run"
            line += [spread(own) + few if own else lost]
            line += [difference(own, base).shown(2) if own and label != BASELINE else ""]
        lines.append(line)
    headings = ["", *(words for data in DATA for words in (SHORT[data], "difference"))]
    text = paragraph(
        "The paper's CIFAR Inception net, 30 epochs on all training images, one H200: test accuracy in %, `population` "
        f"inference, mean ± standard deviation over {seeds} seeds. (128, 2) means: an optimizer step has 128 examples, "
        "in groups of m = 2. This corresponds to 64 devices with 2 examples each. *Difference* is that to batch norm "
        "at 128, in points. ± is half of its 95 % confidence interval."
    )
    shares = [f"{100 * TABLE3[label].close[0]:.0f} %" for label in (CLOSED, "batch norm (128, 2), closing phase")]
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n"
    fair = [_change(FAIR, CLOSED, data) for data in DATA]
    groups = {
        label: [_change(label, "batch norm (128, 2), recipe", data) for data in DATA] for label in (CLOSED, RECIPE)
    }
    phase = said("below BKN", all(each.below for each in fair))
    told = [
        f"The closing phase of BKN begins after {shares[0]} of the training, that of batch norm after {shares[1]}, as "
        f"trials on other images chose. With the phase of BKN, batch norm is {_listed(fair, sized=True)} points "
        f"{phase} with it, on {_both()}.",
        f"BKN with a closing phase has {_listed([_change(CLOSED, RECIPE, data) for data in DATA])} points against BKN "
        f"by the recipe.",
        f"Against batch norm by the recipe, BKN with a closing phase has {_listed(groups[CLOSED])} points, and BKN by "
        f"the recipe {_listed(groups[RECIPE])}.",
        f"In `example` inference, without a closing phase, BKN (128, 2) has {_in_example('BKN (128, 2)')} %, batch "
        f"norm (128, 2) {_in_example('batch norm (128, 2)')} %, and batch norm (128, 128) {_in_example(BASELINE)} %. A "
        "net in `example` inference cannot be folded.",
        "With 3 seeds an interval can be too narrow by chance. Repeated runs of one seed have a standard deviation of "
        f"{repeated():.2f} points (15 epochs of CIFAR-10). This alone gives an interval of "
        f"±{1.96 * repeated() * (2 / 3) ** 0.5:.1f}.",
        "No setting of a row was chosen by these runs. Learning rate and weight decay are the same in all of them.",
    ]
    return text + bullets(told)


def _both() -> str:
    return " and ".join(SHORT[data] for data in DATA)


def _listed(changes: list[Difference], *, sized: bool = False) -> str:
    return " and ".join(each.size(2) if sized else each.shown(2) for each in changes)


def _in_example(label: str) -> str:
    return " and ".join(spread(of_row(label, "example", data)) for data in DATA)


def _change(label: str, other: str, data: str = "cifar10") -> Difference:
    return difference(of_row(label, data=data), of_row(other, data=data))


def _ran(label: str, data: str) -> bool:
    settings = (score.setting for score in table.scores(round_rows("table3")))
    return any(setting.cell == data and setting.form == TABLE3[label] for setting in settings)


def of_row(label: str, mode: str = "population", data: str = "cifar10") -> Scores:
    """A row of table 3, by seed."""
    form = TABLE3[label]
    own = (score for score in table.scores(round_rows("table3")) if score.setting.cell == data)
    return next((score.accuracies(mode) for score in own if score.setting.form == form), {})


def after_long_runs(label: str, base: str = BASELINE, data: str = "cifar10") -> str:
    """Difference of two rows in `population` inference, with its number of seeds. Empty without runs."""
    own, other = of_row(label, data=data), of_row(base, data=data)
    seeds = len(set(own) & set(other))
    if not seeds:
        return ""
    return f"{difference(own, other).shown()} points ({'one seed' if seeds == 1 else f'{seeds} seeds'})"


def below(label: str) -> bool:
    """Whether a row is clearly below batch norm at 128 on both data sets."""
    return all(_change(label, BASELINE, data).below for data in DATA)


def gap_after_long_runs(label: str, data: str = "cifar10") -> Difference:
    """`batch` minus `population` inference of a row."""
    return difference(of_row(label, "batch", data), of_row(label, data=data))


COMPARED = (
    CLOSED,
    RECIPE,
    "batch norm (128, 2), recipe",
    "Moving Average Batch Norm (128, 2)",
    "group norm with standardized weights",
    "BKN (128, 2)",
    "batch norm (128, 2)",
)


def advice() -> list[list[str]]:
    """Lines for the table of advice: m, net and images, what was measured, what to use."""
    return [_advice(data) for data in DATA]


def _advice(data: str) -> list[str]:
    changes = {label: _change(label, BASELINE, data) for label in COMPARED}
    told = "; ".join(f"{label.replace(' (128, 2)', '')} {change.shown(2)}" for label, change in changes.items())
    first = COMPARED[:5]
    pairs = [(one, other, _change(one, other, data)) for one in first for other in first]
    clear = [compared(one, found, other) for one, other, found in pairs if found.above]
    use = said(
        f"BKN with a closing phase, or one of the next four: {'; '.join(clear) or 'no clear difference between them'}",
        not any(_change(label, CLOSED, data).above for label in first),
        _change(CLOSED, "BKN (128, 2)", data).above,
    )
    net = f"CIFAR Inception on {SHORT[data]}, {LONG} epochs, test"
    return ["2", net, f"against batch norm at 128: {told}", use]


def of_recipe() -> str:
    """How the recipe does after 30 epochs."""
    plain, same = ([_change(RECIPE, other, data) for data in DATA] for other in (BASELINE, STANDARDIZED))
    return (
        f"After {LONG} epochs of {_both()} ({_seeds(RECIPE)} seeds each), BKN by the recipe at m = 2 has "
        f"{_listed(plain)} points against batch norm at 128, and {_listed(same)} points against batch norm at 128 with "
        "standardized filters."
    )


def _seeds(label: str) -> int:
    (count,) = {len(of_row(label, data=data)) for data in DATA}
    return count


def in_short() -> str:
    """What the paper's table says, in a sentence or two."""
    rows = ("batch norm (128, 2)", "BKN learned (128, 2)", "BKN (128, 2)", CLOSED, "batch norm (128, 2), recipe")
    changes = [_listed([_change(label, BASELINE, data) for data in DATA]) for label in rows]
    return said(
        f"In the paper's CIFAR table, after {LONG} epochs of {_both()} at m = 2 ({_seeds(CLOSED)} seeds each), plain "
        f"batch norm has {changes[0]} points against batch norm at 128, the paper's BKN {changes[1]}, ours "
        f"{changes[2]}, and with a closing phase {changes[3]}. Batch norm by the recipe has {changes[4]}.",
        *(not _change(CLOSED, BASELINE, data).below for data in DATA),
    )


def beside_groups() -> str:
    """A sentence on BKN and batch norm on groups of 2, both by the recipe."""
    changes = [_change(RECIPE, "batch norm (128, 2), recipe", data) for data in DATA]
    return (
        f" After {LONG} epochs of {_both()}, BKN by the recipe has {_listed(changes)} points against batch norm on "
        f"groups by the recipe ({_seeds(RECIPE)} seeds)."
    )


def over_groups() -> str:
    """BKN against batch norm on the same groups, both without a closing phase, in three ways of inference."""
    modes = ("population", "batch", "example")
    own = {mode: difference(of_row("BKN (128, 2)", mode), of_row("batch norm (128, 2)", mode)) for mode in modes}
    told = ", ".join(f"{change.shown()} (`{mode}`)" for mode, change in own.items())
    return said(f"{told} points ({len(of_row('BKN (128, 2)'))} seeds)", all(each.points > 0 for each in own.values()))
