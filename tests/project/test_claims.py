"""Figures that README and guides name in words are those of the records."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import claims
import fine_tuning
import measured
import pytest
import results_evidence
import results_table3
from measured import ROOT
from results_words import Difference, difference, signed
from scipy import stats

from kalmannorm.lab.experiments import planning
from kalmannorm.lab.experiments.catalogue import experiment
from kalmannorm.lab.experiments.planning import Wanted, plan
from kalmannorm.lab.recipes.recipe import Execution
from trials import chosen, evidence

EXECUTION = Execution(device="cpu")
EXAMPLE = "tiny100 | kalman m=2 | seed=0"
"""BKN without a closing phase."""


def text(name: str) -> str:
    """Of a page, with every line break as a space."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def scores(method: str, m: int, mode: str) -> list[float]:
    """One for each seed on CIFAR-10."""
    lines = (ROOT / "docs" / "figures" / "records" / "cifar10.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if (row["method"], row["statistics_batch"]) == (method, m)]
    return [row["accuracy"][mode] for row in rows]


def test_how_close_fused_numbers_stay():
    page = measured.DOCUMENT.read_text(encoding="utf-8")
    assert claims.written(page) == page, "run python benchmarks/claims.py"
    bf16 = {row["precision"]: row for row in claims.read("fused")}["bf16"]
    for part in ("logits", "gradients"):
        errors = [bf16["error"][part], bf16["fused_error"][part]]
        assert 0.5 * min(errors) < bf16["difference"][part] < 2 * max(errors), "about as much as from float64"


def test_tables_of_fine_tuning():
    page = fine_tuning.DOCUMENT.read_text(encoding="utf-8")
    assert fine_tuning.written(page) == page, "run python benchmarks/fine_tuning.py --tables"


def test_what_the_results_say_of_8_epochs_of_cifar():
    """Above batch norm by example, beyond the spread of seeds; below it by population, within the spread."""
    bkn, bn = (scores(*line, "population") for line in (("BKN weights", 2), ("BN", 128)))
    told = f"is {statistics.mean(bn) - statistics.mean(bkn):.1f} points lower than that of batch norm"
    assert told in text("docs/results.md")
    assert stats.ttest_ind(bn, bkn, equal_var=False).pvalue > 0.05
    for mode in ("population", "batch", "example"):
        other = scores("BN", 128, mode)
        test = stats.ttest_ind(scores("BKN weights", 2, "example"), other, equal_var=False, alternative="greater")
        assert test.pvalue < 0.05


def test_shares_of_parameters_widths_and_chains():
    added = {row["model"]: row["added_share"] for row in claims.read("parameters")}
    told = f"adds {added['resnet50']} times the net's own parameters in a ResNet-50 and {added['densenet121']} times"
    assert told in text("docs/conversion.md")
    (width,) = claims.read("width")
    assert f"on digits-net {width['off_percent']} %" in text("docs/experiments.md")
    for row in claims.read("chains"):
        assert re.search(rf"{row['below']} of {row['norms']} (norms )?of {row['model']}", text("docs/families.md"))
        assert row["above"] == 0


def test_groups_of_four_and_eight():
    nets = [results_evidence.tested("cifar10"), results_evidence.tested("cifar10-resnet32")]
    fours = [
        ", ".join(f"{found[key]:.1f}" for key in (("BKN", 4), ("groups", 4))) + f" and {found['groups', 128]:.1f} %"
        for found in nets
    ]
    told = (
        "BKN, batch norm on the same groups and batch norm at 128 had "
        f"{fours[0]} with CIFAR Inception, and {fours[1]} with ResNet-32"
    )
    assert told in text("README.md")
    assert told in text("docs/should-i-use-it.md")
    above, below = (found["BKN", 8] - found["groups", 8] for found in nets)
    told = f"With two nets on CIFAR-10 BKN was {above:.1f} points above it and {-below:.1f} below (one seed)"
    assert told in text("README.md") and told in text("docs/should-i-use-it.md")


def test_the_first_page_tells_accuracy_against_m():
    first, second = results_evidence.tested("cifar10"), results_evidence.tested("cifar10-resnet32")
    groups = [[f"{found['groups', m]:.1f} %" for m in (128, 2, 1)] for found in (first, second)]
    told = "batch norm has {} at m = 128, {} at m = 2 and {} at m = 1 with CIFAR Inception, ".format(*groups[0])
    assert told + "and {}, {} and {} with ResNet-32".format(*groups[1]) in text("docs/index.md")
    closed = [[f"{found['BKN, closing phase', m]:.1f} %" for m in (2, 1)] for found in (first, second)]
    told = "has {} and {} at m = 2 and 1 with the first net, and {} and {} with the second (one seed)"
    assert told.format(*closed[0], *closed[1]) in text("docs/index.md")
    third = results_evidence.tested("tiny100")
    told = "batch norm has {:.1f} %, {:.1f} % and {:.1f} %, ".format(*(third["groups", m] for m in (128, 2, 1)))
    told += "and BKN by [the recipe](recipe.md) {:.1f} % and {:.1f} % at".format(
        *(third["BKN, recipe", m] for m in (2, 1))
    )
    assert told in text("docs/index.md")
    told = "without priors, has {:.1f} % and {:.1f} % (one seed)".format(*(third["groups, recipe", m] for m in (2, 1)))
    assert told in text("docs/index.md")


def test_how_near_group_norm_with_standardized_weights_is():
    below = [
        found["BKN, closing phase", 2] - found["standardized", 1]
        for found in (results_evidence.tested("cifar10"), results_evidence.tested("cifar10-resnet32"))
    ]
    rows = ("group norm with standardized weights", results_table3.CLOSED)
    first, second = (
        difference(*(results_table3.of_row(label, data=data) for label in rows)) for data in results_table3.DATA
    )
    told = (
        f"it was {below[0]:.1f} points below BKN at m = 2 with a closing phase with CIFAR Inception, and "
        f"{below[1]:.1f} points with ResNet-32. All of these have one seed. After [30 "
        f"epochs](results.md#the-papers-cifar-table) with CIFAR Inception it had {first.shown(2)} points against "
        f"BKN on CIFAR-10 and {second.shown(2)} on CIFAR-100 (3 seeds)."
    )
    assert told in text("docs/should-i-use-it.md")


def test_what_pages_say_of_30_epochs():
    """On CIFAR-10 and CIFAR-100."""

    def change(own: str, other: str, modes: tuple[str, str] = ("population", "population")) -> list[Difference]:
        labels = zip((own, other), modes, strict=True)
        both = [[results_table3.of_row(label, mode, data) for data in results_table3.DATA] for label, mode in labels]
        return [difference(*rows) for rows in zip(*both, strict=True)]

    plain, closed, recipe = "BKN (128, 2)", results_table3.CLOSED, results_table3.RECIPE
    first, second = (each.shown(2) for each in change(plain, closed, ("example", "population")))
    for page in ("README.md", "docs/inference.md"):
        assert f"had {first} and {second} points against `population` after " in " ".join(text(page).split())
    deciding = " ".join(text("docs/should-i-use-it.md").split())
    first, second = (each.shown(2) for each in change(recipe, results_table3.BASELINE))
    assert f"After 30 epochs of CIFAR-10 and CIFAR-100 it had {first} and {second} points against it" in deciding
    same = change(recipe, results_table3.STANDARDIZED)
    assert all(each.open for each in same), "could not be told from batch norm at 128 with standardized filters"
    moving = [each for own in (plain, closed, recipe) for each in change(own, "Moving Average Batch Norm (128, 2)")]
    assert all(each.open for each in moving), "could not be told from BKN"
    assert all(each.open for each in change(recipe, closed)), "about equal to a later closing phase"
    groups = change(recipe, "batch norm (128, 2), recipe")
    assert all(each.open for each in groups), "batch norm on groups could not be told from BKN"
    first, second = (each.shown(2) for each in groups)
    assert f"BKN had {first} points against it on CIFAR-10, and {second} on CIFAR-100" in deciding
    above = change("group norm with standardized weights", recipe)[0]
    assert f"On CIFAR-10 it was {above.size(2)} points above BKN by the recipe" in deciding and above.above


def test_what_pages_say_of_tiny_imagenet():
    (row,) = (row for row in chosen.evidence() if row["round"] == "sizes" and row["key"].startswith(EXAMPLE))
    found = results_evidence.tested("tiny100")
    told = (
        f"On Tiny-ImageNet it had {row['tested']['example']:.1f} %, `population` after a phase "
        f"{found['BKN, closing phase', 2]:.1f} %, and by the recipe {found['BKN, recipe', 2]:.1f} %"
    )
    assert told in text("README.md") and told in text("docs/inference.md")
    below = found["groups", 8] - found["BKN, closing phase", 8]
    told = f"and with a closing phase on Tiny-ImageNet {below:.1f} below (one seed)"
    assert told in text("README.md") and told in text("docs/should-i-use-it.md")


def test_the_reasons_of_the_defaults():
    page = text("docs/conversion.md")
    weights, learned = (dict(enumerate(scores(name, 2, "population"))) for name in ("BKN weights", "BKN learned"))
    long = results_table3.after_long_runs("BKN (128, 2)", "BKN learned (128, 2)").replace(" points", "")
    told = (
        f"has {difference(weights, learned).shown()} points against `learned` at m = 2 after 8 epochs (3 seeds), and "
    )
    assert told + long.replace(" (", " after 30 (") in page
    long = results_table3.after_long_runs("BKN (128, 2)", "BKN learned (128, 2)", "cifar100").replace(" points", "")
    assert f"On CIFAR-100 it has {long.replace(' (', ' after 30 (')}" in page
    first, second = (
        difference(*(results_table3.of_row("BKN (128, 2)", mode, data) for mode in ("example", "population")))
        for data in results_table3.DATA
    )
    told = f"on CIFAR-10 and CIFAR-100 at m = 2 by {first.size()} and {second.size()} points after 30 epochs (3 seeds"
    assert told in page and first.above and second.above
    nets = [results_evidence.tested("cifar10"), results_evidence.tested("cifar10-resnet32")]
    ahead = {m: [found["BKN", m] - found["BKN learned", m] for found in nets] for m in (128, 32, 8, 2, 1)}
    two, one = (" and ".join(signed(each) for each in ahead[m]) for m in (2, 1))
    large = [each for m in (8, 32, 128) for each in ahead[m]]
    told = f"{two} at m = 2, {one} at m = 1, and from m = 8 on {signed(min(large))} to {signed(max(large))} (one seed)"
    assert told in page
    found = results_evidence.scores_of("ablations-digits")

    def digits(m: int, changed: str, base: str = "BKN") -> str:
        own, other = (found[evidence.ablations(m)[label]].accuracies() for label in (changed, base))
        return difference(own, other).shown()

    assert (
        f"On digits it has {digits(2, 'BKN', 'BKN learned')} at m = 2 and {digits(1, 'BKN', 'BKN learned')} at" in page
    )
    starts = [digits(2, f"BKN, gain from {gain}") for gain in (0.2, 0.8)]
    assert f"a start at 0.1 has {digits(2, 'BKN, gain from 0.1')}, and starts at 0.2 and 0.8 cannot be told" in page
    assert f"from 0.5 ({starts[0]} and {starts[1]})" in page
    high = digits(1, "BKN, gain from 0.8"), digits(1, "BKN, gain fixed at 0.8")
    assert f"At m = 1 a start at 0.8 has {high[0]}, and a gain fixed at 0.8 {high[1]}." in page
    channels = [digits(m, "BKN, a gain for each channel") for m in (1, 2)]
    assert f"At m = 1 on digits it has {channels[0]}, at m = 2 {channels[1]}." in page
    assert f"On digits it makes no difference to accuracy ({digits(2, 'BKN, no total variance')})." in page


def ratios(record: str, **wanted: str) -> dict[str, str]:
    """Of a record of steps: time / BatchNorm by method, for the rows with these values."""
    rows = measured.read(measured.RECORDS / record)
    rows = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return {" ".join(filter(None, (row["method"], row.get("way", "")))): f"{float(row['ratio']):.2f}" for row in rows}


@pytest.mark.parametrize("way", ["eager", "make_graphed_callables"])
def test_the_speed_on_a_gpu(way):
    found = ratios("graphed-resnet101-h200.csv", way=way, m="2", shape="32x3x224x224")
    bkn, fused = found[f"bkn {way}"], found[f"bkn fused {way}"]
    row = {
        "eager": "eager loop (ResNet-101,",
        "make_graphed_callables": "ResNet-101 as above, both with `torch.cuda.make_graphed_callables`",
    }[way]
    assert re.search(rf"\| {re.escape(row)}[^|]*\| {bkn} \| {fused} \|", text("README.md"))
    assert f"{bkn} | {fused} |" in text("docs/performance.md").split("## Fusing")[0]
    if way == "eager":
        told = f"{bkn} times as long as with BatchNorm, and {fused} times after `fuse`"
        assert told in text("docs/should-i-use-it.md")


def test_the_speed_of_eager_steps_of_smaller_nets():
    page, deciding = text("docs/performance.md").split("## Fusing")[0], text("docs/should-i-use-it.md")
    for net, number in (("ResNet-50", 50), ("ResNet-18", 18)):
        rows = measured.read(measured.RECORDS / f"steps-resnet{number}-h200.csv")
        told = {" ".join(filter(None, (row["method"], row["way"]))): f"{float(row['eager_ratio']):.2f}" for row in rows}
        bkn, fused = told["bkn"], told["bkn fused"]
        assert re.search(rf"\| eager loop \({net},[^|]*\| {bkn} \| {fused} \|", page)
        assert re.search(rf"{net} it takes {bkn} times as long \({fused} after `fuse`\)", deciding)
        if number == 50:
            assert re.search(rf"\| eager loop \({net},[^|]*\| {bkn} \| {fused} \|", text("README.md"))


@pytest.mark.parametrize(
    ("row", "record", "column"),
    [
        ("ResNet-50, 2 images", "steps-resnet50-small-h200.csv", "eager_ratio"),
        ("Faster R-CNN", "detector-h200.csv", "ratio"),
    ],
)
def test_the_speed_of_other_eager_steps(row, record, column):
    rows = measured.read(measured.RECORDS / record)
    found = {f"{each.get('method', '')} {each['way']}".strip().lower(): f"{float(each[column]):.2f}" for each in rows}
    page = text("docs/performance.md").split("## Fusing")[0]
    assert re.search(rf"\| eager loop \({row}[^|]*\| {found['bkn']} \| {found['bkn fused']} \|", page)


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ("32 images", "steps-resnet50-settled-h200.csv"),
        ("2 images", "steps-resnet50-settled-small-h200.csv"),
    ],
)
def test_the_speed_of_the_recipe(row, record):
    rows = measured.read(measured.RECORDS / record)
    found = {" ".join(filter(None, (each["method"], each["way"]))): each for each in rows}
    ways = ("bkn-ws", "bkn-ws fused", "bkn-ws settled", "bkn-ws fused settled")
    for words, column in (("eager loop", "eager_ratio"), ("as a CUDA graph", "ratio")):
        told = " | ".join(f"{float(found[way][column]):.2f}" for way in ways)
        assert re.search(rf"\| {words}, {row}[^|]*\| {re.escape(told)} \|", text("docs/recipe.md"))
    if row == "32 images":
        eager, graph = (f"{float(found['bkn-ws settled'][column]):.2f}" for column in ("eager_ratio", "ratio"))
        assert f"takes {eager} times as long as with batch norm after the closing phase, and {graph} times" in text(
            "README.md"
        )


