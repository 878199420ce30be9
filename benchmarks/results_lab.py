"""The tables of docs/results.md from runs of the lab: digits and CIFAR-10, fine-tuning, true small batches."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from measured import ABSENT, ROOT, markdown
from results_words import (
    Difference,
    Row,
    Scores,
    bullets,
    difference,
    origin,
    paragraph,
    said,
    signed,
    spread,
    standard_error,
)

FIGURES = "docs/figures/records"
CIFAR, BY_SIZE, DIGITS = f"{FIGURES}/cifar10.jsonl", f"{FIGURES}/digits-by-size.jsonl", f"{FIGURES}/accuracy.jsonl"
TUNING, SMALL = "benchmarks/records/fine-tuning.jsonl", "benchmarks/records/small-batches.jsonl"
TRANSFER = "benchmarks/records/transfer.jsonl"
MODES = ("population", "batch", "example")
REPEAT = "kalmannorm compare -d digits -s 64,1 -m bn,bkn --seeds 3 --epochs 15 --device cpu --threads 1"
"""A row of the table of digits that takes minutes on two CPU cores."""
DIGITS_IMAGES = 896
"""Test images of digits."""
CIFAR_TRAINED, CIFAR_TESTED = 4000, 2000
"""Images of CIFAR-10 in true small batches."""
METHODS = {"BN": "batch norm", "BRN": "batch renorm", "GN": "group norm", "BKN learned": "BKN learned"}
METHODS |= {"BKN weights": "BKN", "BKN, recipe": "BKN, recipe", "BN, recipe": "batch norm, recipe"}
METHODS |= {"MABN": "Moving Average Batch Norm"}


def read(name: str) -> list[Row]:
    lines = Path(ROOT, name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def scores(rows: Iterable[Row], method: str, m: int, mode: str) -> Scores:
    """By seed. The first record of a seed counts, as in the figure."""
    found: dict[int, float] = {}
    for row in rows:
        if (row["method"], row["statistics_batch"]) == (method, m) and mode in row["accuracy"]:
            found.setdefault(row["seed"], row["accuracy"][mode])
    return found


def cifar(method: str, m: int, mode: str) -> Scores:
    return scores(read(CIFAR), method, m, mode)


def digits(method: str, m: int, mode: str) -> Scores:
    return scores(read(BY_SIZE) + read(DIGITS), method, m, mode)


def above(scores_of: Callable[[str, int, str], Scores], m: int, mode: str, base: int | None = None) -> Difference:
    """BKN at m minus batch norm at `base`, which is m unless given."""
    return difference(scores_of("BKN weights", m, mode), scores_of("BN", base or m, mode))


def cifar_table() -> str:
    rows = read(CIFAR)
    base = cifar("BN", 128, "population")
    lines = []
    for label, method, m in (
        ("batch norm (128, 128)", "BN", 128),
        ("batch norm (128, 2)", "BN", 2),
        ("group norm", "GN", 128),
        ("group norm, warmed up", "GN warmed up", 128),
        ("BKN learned (128, 2)", "BKN learned", 2),
        ("BKN (128, 2)", "BKN weights", 2),
    ):
        found = [cifar(method, m, mode) for mode in MODES]
        cells = [spread(by_seed) if by_seed else "" for by_seed in found]
        against = "" if (method, m) == ("BN", 128) else difference(found[0], base).shown()
        if method == "GN":  # a mean of runs that learn and runs that do not would say nothing
            cells[0], against = "; ".join(f"{score:.1f}" for score in found[0].values()), ""
        lines.append([label, str(len(found[0])), *cells, against])
    headings = ["test accuracy, %", "n", *MODES, "population, difference to batch norm (128, 128)"]
    text = "\n".join(markdown(headings, lines, 1)) + "\n\n"
    return text + origin(rows, CIFAR) + "\n" + bullets(_cifar_sentences())


def _cifar_sentences() -> list[str]:
    same = [above(cifar, 2, mode) for mode in MODES]
    large = {mode: above(cifar, 2, mode, 128) for mode in MODES}
    group = cifar("GN", 128, "population")
    stuck = [score for score in group.values() if score == 10.0]
    warmed = difference(cifar("GN warmed up", 128, "population"), cifar("BN", 2, "population"))
    return [
        said(
            f"At m = 2, BKN is {min(d.points for d in same):.1f} to {max(d.points for d in same):.1f} points more "
            "accurate than batch norm with the same groups, in each of the three inferences.",
            *(each.above for each in same),
        ),
        said(
            f"In `example` inference BKN at (128, 2) is {large['example'].size()} points more accurate than batch norm "
            "at (128, 128).",
            large["example"].above,
        ),
        said(
            f"In `population` inference the mean of BKN at (128, 2) is {-large['population'].points:.1f} points lower "
            "than that of batch norm at (128, 128). With 3 seeds we cannot tell whether this difference is real.",
            large["population"].open and large["population"].points < 0,
            len(cifar("BN", 128, "population")) == 3,
        ),
        said(
            "Group norm uses groups of channels, so it does not depend on m. Without a warm-up of the learning rate it "
            f"did not learn with {len(stuck)} of {len(group)} seeds: the accuracy stayed at 10 %, as by guessing. With "
            f"one epoch of warm-up it is {warmed.size()} points above batch norm at m = 2. With 3 seeds this may be "
            "chance.",
            len(stuck) > 0,
            warmed.points > 0 and warmed.open,
        ),
    ]


def digits_table() -> str:
    rows = read(BY_SIZE) + read(DIGITS)
    sizes = sorted({row["statistics_batch"] for row in read(BY_SIZE)}, reverse=True)
    seeds = [len(digits("BN", m, "population")) for m in sizes]
    lines = []
    for mode in MODES:
        for method, label in METHODS.items():
            found = [digits(method, m, mode) for m in sizes]
            if any(found):
                lines.append([mode, label, *(spread(by_seed) if by_seed else ABSENT for by_seed in found)])
    headings = ["inference", "test accuracy, %", *(f"m = {m}, n = {n}" for m, n in zip(sizes, seeds, strict=True))]
    text = "\n".join(markdown(headings, lines, 2)) + "\n\n"
    repeat = sum(row["seconds"] for row in read(DIGITS)) / 2 / 60
    text += origin(read(BY_SIZE), BY_SIZE, ["python docs/figures/measure.py sizes"])
    text += "\n" + origin(read(DIGITS), DIGITS, ["python docs/figures/measure.py"]) + "\n"
    text += paragraph(
        f"Seeds 0 to 2 come from the first command, at m = {', '.join(map(str, sizes))}. Seeds 3 and 4, and all "
        "seeds of the rows with fewer columns, come from the second, at m = 64, 2 and 1. To repeat a row on two CPU "
        f"cores, run the second command: its {len(read(DIGITS))} runs take about {repeat:.0f} minutes. It writes the "
        "record again."
    )
    one = [row for row in read(BY_SIZE) if row["statistics_batch"] == 1 and row["method"] in ("BN", "BKN weights")]
    assert sorted(row["seed"] for row in one) == [0, 0, 1, 1, 2, 2], "the seeds of the command"
    shown = [spread(scores(read(BY_SIZE), method, 1, "population")) for method in ("BN", "BKN weights")]
    text += "\n" + paragraph(
        f"For batch norm and BKN at m = 1 alone: `{REPEAT}`. Its {len(one)} runs take about "
        f"{sum(row['seconds'] for row in one) / 2:.0f} seconds on two CPU cores. The first record has "
        f"{shown[0]} and {shown[1]} % for these seeds in `population` inference. Another CPU or another version rounds "
        "differently, which changes single runs."
    )
    assert {row["epochs"] for row in rows} == {15.0}
    return text + "\n" + bullets(_digits_sentences(sizes))


def _digits_sentences(sizes: list[int]) -> list[str]:
    one = {mode: above(digits, 1, mode) for mode in MODES}
    batch = {m: above(digits, m, "batch").points for m in sizes}
    better = [m for m in sizes if batch[m] > 0]
    others = {(mode, m): above(digits, m, mode) for mode in ("population", "example") for m in sizes if m > 1}
    largest = max(others, key=lambda key: abs(others[key].points))
    group = difference(digits("GN", 64, "population"), digits("BKN weights", 64, "population"))
    return [
        said(
            f"At m = 1, BKN is {one['population'].size()} points more accurate than batch norm in `population` "
            f"inference, and {one['example'].size()} points in the other two.",
            *(each.above for each in one.values()),
            one["batch"] == one["example"],
        ),
        said(
            f"In `batch` inference BKN is more accurate at m = {', '.join(map(str, better))}: by "
            f"{min(batch[m] for m in better):.1f} to {max(batch[m] for m in better):.1f} points.",
            set(better) == {m for m in sizes if m < 64},
        ),
        said(
            f"In the other cases the means of BKN and batch norm differ by at most {abs(others[largest].points):.1f} "
            f"points. This is at m = {largest[1]}, where batch norm is the more accurate one. So plain batch norm on "
            "groups is enough there.",
            others[largest].points < 0,
            abs(others[largest].points) < 1,
        ),
        said(
            f"Group norm is {group.size()} points less accurate than BKN at m = 64.",
            group.below,
        ),
    ]


def _commands(rows: list[Row]) -> list[str]:
    """As they are called from the repository's root."""
    return [re.sub("^python (benchmarks/)?", "python benchmarks/", row["command"]) for row in rows]


