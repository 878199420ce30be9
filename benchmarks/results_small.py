"""The table of docs/results.md about true small batches on CIFAR-10, with a learning rate for each method."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from measured import ABSENT, ROOT, markdown
from results_words import Row, bullets, compared, difference, mean, paragraph, said, spread

sys.path.append(str(ROOT))
from results_evidence import not_yet
from results_lab import SMALL_METHODS, SmallForm
from results_trials import origin_of

from trials import chosen, small, table
from trials.cells import CELLS
from trials.chosen import Small

CLOSING = {"bkn": 0.3, "bkn-ws": 0.02}
BATCHES = (4, 2, 1)
OTHERS = ("bn", "gn", "gn-ws", "on", "mabn")


def named(method: str) -> str:
    return SMALL_METHODS[SmallForm(method, CLOSING.get(method))]


def small_rates(rows: Sequence[Row] | None = None) -> str:
    """The block of the page, from all records unless given."""
    found = chosen.small_points(rows)
    if not found:
        return not_yet(*chosen.SMALL)
    cell = CELLS[small.CELL]
    text = paragraph(
        f"CIFAR Inception on {cell.count:,} images of CIFAR-10, {cell.epochs} epochs, scored on all test images in "
        "`population` inference. Each method has the learning rate that was best on held-out images with seed 0, of at "
        f"least {len(small.FACTORS)}. ± is the standard deviation over seeds. A dash was not run."
    )
    methods = list(small.methods(BATCHES[0]))
    lines = [[named(name), *(_shown(found, name, batch) for batch in BATCHES)] for name in methods]
    headings = ["test accuracy, % (n), learning rate", *(f"batches of {batch}" for batch in BATCHES)]
    shown = [row for point in found.values() if point is not None for row in point.score.rows.values()]
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n" + origin_of(shown, [small.CELL])
    return text + "\n" + bullets([*_sentences(found), *_missing(table.records() if rows is None else rows)])


def _missing(rows: Sequence[Row]) -> list[str]:
    done = {(row["round"], row["key"]) for row in rows if "failed" not in row}
    left = [run for run in small.RATE_RUNS if ("small", run.key) not in done]
    told = [f"{len(left)} of {len(small.RATE_RUNS)} runs of `small`"] if left else []
    told += [f"the round `{name}`" for name in chosen.SMALL[1:] if not any(each == name for each, _ in done)]
    return [f"Not run yet: {', '.join(told)}."] if told else []


Points = dict[tuple[str, int], Small | None]


def _shown(found: Points, name: str, batch: int) -> str:
    if (name, batch) not in found:
        return ABSENT
    point = found[name, batch]
    if point is None:
        return "diverged"
    scores = point.tested()
    edge = "" if point.edge is None else ", at the edge"
    return f"{spread(scores)} ({len(scores)}), {point.score.setting.rate:g}{edge}"


def ahead() -> list[list[str]]:
    """Lines of the table of advice, while Moving Average Batch Norm is ahead of both forms of BKN."""
    found, lines = chosen.small_points(), []
    for batch in BATCHES:
        own = [mean(point.tested()) for name in CLOSING if (point := found.get((name, batch))) is not None]
        moving = found.get(("mabn", batch))
        if own and moving is not None:
            edge = "" if moving.edge is None else ", the lowest or highest of the tried ones"
            scores = moving.tested()
            told = (
                f"each with a learning rate chosen on held-out images{edge}: BKN {max(own):.1f}, Moving Average Batch "
                f"Norm {mean(scores):.1f} %, {'one seed' if len(scores) == 1 else f'{len(scores)} seeds'}"
            )
            net = f"CIFAR Inception on a part of CIFAR-10, true batches of {batch}, test"
            lines.append([str(batch), net, said(told, mean(scores) > max(own)), "Moving Average Batch Norm"])
    return lines


def _sentences(found: Points) -> list[str]:
    """BKN beside the other methods, by batch. The form of BKN is chosen on held-out images."""
    told = []
    for batch in BATCHES:
        forms = [point for name in CLOSING if (point := found.get((name, batch))) is not None]
        if not forms:
            continue
        best = max(forms, key=lambda point: point.score.first)
        others = [point for name in OTHERS if (point := found.get((name, batch))) is not None]
        against = {named(other.name): difference(best.tested(), other.tested()) for other in others}
        few = {name: each for name, each in against.items() if each.half is None}
        short = ", ".join(f"{each.shown()} points against {name}" for name, each in few.items())
        parts = [f"it has {short} (fewer than 3 seeds)"] if short else []
        parts += [compared("it", each, name) for name, each in against.items() if name not in few]
        gone = [named(name) for name in OTHERS if found.get((name, batch), 0) is None]
        parts += [f"{name} diverged at every rate" for name in gone]
        told.append(f"In batches of {batch} the best form of BKN is *{named(best.name)}*: {'; '.join(parts)}.")
    if any(point is not None and point.edge is not None for point in found.values()):
        told.append("*At the edge*: no higher or lower rate was tried, so the accuracy may be too low.")
    return told