def test_the_speed_of_the_recipe_on_a_cpu():
    first, then = (ratios("steps-resnet50-settled-cpu.csv")[way] for way in ("bkn-ws", "bkn-ws settled"))
    told = f"takes {first} times as long as with BatchNorm at first, and {then} times then"
    assert told in text("docs/recipe.md")


def test_the_speed_of_graphed():
    found = ratios("graphed-resnet101-h200.csv", way="kalmannorm.graphed")
    bkn, fused = found["bkn kalmannorm.graphed"], found["bkn fused kalmannorm.graphed"]
    assert f"{bkn} | {fused} |" in text("docs/performance.md").split("## Fusing")[0]
    assert f"| ResNet-101 as above, both with `kalmannorm.graphed` | {bkn} | {fused} |" in text("README.md")


def test_what_graphed_adds_to_graphs():
    rows = measured.read(measured.RECORDS / "graphed-resnet101-h200.csv")
    ratios = [float(row["to_torchs_graphs"]) for row in rows if row["way"] == "kalmannorm.graphed"]
    ends = dict.fromkeys(f"{end:.2f}" for end in (min(ratios), max(ratios)))
    told = f"takes {' to '.join(ends)} times as long as with torch's graphs"
    assert told in text("docs/performance.md")


def test_the_memory_of_a_model_that_saves_it():
    rows = measured.read(measured.RECORDS / "memory-h200.csv")
    peaks = {row["model"]: float(row["peak_ratio"]) for row in rows if row["way"] == "BKN saving"}
    assert f"is {peaks['resnet101']:.2f} times that of batch norm in eager mode" in text("README.md")
    told = f"the peak is {min(peaks.values()):.2f} to {max(peaks.values()):.2f} of BatchNorm's"
    assert told in text("docs/memory.md")


