"""Writes docs/families.md from the record of `families.py`."""

from __future__ import annotations

from typing import Any

from family_checks import CORRELATION, RATIO

Row = dict[str, Any]
LEARNED, WEIGHTS = 0.95, 0.85
"""Targets for the share of wired norms, among norms that have a norm before them."""
WHY: dict[str, str] = {}
"""Models whose prior misses a target, and the reason."""

SINGLE = """\
## Where single norms miss

A median hides the norms that are off; the column *within* counts those that meet both targets by themselves. What is
known to be approximate:

- Sums take their operands as independent. A residual and the branch computed from it are not. So the prior variance of
  long chains of sums without a norm is too small: below half of the observed one in 83 of 203 norms of
  inception_resnet_v2 and in 11 of 39 of xception41p, above twice in none
  ([record](../benchmarks/records/claims.jsonl) of `benchmarks/claims.py`).
- A mean of n positions (pooling, squeeze and excitation, attention) gets 1/√n of their variance. That lies between
  equal positions (1) and independent ones (1/n). It is a choice; no record here compares it with others.
- Max pooling leaves a belief as it is, though it raises the mean. The correlation does not show this, the *offset*
  does (vgg).
""".splitlines()


def reaches(row: Row) -> bool:
    """Whether the prior meets both targets, or there is none to judge."""
    correlated = row["correlation"] == "" or float(row["correlation"]) >= CORRELATION
    return correlated and (row["ratio"] == "" or RATIO[0] <= float(row["ratio"]) <= RATIO[1])


def shares(rows: list[Row]) -> dict[str, float]:
    """The share of wired norms, among norms that have a norm before them."""
    fed = sum(int(row["fed"]) for row in rows)
    return {kind: sum(int(row[kind]) for row in rows) / fed for kind in ("learned", "weights")}


def totals(rows: list[Row]) -> str:
    lines = []
    for library in sorted({row["library"] for row in rows}):
        own = [row for row in rows if row["library"] == library]
        fed, wired = sum(int(row["fed"]) for row in own), shares(own)
        equal = sum(row["sources"] == "equal" for row in own)
        step = sum(row["step"] == "fine" for row in own)
        good = sum(reaches(row) for row in own)
        lines.append(
            f"{library}: {len(own)} models, {sum(int(row['norms']) for row in own)} norms, {fed} with a norm before "
            f"them; wired with learned {wired['learned']:.2%}, with weights {wired['weights']:.2%}; sources as the "
            f"oracle's in {equal} of {len(own)}, training step fine in {step}, prior within its targets in {good}"
        )
    return "\n".join(lines)


def line(row: Row) -> str:
    wired = f"{row['norms']:>4} norms, {row['fed']:>4} fed, learned {row['learned']:>4}, weights {row['weights']:>4}"
    prior = f"correlation {row['correlation'] or '–':>6} ratio {row['ratio'] or '–':>6}"
    return f"{row['model']:<28} {wired}  sources {row['sources']}  step {row['step']}  {prior}  {row['seconds']} s"


def _cells(row: Row) -> str:
    share = [f"{row[kind]}" if row[kind] == row["fed"] else f"**{row[kind]}**" for kind in ("learned", "weights")]
    marks = ["=" if row["sources"] == "equal" else row["sources"], "✓" if row["step"] == "fine" else row["step"]]
    prior = [row["correlation"] or "–", row["ratio"] or "–"]
    rest = [row["offset"] or "–", f"{float(row['within']):.0%}" if row["within"] else "–"]
    if not reaches(row):
        prior = [f"**{value}**" for value in prior]
    cells = [row["family"], row["model"], row["input"], row["norms"], row["fed"], *share, *marks, *prior]
    return "| " + " | ".join(str(cell) for cell in [*cells, *rest, row["seconds"]]) + " |"


def document(rows: list[Row]) -> str:
    heading = (
        "| family | model | input | norms | fed | learned | weights | sources | step "
        "| correlation | ratio | offset | within | s |\n"
        "| --- | --- | --- | --: | --: | --: | --: | :-: | :-: | --: | --: | --: | --: | --: |"
    )
    wired = shares(rows)
    parts = [
        "# Wiring, family by family",
        "",
        "The smallest model of every timm family that has BatchNorm, and every torchvision classifier that has it,",
        "with random weights and noise images. Made by `make families` (`python benchmarks/families.py`) from",
        "[families.csv](../benchmarks/records/families.csv), which also holds versions, commit and hardware.",
        "",
        "- *fed*: norms that have a norm before them. *learned*, *weights*: how many of those have a prior; bold where",
        "  not all.",
        "- *sources*: `=` where the norms that `wiring` names are those by whose output an input has a gradient.",
        "- *step*: a training step in groups of two is finite and reaches every parameter of a wired norm.",
        "- *correlation*, *ratio*: of the prior of `weights` with what four noise images show, median over norms:",
        "  correlation of means over channels (where observed means differ by more than their sampling error: behind a",
        "  linear bottleneck all are zero), and prior variance / observed variance. Bold: outside the targets, which",
        f"  are at least {CORRELATION} and {RATIO[0]} to {RATIO[1]:g}.",
        "- *offset*: how far prior and observed means are apart, in observed deviations, median over channels and",
        "  norms. *within*: the share of norms that meet both targets by themselves.",
        "- *s*: seconds of `convert`.",
        "",
        f"Of all norms that have a norm before them, {wired['learned']:.2%} are wired with `learned` "
        f"(target {LEARNED:.0%}) and {wired['weights']:.2%} with",
        f"`weights` (target {WEIGHTS:.0%}).",
        "",
        *[f"- {text}." for text in totals(rows).splitlines()],
        "",
    ]
    lost = [row for row in rows if row["reason"]]
    if lost:
        parts += ["## Norms without a prior in `weights`", "", "| model | norms | the most common reason |"]
        parts += ["| --- | --: | --- |"]
        parts += [f"| {r['model']} | {int(r['fed']) - int(r['weights'])} of {r['fed']} | {r['reason']} |" for r in lost]
        parts += [""]
    off = [row for row in rows if not reaches(row)]
    if off:
        parts += ["## Priors outside their targets", "", "| model | correlation | ratio | why |"]
        parts += ["| --- | --: | --: | --- |"]
        for row in off:
            why = WHY.get(row["model"], "not found out")
            parts += [f"| {row['model']} | {row['correlation'] or '–'} | {row['ratio'] or '–'} | {why} |"]
        parts += [""]
    parts += [*SINGLE, ""]
    for library in ("timm", "torchvision"):
        own = [row for row in rows if row["library"] == library]
        if own:
            parts += [f"## {library}", "", heading, *[_cells(row) for row in own], ""]
    return "\n".join(parts)
