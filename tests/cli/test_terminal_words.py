"""What the terminal says after training: the report's names, one of a thing in the singular, and warnings first."""

from __future__ import annotations

from pathlib import Path

import pytest

from kalmannorm.lab import report
from kalmannorm.lab.files.records import Run, read_json, write_json
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm_command.app import run as command
from kalmannorm_command.compare import _show
from kalmannorm_command.progress import result_table
from support.report_runs import make_run


def ended(folder: Path, method: str, score: float, **fields) -> Run:
    recipe = Recipe(method=method, statistics_batch=1, **fields)
    home = make_run(folder / recipe.name, recipe)
    result = read_json(home / "result.json")
    write_json(home / "result.json", result | {"accuracy": dict.fromkeys(result["accuracy"], score)})
    return Run.read(home)


@pytest.mark.parametrize(("method", "name"), [("bkn", "BKN (64, 1)"), ("gn", "GN (64, –)")])
def test_one_step_of_one_epoch(tmp_path, capsys, method, name):
    run = ended(tmp_path, method, 98.0, epochs=1)
    result_table(run.recipe, run.result | {"steps": 1}, run.folder)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"digits-net, {name}, 1 epoch"
    assert last.startswith("1 step in 0.8 s")


def test_a_comparison_that_shows_nothing_yet_says_so_before_its_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "write", lambda folders, page, **options: page)  # whose figures take seconds
    runs = [ended(tmp_path, method, score, epochs=1) for method, score in (("bn", 10.0), ("bkn", 30.0))]
    _show(runs, tmp_path, {}, as_json=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[:3] == [
        "All runs were trained for 14 steps (1 epoch): too short to compare.",
        "1 of 2 runs ends at chance level (10 %) in every way of inference: BN (64, 1).",
        "Test accuracy in % by way of inference, 1 epoch, mean ± standard deviation of the runs",
    ]
    assert len(lines) == 3 + 4 + 1  # the table, and where the report is: nothing is compared


def test_an_experiments_help_does_not_lead_to_three_steps(capsys):
    assert command(["reproduce", "--help"]) == 0
    assert "0.05" not in capsys.readouterr().out