def test_the_speed_on_a_cpu():
    found = ratios("steps-cifar-inception-nhwc-cpu.csv")
    row = rf"\| two CPU cores, x86 [^|]*\| {found['bkn']} \| {found['bkn fused']} \|"
    assert re.search(row, text("README.md"))
    assert re.search(row, text("docs/performance.md").split("## Fusing")[0])


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ("compiled (ResNet-18,", "steps-resnet18-h200.csv"),
        ("compiled (ResNet-50,", "steps-resnet50-h200.csv"),
        ('compiled with `mode="reduce-overhead"` (ResNet-18,', "steps-resnet18-reduce-overhead-h200.csv"),
    ],
)
def test_the_speed_of_compiled_steps(row, record):
    rows = measured.read(measured.RECORDS / record)
    ratios = {" ".join(filter(None, (each["method"], each["way"]))): float(each["compiled_ratio"]) for each in rows}
    bkn, fused = (f"{ratios[name]:.2f}" for name in ("bkn", "bkn fused"))
    page = text("docs/performance.md").split("## Fusing")[0]
    assert re.search(rf"\| {re.escape(row)}[^|]*\| {bkn} \| {fused} \|", page)
    told = {
        "compiled (ResNet-50,": "ResNet-50 as above, with `torch.compile`",
        'compiled with `mode="reduce-overhead"` (ResNet-18,': (
            'ResNet-18, 32 images of 224², with `torch.compile(mode="reduce-overhead")`'
        ),
    }
    if row in told:
        assert f"| {told[row]} | {bkn} | {fused} |" in text("README.md")