TUNED = [
    "batch norm", "batch norm, closing phase", "batch norm, closing phase, present 0.5", "BKN", "BKN, calibrated",
    "BKN, closing phase", "BKN, calibrated, closing phase", "BKN, calibrated, closing phase, present 0.5",
]  # fmt: skip


PRESENT = TUNED[-1], TUNED[2]
"""BKN and batch norm on groups, each in its best form for fine-tuning."""


def tuned(net: str, form: str, m: int) -> Scores:
    rows = (row for row in read(TUNING) if row["kind"] == "fine-tuning")
    return {row["seed"]: row["accuracy"] for row in rows if (row["net"], row["form"], row["m"]) == (net, form, m)}


def tuning_table() -> str:
    rows = read(TUNING)
    nets = list(dict.fromkeys(row["net"] for row in rows))
    columns = [(net, m) for net in nets for m in (2, 1)]
    names = list(dict.fromkeys([*TUNED, *(row["form"] for row in rows if row["kind"] == "fine-tuning")]))
    lines = []
    for form in names:
        cells = [_tuned_cell(tuned(net, form, m), tuned(net, "batch norm", 64)) for net, m in columns]
        lines.append([form, *cells])
    base = ", ".join(f"{spread(tuned(net, 'batch norm', 64))} for {net}" for net in nets)
    before = ", ".join(f"{next(row['trained'] for row in rows if row['net'] == net):.1f} for {net}" for net in nets)
    headings = ["test accuracy, % (n), difference to m = 64", *(f"{net}, m = {m}" for net, m in columns)]
    text = paragraph(
        f"Batch norm at m = 64 has {base} (mean ± standard deviation, 3 seeds). Before fine-tuning: {before}."
    )
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n" + origin(rows, TUNING, _commands(rows))
    return text + "\n" + bullets(_tuning_sentences(nets))


