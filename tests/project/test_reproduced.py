"""Runs of `kalmannorm reproduce cifar` become records, and docs/results.md has them beside the trials."""

from __future__ import annotations

import re
import statistics

import pytest
import reproduced
import results_reproduced
import results_table3
from scipy import stats

from kalmannorm.lab.experiments.catalogue import experiment
from kalmannorm.lab.experiments.planning import Wanted
from kalmannorm.lab.experiments.reproducing import reproduce
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.recipe import Execution


def test_a_folder_becomes_records(tmp_path):
    wanted = Wanted(
        "digits",
        budget=0.2,
        seeds=1,
        rows=("bn-128x128", "bkn-closing-128x2"),
        changes={"train_examples": 256, "test_examples": 40},
    )
    execution = Execution(device="cpu", threads=1, tensorboard=False)
    reproduce(experiment("cifar"), wanted, tmp_path, execution, jobs=1, quiet=True, page=False)
    first, second = reproduced.records(tmp_path)
    assert [first["row"], second["row"]] == ["bkn-closing-128x2", "bn-128x128"]
    assert (first["data"], first["seed"], first["epochs"]) == ("digits", 0, 4.0)
    run = Run.read(next(tmp_path.glob("*bkn-closing*")))
    assert first["accuracy"] == run.result["accuracy"]
    losses = [event["loss"] for event in run.events("train") if event["epoch"] > 3]
    assert 0 < len(losses) < len(run.events("train")) and first["loss"] == pytest.approx(statistics.fmean(losses), 1e-3)


def test_rows_of_the_lab_are_those_of_the_trials():
    """All but the wide ones, in the settings that both name."""
    arms = {arm.key: arm for arm in experiment("cifar").arms if not arm.wide}
    assert set(results_reproduced.ROWS) == set(arms)
    for key, label in results_reproduced.ROWS.items():
        form, closing = results_table3.TABLE3[label], arms[key].closing
        assert closing == (form.close if form.closing else None)
        if form.kind not in ("group", "standardized"):
            assert form.m == arms[key].setting.statistics_batch


def test_what_chance_explains():
    deviation, freedom = results_reproduced.scatter("cifar10", results_table3.TABLE3)
    rows = [results_table3.of_row(label) for label in results_table3.TABLE3]
    away = [score - statistics.fmean(own.values()) for own in rows if own for score in own.values()]
    assert freedom == len(away) - sum(map(bool, rows))
    assert deviation == pytest.approx((sum(each**2 for each in away) / freedom) ** 0.5)


@pytest.mark.parametrize(("points", "within"), [(0.0, 1), (5.0, 0)])
def test_the_table_of_the_lab(monkeypatch, points, within):
    trials = results_table3.of_row("BKN (128, 2)")
    own = [
        {
            "row": "bkn-128x2",
            "data": "cifar10",
            "seed": seed,
            "accuracy": {"population": statistics.fmean(trials.values()) + points},
            "loss": 0.0616,
            "hardware": "H200",
            "torch": "2.11.0",
            "commit": "0" * 40,
            "command": "kalmannorm reproduce cifar",
        }
        for seed in (0, 1)
    ]
    monkeypatch.setattr(results_reproduced, "read", lambda name: own)
    text = results_reproduced.reproduced()
    (line,) = re.findall(r"^\| BKN \(128, 2\) \|.*", text, re.MULTILINE)
    deviation, freedom = statistics.stdev(trials.values()), len(trials) - 1
    half = stats.t.ppf(0.975, freedom) * deviation * (1 / 2 + 1 / len(trials)) ** 0.5
    assert f"| 2 and {len(trials)} |" in line and f"| ±{half:.2f} | 0.062 |" in line
    assert f"{within} of 1 differences {'is' if within else 'are'} within it" in text
    assert ("it is open whether lab and trials agree" in text) != within
    assert ("Losses of the lab are those of the trials" in text) == (not within)
    own[0]["loss"] = 0.5
    assert "Losses of the lab" not in results_reproduced.reproduced()