def test_the_memory_that_the_readme_names():
    rows = measured.read(measured.RECORDS / "steps-resnet101-h200.csv")
    peaks = [float(row["peak_ratio"]) for row in rows if row["method"] == "bkn" and row["setting"] == "(32, 2)"]
    assert {f"{peak:.2f}" for peak in peaks} == {"1.01"}
    assert "its peak memory is 1.01 times that of batch norm" in text("README.md")


def trials(form: str, m: int, *, phase: bool, rounds: tuple[str, ...]) -> set[str]:
    """Held-out accuracies of Tiny-ImageNet at the trials' usual weight decay, as texts."""
    found = set()
    for name in rounds:
        lines = (ROOT / "trials" / "records" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for row in map(json.loads, lines):
            kind = row["form"]
            if (row["cell"], kind["kind"], kind["m"], kind["closing"]) == ("tiny100", form, m, phase):
                found.add(f"{row['held_out']['population']:.1f}")
    return found


def confirmed(name: str = "confirm", cell: str = "tiny100") -> dict[tuple[str, int], list[float]]:
    """Accuracies on test images in population inference, by kind and m, in the order of seeds.

    Batch norm with standardized filters has the kind "same".
    """
    found: dict[tuple[str, int], dict[int, float]] = {}
    lines = (ROOT / "trials" / "records" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        kind = row["form"]["kind"]
        kind = "same" if kind == "batch" and row["form"].get("filters", "plain") != "plain" else kind
        if row["cell"] == cell:
            found.setdefault((kind, row["form"]["m"]), {})[row["seed"]] = row["test"]["population"]
    return {key: [scores[seed] for seed in range(5)] for key, scores in found.items() if len(scores) == 5}


def below(base: list[float], other: list[float]) -> tuple[float, float]:
    """The mean difference by seed, and half of its interval of 95 %."""
    differences = [one - two for one, two in zip(base, other, strict=True)]
    quantile = stats.t.ppf(0.975, len(differences) - 1)
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / len(differences) ** 0.5


def test_what_readme_and_results_say_of_the_trials():
    readme, page = text("README.md"), text("docs/trials.md")
    batch = trials("batch", 128, phase=False, rounds=("first",))
    kalman = trials("kalman", 2, phase=False, rounds=("first",))
    assert batch == {"59.8"} and kalman == {"55.2"}
    by = confirmed()
    assert f"| batch norm at 128 | {statistics.fmean(by['batch', 128]):.1f} |" in readme
    (two, margin_two), (one, margin_one) = (below(by["batch", 128], by["kalman", m]) for m in (2, 1))
    for key, scores in by.items():
        cells = f"| 5 | {' '.join(f'{each:.1f}' for each in scores)} | {statistics.fmean(scores):.2f} |"
        against = {("kalman", 2): (two, margin_two), ("kalman", 1): (one, margin_one)}.get(key)
        assert (cells if against is None else f"{cells} −{against[0]:.2f} ± {against[1]:.2f} |") in page
    deciding = text("docs/should-i-use-it.md")
    assert f"{59.84 - 55.2:.1f} points less accurate" in deciding and f"{two:.1f} points less accurate" in deciding


CELLS = {"tiny100": "Tiny-ImageNet", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def recipe(cell: str) -> dict[int, list[float]]:
    """Accuracies of BKN by the recipe, by m."""
    names = {2: "confirm-filters", 1: "confirm-gain"}
    return {m: confirmed(name, cell)["kalman", m] for m, name in names.items()}


def batch_norm(cell: str) -> dict[str, list[float]]:
    """Accuracies of batch norm at 128, by its filters."""
    plain = confirmed() if cell == "tiny100" else confirmed("confirm-filters", cell)
    return {"plain": plain["batch", 128], "standardized": confirmed("confirm-filters", cell)["same", 128]}


def shown(points: float, margin: float) -> str:
    sign = "+" if points > 0 else "−"
    return f"{sign}{abs(points):.2f} ± {margin:.2f}"


@pytest.mark.parametrize("cell", CELLS)
def test_the_figures_of_the_recipe(cell):
    column = list(CELLS).index(cell)
    for m, own in recipe(cell).items():
        told = shown(*below(own, batch_norm(cell)["plain"]))
        mean, cell_of = f"{statistics.fmean(own):.1f}", r" \| ([^|]*)"
        row = re.search(rf"\| \*\*BKN by the recipe, m = {m}\*\*{cell_of * 3} \|", text("README.md"))
        assert row is not None and row[1 + column] == f"{mean} ({told})"
        line = f"| 5 | {' '.join(f'{each:.1f}' for each in own)} | {statistics.fmean(own):.2f} | {told} |"
        assert line in text("docs/trials.md")
        assert f"m = {m} | 5 | {mean} ± " in text("docs/recipe.md") and told in text("docs/recipe.md")
        for filters, base in batch_norm(cell).items():
            row = re.escape(f"| m = {m}, minus batch norm at 128, {filters} filters |") + "([^|]*)\\|" * 3
            found = re.search(row, text("docs/results.md"))
            told = shown(*below(own, base))
            assert found is not None and found[1 + column].strip() == told
            assert filters == "plain" or f"{told} ({CELLS[cell]})" in text("README.md")


def test_what_the_page_for_deciding_says_of_the_recipe():
    page = " ".join(text("docs/should-i-use-it.md").split())
    against = {
        (filters, m, cell): below(own, batch_norm(cell)[filters])
        for filters in ("plain", "standardized")
        for cell in CELLS
        for m, own in recipe(cell).items()
    }
    above = {key for key, (points, margin) in against.items() if points > margin}
    under = {key for key, (points, margin) in against.items() if -points > margin}
    assert {("plain", 2, cell) for cell in CELLS} <= above
    assert "At m = 2 BKN is above batch norm at 128 with plain filters on all three" in page
    assert {key for key in above | under if key[0] == "standardized"} == {
        ("standardized", 2, "tiny100"), ("standardized", 2, "cifar10"), ("standardized", 1, "cifar100"),
    }  # fmt: skip
    assert ("standardized", 1, "cifar100") in under
    told = "BKN was above it on two of three data sets at m = 2. At m = 1 it could not be told from it on two, and was "
    assert f"{told}below it on CIFAR-100." in page
    two, one = (against["plain", m, "tiny100"][0] for m in (2, 1))
    assert f"BKN {two:.1f} points more accurate at m = 2, and {one:.1f} points at m = 1, than batch norm" in page
    groups = {cell: below(recipe(cell)[2], confirmed("confirm-filters", cell)["ghost", 2]) for cell in CELLS}
    assert all(abs(groups[cell][0]) < groups[cell][1] for cell in ("cifar10", "tiny100"))
    assert groups["cifar100"][0] > groups["cifar100"][1]
    told = f"on CIFAR-100 it was {groups['cifar100'][0]:.1f} points below BKN"
    assert f"On Tiny-ImageNet and CIFAR-10 it could not be told from BKN, and {told} (15 epochs, 5 seeds)" in page
    assert "on two of three data sets we could not tell it from BKN" in text("README.md")


@pytest.mark.parametrize("cell", CELLS)
def test_batch_norm_on_larger_groups_beside_batch_norm_at_128(cell):
    told = "recipe, could not be told from batch norm at 128 with the same filters, or was above it (3 seeds)"
    assert f"batch norm on groups of 4 and 8, with the filters and the closing phase of the {told}" in text("README.md")
    lines = (ROOT / "trials" / "records" / "confirm-groups.jsonl").read_text(encoding="utf-8").splitlines()
    for m in (4, 8):
        mine = [row for row in map(json.loads, lines) if (row["cell"], row["form"]["m"]) == (cell, m)]
        own = {row["seed"]: row["test"]["population"] for row in mine}
        assert sorted(own) == [0, 1, 2]
        base = batch_norm(cell)["standardized"]
        points, margin = below([own[seed] for seed in sorted(own)], base[: len(own)])
        assert points > -margin


def test_what_the_page_for_deciding_says_of_moving_averages():
    page = " ".join(text("docs/should-i-use-it.md").split())
    clear = []
    for cell in CELLS:
        rows = (ROOT / "trials" / "records" / "confirm-filters.jsonl").read_text(encoding="utf-8").splitlines()
        for m, own in recipe(cell).items():
            scores = {
                row["seed"]: row["test"]["population"]
                for row in map(json.loads, rows)
                if (row["cell"], row["form"]["kind"], row["form"]["m"]) == (cell, "moving", m)
            }
            assert len(scores) == 5
            points, margin = below([own[seed] for seed in scores], list(scores.values()))
            assert points > -margin, "never above BKN"
            clear.append(points > margin)
    assert (sum(clear), len(clear)) == (4, 6)
    assert "it was below BKN in four of six comparisons, and could not be told from it in two" in page


def test_what_the_pages_say_of_example_inference_after_the_recipe():
    told = "after the recipe at m = 1 it is as bad as guessing"
    assert told in text("README.md") and "recipe](recipe.md) at m = 1 it is as bad as guessing" in text("docs/faq.md")
    classes = {"tiny100": 100, "cifar10": 10, "cifar100": 100}
    lines = (ROOT / "trials" / "records" / "confirm-gain.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["form"]["m"] == 1]
    assert {row["cell"] for row in rows} == set(classes)
    for cell, count in classes.items():
        scores = [row["test"]["example"] for row in rows if row["cell"] == cell]
        assert statistics.fmean(scores) < 2 * 100 / count, cell


def test_how_right_and_how_steady_sigma_is():
    """What the page says about the figure is what the record says."""
    rows = measured.read(ROOT / "docs" / "figures" / "records" / "sigma.csv")
    page = text("docs/how-it-works.md")
    own = [row for row in rows if row["layer"] != "1"]
    biases = [-float(row["prior_bias"]) for row in own if row["method"] == "BKN weights"]
    assert f"too small, by {100 * min(biases):.0f} to {100 * max(biases):.0f} % in the layers" in page

    def over_layers(method: str, m: str, figure: str) -> float:
        squares = [float(r[figure]) ** 2 for r in own if (r["method"], r["statistics_batch"]) == (method, m)]
        return float(statistics.fmean(squares) ** 0.5)

    told = [f"by {100 * over_layers(method, '2', 'spread'):.0f} % with" for method in ("BN", "BKN weights")]
    assert f"it varies {told[0]} batch norm, and {told[1]} BKN" in page
    for m in {row["statistics_batch"] for row in own}:
        errors = [over_layers(method, m, "rms") for method in ("BN", "BKN weights")]
        spreads = [over_layers(method, m, "spread") for method in ("BN", "BKN weights")]
        assert errors[0] < errors[1] and spreads[0] > spreads[1], "farther at every m, and steadier"


def test_an_epoch_of_cifar_takes_as_long_as_recorded():
    lines = (ROOT / "docs" / "figures" / "records" / "cifar10.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    told = []
    for name in ("BN", "BKN"):
        epochs = [row["seconds"] / row["epochs"] for row in rows if row["method"].split()[0] == name]
        told.append(f"{min(epochs):.0f} to {max(epochs):.0f} s with {name}")
    assert f"an epoch took {' and '.join(told)}" in text("docs/experiments.md")


def test_the_demo_takes_as_long_as_its_runs():
    """On two cores, by the records of README's table, whose first three seeds are the demo."""
    lines = (ROOT / "docs" / "figures" / "records" / "accuracy.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [row["seconds"] for row in map(json.loads, lines) if row["seed"] < 3]
    told = f"about {sum(seconds) / 2 / 60:.0f} minutes on two"
    assert all(told in text(name) for name in ("README.md", "Makefile", "docs/lab.md"))
    assert f"its {len(seconds)} runs" in text("docs/lab.md")


def test_experiments_have_as_many_runs_as_told(monkeypatch):
    shown = SimpleNamespace(classes=1000, train_size=1_281_167, shape=(3, 32, 32))
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) × \w+ \|$", page, re.MULTILINE)
    assert len(told) == 9  # and speed, which trains nothing
    monkeypatch.setattr(planning, "_data", lambda *_: shown)
    monkeypatch.setattr(planning, "matching_width", lambda *_: 2.0)  # seconds of converting nets
    digits = plan(experiment("single-256-1"), Wanted("digits"), EXECUTION)
    assert f"`single-256-1` is {len(digits.cells)} such runs" in page
    for name, runs in told:
        assert len(plan(experiment(name), Wanted(), EXECUTION).cells) == int(runs), name


def test_logits_of_deployed_models_move_as_recorded():
    rows = measured.read(measured.RECORDS / "deploy.csv")
    largest = max(float(row[stage]) for row in rows for stage in ("converted", "fold", "onnxruntime"))
    assert f"Over {len(rows)} families of timm and torchvision, the logits move by at most {largest:.1e}".replace(
        "e-0", "e-"
    ) in text("docs/deployment.md")


def test_every_test_that_guards_a_repair_exists():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert named
    missing = [f"{file}::{name}" for file, name in named if not holds(ROOT / "tests" / file, name)]
    assert not missing


def holds(path: Path, name: str) -> bool:
    return path.exists() and f"def {name}(" in path.read_text(encoding="utf-8")
