"""Figures that README and guides name in words are those of the records."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import claims
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
    rows = measured.read(measured.RECORDS / "loops-h200.csv")
    losses = {row["method"]: f"{float(row['loss']):.3f}" for row in rows}
    assert f"the losses were {losses['bkn']} unfused and {losses['bkn fused']} fused" in text("docs/performance.md")


def test_what_the_readme_says_of_cifar():
    """Above batch norm by example, beyond the spread of seeds; below it by population, within the spread."""
    bkn, bn = (scores(*line, "population") for line in (("BKN weights", 2), ("BN", 128)))
    assert f"is {statistics.mean(bn) - statistics.mean(bkn):.1f} points lower than that of batch norm" in text(
        "README.md"
    )
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


@pytest.mark.parametrize("net", ["resnet101", "bn-inception"])
def test_the_speed_table_of_the_readme(net):
    rows = measured.read(measured.RECORDS / f"steps-{net}-h200.csv")
    ratio = {(row["way"], row["setting"]): row["ratio"] for row in rows if row["method"] == "bkn"}
    columns = [ratio[way, setting] for setting in ("(32, 2)", "(32, 32)") for way in ("", "fused")]
    label = {"resnet101": "ResNet-101", "bn-inception": "BN-Inception"}[net]
    assert f"| {label} | " + " | ".join(f"{float(value):.2f}" for value in columns) + " |" in text("README.md")


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