def _tuned_cell(found: Scores, base: Scores) -> str:
    return f"{spread(found)} ({len(found)}), {difference(found, base).shown()}" if found else ABSENT


def _tuning_sentences(nets: list[str]) -> list[str]:
    present = {
        (net, form, m): difference(tuned(net, form, m), tuned(net, "batch norm", 64))
        for net in nets
        for form in TUNED
        if "present" in form
        for m in (2, 1)
    }
    largest = max(abs(each.points) for each in present.values())
    bare = [
        [difference(tuned(net, form, 1), tuned(net, "batch norm", 64)).points for form in ("batch norm", "BKN")]
        for net in nets
    ]
    worse = [f"{signed(batch)} and {signed(bkn)} points on {net}" for net, (batch, bkn) in zip(nets, bare, strict=True)]
    pairs = [
        difference(
            tuned(net, "BKN, calibrated, closing phase, present 0.5", m),
            tuned(net, "batch norm, closing phase, present 0.5", m),
        )
        for net in nets
        for m in (2, 1)
    ]
    return [
        said(
            "With a closing phase and `present=0.5`, both norms end within "
            f"{largest:.1f} points of batch norm at m = 64. No interval excludes 0.",
            all(abs(each.points) <= each.half for each in present.values() if each.half is not None),
        ),
        said(
            "With `present=0.5`, BKN and plain batch norm on groups are as good as each other: their difference is "
            f"between {signed(min(each.points for each in pairs))} and {signed(max(each.points for each in pairs))} "
            "points, and every interval contains 0. So batch norm on groups, the simpler norm, is enough there.",
            all(abs(each.points) <= (each.half or 0) for each in pairs),
        ),
        said(
            "Without a closing phase the accuracy falls at m = 1. The differences of batch norm and BKN to m = 64 are "
            f"{', and '.join(worse)}.",
            all(each < 0 for pair in bare for each in pair),
        ),
    ]


