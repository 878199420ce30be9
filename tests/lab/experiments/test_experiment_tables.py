"""Tables of experiments read alike in the terminal and on the page, and warn where they show nothing yet."""

from __future__ import annotations

import re

import pytest

from kalmannorm.lab.experiments.catalogue import EXPERIMENTS, experiment
from kalmannorm.lab.experiments.planning import Wanted
from kalmannorm.lab.experiments.reproducing import reproduce
from kalmannorm.lab.files.records import write_json
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.recipes.recipe import Execution
from kalmannorm.lab.report import write
from kalmannorm.lab.report.columns import texts
from kalmannorm.lab.report.tables import brought
from kalmannorm.lab.words.spread import Spread
from kalmannorm.lab.words.wording import number, plus_minus, unbroken
from kalmannorm_command.reproduce import _show


def over_seeds(mean: float, std: float | None = None) -> dict:
    return {"mean": mean, "std": std, "n": 1 if std is None else 3}


@pytest.mark.parametrize(
    ("heading", "cells", "shown"),
    [
        ("accuracy", [over_seeds(9.9, 0.23), over_seeds(10.4, 2.01), None], ["9.9 ± 0.2", "10.4 ± 2.0", "–"]),
        ("gain", [over_seeds(1.711, 3.739), over_seeds(-0.372, 1.634)], ["1.7 ± 3.7", "−0.4 ± 1.6"]),
        ("gap", [over_seeds(0.0534, 0.0021), over_seeds(0.3412, 0.0043)], ["0.053 ± 0.002", "0.341 ± 0.004"]),
        ("accuracy", [over_seeds(9.9), over_seeds(74.26)], ["9.9", "74.3"]),
        ("accuracy", [over_seeds(74.26), over_seeds(74.0, 0.3)], ["74.3", "74.0 ± 0.3"]),
        ("gain", [over_seeds(-0.372)], ["−0.37"]),
        ("images/s", [over_seeds(3021.4, 103.2)], ["3,021 ± 103"]),
        ("paper", [47.99, 74.0, 0.4, 170_000, None], ["47.99", "74.0", "0.4", "170,000", "–"]),
        ("BKN in the paper", [0.9, 2.23], ["0.9", "2.23"]),
        ("parameters", [1281167, 5], ["1,281,167", "5"]),
        ("steps", [10.0, 12.0], ["10", "12"]),
        ("x", ["BN", True, [1]], ["BN", "yes", "–"]),
    ],
)
def test_decimals_follow_the_spread_and_the_papers_are_as_printed(heading, cells, shown, capsys, monkeypatch):
    """In the terminal as on the page."""
    table = {"title": "t", "columns": ["row", heading], "rows": [["r", cell] for cell in cells], "note": ""}
    assert [row[1] for row in texts(table)] == shown
    assert re.findall(r"<td[^>]*>([^<]*)</td>", brought(table)) == shown
    monkeypatch.setenv("COLUMNS", "100")
    _show({"title": "", "source": "", "stand_in": False, "warnings": [], "notes": [], "tables": [table]}, None)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line[2:].strip() for line in lines if line.startswith("r ")] == shown


def test_mean_and_spread_are_to_one_place():
    assert plus_minus(Spread(0.0534, 0.0021, 3)) == "0.053 ± 0.002"
    assert number(-3.0, 1) == "−3.0"
    assert unbroken("At (64, 1) it is 97.9 ± 0.2 %, so") == "At (64,\u00a01) it is 97.9\u00a0±\u00a00.2\u00a0%, so"


def test_a_method_has_one_name():
    for each in EXPERIMENTS.values():
        for arm in each.arms:
            title = METHODS[arm.method].title + ", closing phase" * (arm.closing is not None)
            assert arm.name == title or (arm.method == "bn" and arm.name.startswith("BN ")), arm
            assert ("–" in arm.label) is (arm.method in ("gn", "gn-ws"))


def ending_at(scores: dict[str, float], steps: int):
    """A runner whose cells end with these accuracies, by method."""

    def runner(cells, folder, execution, **_):
        for name, recipe in cells:
            write_json(folder / name / "recipe.json", {"recipe": recipe.to_json()})
            found = dict.fromkeys(METHODS[recipe.method].modes, scores[recipe.method])
            result = {"accuracy": found, "parameters": 1, "steps": steps, "diverged": False}
            write_json(folder / name / "result.json", result)

    return runner


def reproduced(folder, scores: dict[str, float], steps: int, budget: float = 1.0) -> dict:
    wanted = Wanted("digits", seeds=2, budget=budget)
    runner = ending_at(scores, steps)
    return reproduce(
        experiment("small-64-8"), wanted, folder, Execution(), runner=runner, quiet=True, page=False
    ).record


def test_an_experiment_that_shows_nothing_yet_says_so_first(tmp_path, capsys):
    record = reproduced(tmp_path, {"bn": 10.0, "bkn-learned": 12.5, "bkn": 40.0, "gn": 9.9}, 3, budget=0.05)
    assert record["warnings"] == [
        "All runs were trained for 3 steps (1 epoch): too short to compare.",
        "6 of 8 runs end at chance level (10 %) in every way of inference: "
        "BN (64, 8); GN (64, –); BKN learned (64, 8).",
    ]
    claims = record["tables"][1]
    ours = claims["columns"].index("BKN learned")
    assert claims["columns"][ours:] == ["BKN learned", "BKN"] and claims["rows"][0][ours:] == [None, None]
    _show(record, None)
    lines = capsys.readouterr().out.splitlines()
    assert "of the paper" in lines[0] and lines[1] == record["warnings"][0]
    page = write([tmp_path], tmp_path / "page.html").read_text().replace("\u00a0", " ")
    assert page.index(record["warnings"][1]) < page.index(record["question"])
    assert "does not differ" not in page and "The best at" not in page


def test_an_experiment_that_shows_something_does_not_warn(tmp_path):
    record = reproduced(tmp_path, {"bn": 80.0, "bkn-learned": 85.0, "bkn": 90.0, "gn": 70.0}, 280)
    assert record["warnings"] == []
    assert [cell["mean"] for cell in record["tables"][1]["rows"][0][-2:]] == [5.0, 10.0]


def test_a_title_is_not_broken_to_the_width_of_its_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    title = "A title that is longer than the table below it, of 896 test images"
    table = {"title": title, "columns": ["a"], "rows": [["b"]], "note": ""}
    _show({"title": "", "source": "", "stand_in": False, "warnings": [], "notes": [], "tables": [table]}, None)
    assert title in capsys.readouterr().out
