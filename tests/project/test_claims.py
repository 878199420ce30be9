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
from measured import ROOT
from scipy import stats

from kalmannorm.lab.experiments import planning
from kalmannorm.lab.experiments.catalogue import experiment
from kalmannorm.lab.experiments.planning import Wanted, plan
from kalmannorm.lab.recipes.recipe import Execution

EXECUTION = Execution(device="cpu")


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


def test_what_the_readme_says_of_cifar():
    """Above batch norm by example, beyond the spread of seeds; below it by population, within the spread."""
    bkn, bn = (scores(*line, "population") for line in (("BKN weights", 2), ("BN", 128)))
    told = f"is {statistics.mean(bn) - statistics.mean(bkn):.1f} points lower than that of batch norm"
    assert all(told in text(name) for name in ("README.md", "docs/results.md"))
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
    if "ResNet-50" in row:
        assert f"| the same with `torch.compile` | {bkn} | {fused} |" in text("README.md")


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


def confirmed(name: str = "confirm") -> dict[tuple[str, int], list[float]]:
    """Accuracies on the test images of Tiny-ImageNet in population inference, by form and m, in the order of seeds."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    lines = (ROOT / "trials" / "records" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        if row["cell"] == "tiny100" and row["form"]["kind"] in ("batch", "kalman"):
            found.setdefault((row["form"]["kind"], row["form"]["m"]), {})[row["seed"]] = row["test"]["population"]
    return {key: [scores[seed] for seed in range(5)] for key, scores in found.items() if len(scores) == 5}


def below(base: list[float], other: list[float]) -> tuple[float, float]:
    """The mean difference by seed, and half of its interval of 95 %."""
    differences = [one - two for one, two in zip(base, other, strict=True)]
    quantile = stats.t.ppf(0.975, len(differences) - 1)
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / len(differences) ** 0.5


def test_what_readme_and_results_say_of_the_trials():
    readme, page = text("README.md"), text("docs/results.md")
    batch = trials("batch", 128, phase=False, rounds=("first",))
    kalman = trials("kalman", 2, phase=False, rounds=("first",))
    assert batch == {"59.8"} and kalman == {"55.2"}
    by = confirmed()
    assert f"| batch norm at 128 | {statistics.fmean(by['batch', 128]):.1f} |" in readme
    (two, margin_two), (one, margin_one) = (below(by["batch", 128], by["kalman", m]) for m in (2, 1))
    told = (
        f"was {two:.2f} ± {margin_two:.2f} points below batch norm at 128 with m = 2, and {one:.2f} ± {margin_one:.2f}"
    )
    assert f"{told} points with m = 1" in readme
    for key, scores in by.items():
        cells = f"| 5 | {' '.join(f'{each:.1f}' for each in scores)} | {statistics.fmean(scores):.2f} |"
        against = {("kalman", 2): (two, margin_two), ("kalman", 1): (one, margin_one)}.get(key)
        assert (cells if against is None else f"{cells} −{against[0]:.2f} ± {against[1]:.2f} |") in page
    deciding = text("docs/should-i-use-it.md")
    assert f"{59.84 - 55.2:.1f} points less accurate" in deciding and f"{two:.1f} points less accurate" in deciding


def test_what_the_pages_say_of_the_recipe():
    """Standardized filters against batch norm at 128 with plain filters."""
    base = confirmed()["batch", 128]
    found = {
        ("kalman", m): confirmed(name)["kalman", m] for m, name in {2: "confirm-filters", 1: "confirm-gain"}.items()
    }
    (two, margin_two), (one, margin_one) = (below(found["kalman", m], base) for m in (2, 1))
    told = f"was {two:.2f} ± {margin_two:.2f} points above batch norm at m = 2, and {one:.2f} ± {margin_one:.2f}"
    assert f"{told} points at m = 1" in text("README.md")
    for m, (points, margin) in {2: (two, margin_two), 1: (one, margin_one)}.items():
        shown = f"+{points:.2f} ± {margin:.2f} |"
        cells = f"| 5 | {' '.join(f'{each:.1f}' for each in found['kalman', m])} | "
        assert f"{cells}{statistics.fmean(found['kalman', m]):.2f} | {shown}" in text("docs/results.md")
        assert f"m = {m} | 5 | {statistics.fmean(found['kalman', m]):.1f} ± " in text("docs/recipe.md")
        assert shown in text("docs/recipe.md")
        mean = f"{statistics.fmean(found['kalman', m]):.1f}"
        assert f"| **BKN by the recipe, m = {m}** | {mean} ({shown.removesuffix(' |')}) |" in text("README.md")
    deciding = text("docs/should-i-use-it.md")
    assert f"{two:.1f} points more accurate at m = 2, and {one:.1f} points at m = 1, than batch norm" in deciding


def test_how_far_batch_norm_on_groups_of_2_is_below_bkn():
    """Both with a closing phase up to λ = 1, each at its best setting with seed 0, on held-out images."""
    best: dict[tuple[str, str], float] = {}
    for path in (ROOT / "trials" / "records").glob("*.jsonl"):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            form = row["form"]
            whole = form["closing"] and form["top"] == 1 and not form.get("fade")
            whole = whole and form.get("filters", "plain") == "plain"
            if "held_out" in row and row["seed"] == 0 and form["m"] == 2 and whole:
                key = row["cell"], form["kind"]
                best[key] = max(best.get(key, 0), row["held_out"]["population"])
    tiny, cifar = (best[cell, "kalman"] - best[cell, "ghost"] for cell in ("tiny100", "cifar10"))
    errors = [(2 * share * (1 - share) / 5000) ** 0.5 for share in (0.5984, 0.8902)]  # of batch norm at 128
    told = (
        f"{tiny:.1f} points below BKN on Tiny-ImageNet, and {cifar:.1f} points below BKN on CIFAR-10. One standard "
        f"error of such a difference is {100 * errors[0]:.1f} and {100 * errors[1]:.1f} points"
    )
    assert all(told in text(name) for name in ("README.md", "docs/results.md", "docs/should-i-use-it.md"))


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