def transferred(form: str, m: int) -> Scores:
    return {row["seed"]: row["accuracy"] for row in read(TRANSFER) if (row["form"], row["m"]) == (form, m)}


def transfer_table() -> str:
    """Fine-tuning on other data."""
    rows = read(TRANSFER)
    base, forms = transferred("batch norm", 32), [form for form in TUNED if transferred(form, 2)]
    lines = [[form, *(_tuned_cell(transferred(form, m), base) for m in (2, 1))] for form in forms]
    text = paragraph(
        f"Batch norm at m = 32 has {spread(base)} ({len(base)} seeds). A difference is by seed, with the interval of "
        f"95 %. One standard error of an accuracy on 5,000 images is {standard_error(72, 5000):.1f} points at 72 %."
    )
    headings = ["test accuracy, % (n), difference to m = 32", "m = 2", "m = 1"]
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n" + origin(rows, TRANSFER, _commands(rows))
    return text + "\n" + bullets(_transfer_sentences(base))


def present_on_other_data(base: Scores) -> dict[tuple[str, int], Difference]:
    """By norm and m: the forms with `present`, against batch norm at 32."""
    forms = dict(zip(("BKN", "groups"), PRESENT, strict=True))
    return {(name, m): difference(transferred(form, m), base) for name, form in forms.items() for m in (2, 1)}


def _transfer_sentences(base: Scores) -> list[str]:
    found = present_on_other_data(base)
    bare = difference(transferred("BKN", 1), base), difference(transferred("batch norm", 1), base)
    return [
        said(
            "Calibrated BKN with a closing phase and `present=0.5` is as good as batch norm at m = 32: "
            f"{found['BKN', 2].shown()} points at m = 2, and {found['BKN', 1].shown()} points at m = 1.",
            not any(found["BKN", m].above or found["BKN", m].below for m in (2, 1)),
            all(abs(found["BKN", m].points) < 0.5 for m in (2, 1)),
        ),
        said(
            f"Batch norm on groups of 1, trained in the same way, is below: {found['groups', 1].shown()} points.",
            found["groups", 1].below,
        ),
        said(
            f"Without a closing phase both norms lose much at m = 1: {bare[0].shown()} and {bare[1].shown()} points.",
            all(each.points < -10 for each in bare),
        ),
    ]


class SmallForm(NamedTuple):
    """A method in true small batches: the fields of `Form` in small_batches.py."""

    method: str
    closing: float | None = None
    gain: float | None = None
    rate: float = 1.0


HIGHER = 4.0
"""The other factor of the learning rate that was tried."""
SMALL_METHODS = {
    SmallForm("bn"): "batch norm",
    SmallForm("bn", 0.3): "batch norm, closing phase",
    SmallForm("bkn"): "BKN",
    SmallForm("bkn", 0.3): "BKN, closing phase",
    SmallForm("bkn-ws", 0.02): "BKN, standardized filters, early closing phase, fading prior",
    SmallForm("bkn", None, 0.05): "BKN, gain from 0.05",
    SmallForm("bkn", None, 0.1): "BKN, gain from 0.1",
    SmallForm("bkn", None, 0.2): "BKN, gain from 0.2",
    SmallForm("bkn", 0.3, 0.1): "BKN, gain from 0.1, closing phase",
    SmallForm("bkn-ws", 0.02, 0.1): "BKN, gain from 0.1, standardized filters, early closing phase, fading prior",
    SmallForm("bn-ws", 0.02): "batch norm, standardized filters, early closing phase",
    SmallForm("mabn"): "Moving Average Batch Norm",
    SmallForm("on"): "Online Normalization",
    SmallForm("gn"): "group norm",
    SmallForm("gn-ws"): "group norm, standardized weights",
}
SMALL_METHODS |= {
    form._replace(rate=HIGHER): f"{words}, {HIGHER:g} times the learning rate" for form, words in SMALL_METHODS.items()
}


def small_rows(data: str = "digits") -> list[Row]:
    """Records of true small batches. The first ones, of digits, do not name their data."""
    return [row for row in read(SMALL) if row.get("data", "digits") == data]


def _form_of(row: Row) -> SmallForm:
    return SmallForm(row["method"], row["closing"], row.get("gain"), row.get("rate", 1.0))


def small(form: SmallForm, batch: int, mode: str = "population", data: str = "digits") -> Scores:
    rows = (row for row in small_rows(data) if (_form_of(row), row["batch"]) == (form, batch))
    return {row["seed"]: row["accuracy"][mode] for row in rows if "accuracy" in row}


def small_tables() -> str:
    """Of digits, then of CIFAR-10 as far as it was run."""
    text = _small_table("digits", DIGITS_IMAGES, "97 90") + "\n" + bullets(_small_sentences())
    if not small_rows("cifar10"):
        return text
    text += "\n" + paragraph(
        f"ResNet-20 on {CIFAR_TRAINED:,} images of CIFAR-10, four epochs, scored on {CIFAR_TESTED:,} test images. The "
        "learning rate is 0.1 / 128 times the batch for all methods, or four times that."
    )
    return text + "\n" + _small_table("cifar10", CIFAR_TESTED, "40") + "\n" + bullets(_small_cifar_sentences())


def _small_cifar_sentences() -> list[str]:
    """One seed each."""
    four, two, one = (
        {form: statistics.fmean(found.values()) for form in SMALL_METHODS if (found := small_on_cifar(form, batch))}
        for batch in (4, 2, 1)
    )
    moving, bkn, batch, group = SmallForm("mabn"), SmallForm("bkn", 0.3), SmallForm("bn"), SmallForm("gn")
    best, ours, alone = (
        max(value for form, value in each.items() if form.method.startswith("bkn") and form.rate == 1)
        for each in (four, two, one)
    )
    told = []
    for size, each in ((2, two), (1, one)):
        higher = {form: value for form, value in each.items() if form.rate == HIGHER}
        order = sorted(higher, key=higher.__getitem__, reverse=True)
        shown = "; ".join(f"{SMALL_METHODS[form._replace(rate=1.0)]} {higher[form]:.1f} %" for form in order)
        told += [f"With {HIGHER:g} times this learning rate, in batches of {size}: {shown}."] if shown else []
    return [
        said(
            "Moving Average Batch Norm learns fastest at the lower rate: in batches of 2 it has "
            f"{two[moving]:.1f} %, and the best form of BKN {ours:.1f} %. In batches of 1 they have {one[moving]:.1f} "
            f"and {alone:.1f} %.",
            two[moving] > ours + 3,
            one[moving] > alone + 2,
        ),
        said(
            "At this rate the best form of BKN is above batch norm and group norm at every size: it has "
            f"{best:.1f}, {ours:.1f} and {alone:.1f} % in batches of 4, 2 and 1. Batch norm has {four[batch]:.1f}, "
            f"{two[batch]:.1f} and {one[batch]:.1f} %, group norm {four[group]:.1f}, {two[group]:.1f} and "
            f"{one[group]:.1f} %. In batches of 1, BKN with plain filters is below group norm: {one[bkn]:.1f} %.",
            best > max(four[batch], four[group]),
            ours > max(two[batch], two[group]),
            alone > one[group] > one[bkn] > one[batch],
        ),
        *told,
    ]


def small_on_cifar(form: SmallForm, batch: int) -> Scores:
    return small(form, batch, data="cifar10")


def _small_table(data: str, images: int, accuracies: str) -> str:
    rows = small_rows(data)
    sizes = sorted({row["batch"] for row in rows}, reverse=True)
    found_forms = {_form_of(row) for row in rows}
    forms = [form for form in SMALL_METHODS if form in found_forms]
    assert len(forms) == len(found_forms)
    lines = []
    for form in forms:
        cells = []
        for batch in sizes:
            found = small(form, batch, data=data)
            failed = any(row["batch"] == batch and _form_of(row) == form for row in rows)
            cells.append(f"{spread(found)} ({len(found)})" if found else "failed" if failed else ABSENT)
        lines.append([SMALL_METHODS[form], *cells])
    headings = ["test accuracy, % (n)", *(f"batches of {size}" for size in sizes)]
    errors = [f"{standard_error(float(at), images):.1f} points at {at} %" for at in accuracies.split()]
    text = paragraph(
        f"One standard error of an accuracy on {images:,} images is {', and '.join(errors)}. It does not include the "
        "spread over seeds. A dash was not run."
    )
    text += "\n" + "\n".join(markdown(headings, lines, 1)) + "\n\n"
    return text + origin(rows, SMALL, _commands(rows))


def _small_sentences() -> list[str]:
    def of(method: str, batch: int, closing: float | None = None, gain: float | None = None) -> float:
        return statistics.fmean(small(SmallForm(method, closing, gain), batch).values())

    moving, lower = small(SmallForm("mabn"), 1), small(SmallForm("bkn", 0.3, 0.1), 1)
    early = difference(small(SmallForm("bkn-ws", 0.02, 0.1), 1), small(SmallForm("bkn-ws", 0.02), 1))
    lower_gains = [of("bkn", 1, gain=gain) for gain in (0.05, 0.1, 0.2)]
    gained = difference(small(SmallForm("bkn", None, 0.1), 1), small(SmallForm("bkn"), 1))
    return [
        said(
            f"In batches of 1, Moving Average Batch Norm has {of('mabn', 1):.1f} %, BKN with a closing phase "
            f"{of('bkn', 1, 0.3):.1f} %, Online Normalization {of('on', 1):.1f} %, BKN without a phase "
            f"{of('bkn', 1):.1f} %, and batch norm {of('bn', 1):.1f} %.",
            of("mabn", 1) > of("bkn", 1, 0.3) > of("on", 1) > of("bkn", 1) > of("bn", 1),
        ),
        said(
            f"A gain from 0.1 instead of 0.5 helps BKN with plain filters in batches of 1: it then has "
            f"{of('bkn', 1, gain=0.1):.1f} % without and {of('bkn', 1, 0.3, 0.1):.1f} % with a closing phase. Without "
            f"a phase this is {gained.size()} points more. With a phase it cannot be told from Moving Average Batch "
            f"Norm ({difference(lower, moving).shown()} points). With standardized filters and an early phase it makes "
            f"no clear difference ({early.shown()} points). Three gains were compared on these test images: without a "
            f"phase, BKN has {', '.join(f'{each:.1f}' for each in lower_gains)} % with a gain from 0.05, 0.1 and 0.2.",
            gained.above,
            not difference(lower, moving).below,
            early.open,
        ),
        said(
            f"In batches of 2, Moving Average Batch Norm has {of('mabn', 2):.1f} %, BKN {of('bkn', 2):.1f} % without "
            f"and {of('bkn', 2, 0.3):.1f} % with a closing phase, and batch norm {of('bn', 2):.1f} %. With a gain from "
            f"0.1 BKN has {of('bkn', 2, gain=0.1):.1f} and {of('bkn', 2, 0.3, 0.1):.1f} %.",
            of("mabn", 2) > of("bkn", 2) > of("bkn", 2, 0.3) > of("bn", 2),
            abs(of("bkn", 2) - of("bkn", 2, gain=0.1)) < 0.5,
        ),
        said(
            f"In batches of 4, all methods except group norm are between {min(_four(of)):.1f} and "
            f"{max(_four(of)):.1f} %.",
            max(of("gn", 4), of("gn-ws", 4)) < min(_four(of)),
        ),
        said(
            f"Both group norms learn slowly here: {of('gn-ws', 4):.1f} and {of('gn', 4):.1f} % in batches of 4. The "
            "learning rate was the same for all methods, and these runs are short.",
            max(of("gn-ws", 4), of("gn", 4)) < 90,
        ),
    ]


def _four(of: Callable[..., float]) -> list[float]:
    forms = [form for form in SMALL_METHODS if not form.method.startswith("gn") and small(form, 4)]
    return [of(form.method, 4, form.closing, form.gain) for form in forms]
