"""Damaged files cost a report what they hold, never the report: every other run is shown, and each loss is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from kalmannorm.cli.app import run as command
from kalmannorm.lab.comparing.summary import summarize
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Run, read_json
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.report import write
from kalmannorm.lab.report.collecting import collect
from support.report_runs import make_experiment, make_run

DEEP = '{"a":' * 3000 + "1" + "}" * 3000


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """A run that was analysed."""
    return make_run(tmp_path_factory.mktemp("made") / "one", Recipe(statistics_batch=1, epochs=2))


@pytest.fixture
def runs(one, tmp_path) -> list[Path]:
    return copies(one, tmp_path / "runs", 2)


def copies(one: Path, folder: Path, count: int) -> list[Path]:
    """So many seeds of a run, all of which count: what is wrong with them reaches every part of the page."""
    made = []
    for seed in range(count):
        home = shutil.copytree(one, folder / f"seed-{seed:02}")
        record = json.loads((home / "recipe.json").read_text())
        record["recipe"]["seed"] = seed
        (home / "recipe.json").write_text(json.dumps(record))
        made.append(home)
    return made


def changed(path: Path, **fields) -> None:
    path.write_text(json.dumps(read_json(path) | fields))


def reported(folder: Path, **options) -> tuple[str, list[str]]:
    told: list[str] = []
    page = write([folder], folder.parent / "page.html", tell=told.append, **options).read_text()
    for line in told:
        kind, place = re.match(r"(left out|read in part) (\S+):", line).groups()
        assert f"{kind.capitalize()} <strong>{place}</strong>" in page
    return page, told


LOST = [
    ("recipe.json", DEEP, "nested too deeply"),
    ("recipe.json", "1" * 5000, "damaged"),
    ("recipe.json", '{"recipe": {"method": "bqn"}}', "unknown method 'bqn'"),
    ("recipe.json", '{"recipe": {"learning_rate": NaN}}', "learning_rate cannot be nan"),
    ("recipe.json", f'{{"recipe": {{"epochs": 1{"0" * 400}}}}}', f"of at most 1e+06, got 1{'0' * 17}...0"),
    ("result.json", DEEP, "nested too deeply"),
    ("result.json", '{"accuracy": {}, "diverged": "no"}', "diverged is neither true nor false"),
]


def test_runs_that_cannot_be_read_are_left_out_and_named(one, tmp_path):
    *damaged, _ = copies(one, tmp_path / "runs", len(LOST) + 1)
    for home, (name, content, _) in zip(damaged, LOST, strict=True):
        (home / name).write_text(content)
    page, told = reported(tmp_path / "runs")
    for home, line, (_, _, why) in zip(damaged, told, LOST, strict=True):
        assert line.startswith(f"left out runs/{home.name}: ") and why in line
    assert f'href="#every-run">{len(LOST)} left out</a>' in page
    assert re.findall('<span class="place">(.*?)</span>', page) == [f"runs/seed-{len(LOST):02}"]


LINES = [
    ("{", "line 3 is no event"),
    (DEEP, "line 3 is no event"),
    ('{"event": "train"}', "line 3 has no step"),
    ('{"event": "train", "step": "7", "epoch": 1}', "line 3.step is '7', not a whole number"),
    ('{"event": "evaluate", "step": 1, "epoch": 1, "modes": [1]}', "line 3.modes is [1], not an object"),
    ('{"event": "gains", "step": 1, "epoch": 1, "gains": {"a": 1e999}}', "line 3.gains.a is inf, not a number"),
    ('{"event": "gains", "step": 1, "epoch": [], "gains": {}}', "line 3.epoch is [], not a number"),
]


def test_one_bad_line_of_a_log_costs_that_line(one, tmp_path):
    homes = copies(one, tmp_path / "runs", len(LINES))
    good = (one / "log.jsonl").read_text().splitlines()
    for home, (line, _) in zip(homes, LINES, strict=True):
        (home / "log.jsonl").write_text("\n".join([*good[:2], line, *good[2:]]) + "\n")
    _, told = reported(tmp_path / "runs")
    for home, line, found, (_, why) in zip(homes, told, collect([tmp_path / "runs"]).runs, LINES, strict=True):
        assert line.startswith(f"read in part runs/{home.name}: log.jsonl: {why}")
        assert found.state == "finished" and len(found.events) >= len(good)
        with pytest.raises(LabError, match=r"log\.jsonl is damaged \(line 3"):
            Run.read(home).events()


PARTS = [
    ("result.json", {"accuracy": {"population": "high", "batch": 98.0}}, "accuracy.population is 'high'"),
    ("result.json", {"accuracy": {"population": 1e300}}, "accuracy.population is 1e+300, not a number from 0 to 100"),
    ("result.json", {"gains": [1]}, "gains is [1], not an object"),
    ("result.json", {"steps": "many", "seconds": {}, "images_per_second": "x"}, "steps is 'many'"),
    ("result.json", {"peak_memory": -1, "parameters": 10**400, "loss": 3}, "loss is 3"),
    ("analysis/layers.json", {"layers": [{"name": "a"}, 7]}, "layers[1] is 7, not an object"),
    ("analysis/layers.json", {"layers": {}}, "layers is {}, not a list"),
    (
        "analysis/layers.json",
        {"layers": [{"name": "a", "prior_var": [1], "observed_var": [], "prior_mean": [], "observed_mean": []}]},
        "layers[0] has lists of different lengths",
    ),
    ("analysis/variance-gap.json", {"layers": [{"name": "a", "gap": []}]}, "layers[0].gap is []"),
    ("analysis/variance-gap.json", {"layers": [{"name": "a", "gap": [["x", 1]]}]}, "layers[0].gap[0] holds 'x'"),
    ("analysis/variance-gap.json", {"layers": [{"gap": [[1.0]]}]}, "layers[0] has no name"),
    ("recipe.json", {"origin": {"hardware": [["x"]]}}, "origin.hardware is [['x']]"),
    ("recipe.json", {"origin": 7}, "origin is 7"),
]


def test_a_wrong_type_costs_that_part_of_a_run(one, tmp_path):
    homes = copies(one, tmp_path / "runs", len(PARTS))
    for home, (name, fields, _) in zip(homes, PARTS, strict=True):
        changed(home / name, **fields)
    page, told = reported(tmp_path / "runs")
    for home, line, (name, _, why) in zip(homes, told, PARTS, strict=True):
        assert line.startswith(f"read in part runs/{home.name}: {name}: ") and why in line
    assert page.count('<span class="place">') == len(PARTS)


def test_what_is_wrong_with_a_result_is_one_line_elsewhere(runs):
    changed(runs[0] / "result.json", accuracy={"population": "high"})
    with pytest.raises(LabError, match=r"result\.json is damaged \(accuracy\.population is 'high'"):
        summarize([Run.read(folder) for folder in runs])


def test_a_summary_needs_no_more_than_accuracies(runs):
    (runs[0] / "result.json").write_text('{"accuracy": {"population": 98.0}}')
    (row,) = summarize([Run.read(folder) for folder in runs])
    assert row["finished"] == 2 and row["images_per_second"]["n"] == 1 and row["diverged"] == 0


EXPERIMENTS = [
    {"tables": 7, "notes": "x", "figures": {}},
    {"tables": [3, {"rows": [[1]]}, {"columns": ["a", 1], "rows": [[1, 2]]}, {"columns": ["a"], "rows": [5, [{}]]}]},
    {"tables": [{"columns": ["a"], "rows": [[{"mean": 1, "n": "x"}], [{"mean": "y"}], [[[]]], [1e400]]}]},
    {"figures": [None, 4, {"kind": []}, {"kind": "curves", "groups": [{"label": 1}], "y": "event"}]},
    {"figures": [{"kind": "variance-gap", "runs": [{"label": "x"}, {"run": 4, "label": "y"}, 7]}]},
    {"title": ["x"], "name": 3, "question": {}, "budget": "all", "stand_in": 1, "dataset": None},
]


def test_experiments_of_wrong_types_are_shown_in_part(tmp_path):
    made = make_experiment(tmp_path / "all" / "0", seeds=1)
    for number, fields in enumerate(EXPERIMENTS):
        home = made if number == 0 else shutil.copytree(made, made.with_name(str(number)))
        changed(home / "experiment.json", **fields)
    page, told = reported(tmp_path / "all")
    for number, line in enumerate(told):
        assert line.startswith(f"read in part all/{number}: experiment.json: ")
    assert len(told) == len(EXPERIMENTS) and page.count('<span class="place">') == 3 * len(EXPERIMENTS)


def test_nothing_but_damage_still_makes_a_page(tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "recipe.json").write_text(DEEP)
    page, told = reported(tmp_path / "runs")
    assert len(told) == 1 and page.rstrip().endswith("</html>")


def test_the_command_names_what_it_left_out_and_what_it_read_in_part(runs, capsys, tmp_path):
    (runs[0] / "log.jsonl").write_text("[]\n{}\n")
    (runs[1] / "recipe.json").write_text(DEEP)
    page = tmp_path / "page.html"
    assert command(["report", str(runs[0].parent), "-o", str(page), "--no-draw", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [
        "read in part runs/seed-00",
        "left out runs/seed-01",
    ]
    assert [broken["left_out"] for broken in json.loads(out)["damaged"]] == [False, True]


HOSTILE_DRAWING = (
    '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(2)</script><rect width="3"/>'
    '<foreignObject><iframe src="x"/></foreignObject><a href="javascript:alert(3)"><text>go</text></a></svg>'
)


def test_a_drawing_beside_the_page_is_as_harmless_as_that_in_it(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("kalmannorm.lab.report.plotting.images", lambda chart, title: {})
    (runs[0] / "wiring.svg").write_text(HOSTILE_DRAWING)
    reported(runs[0].parent, figures=tmp_path / "figures")
    written = (tmp_path / "figures" / "wiring-1.svg").read_text()
    assert written == '<svg xmlns="http://www.w3.org/2000/svg"><rect width="3"></rect></svg>\n'


def test_of_several_drawings_the_first_that_can_be_read_is_shown(runs):
    (runs[0] / "wiring.svg").write_text("<svg")
    page, told = reported(runs[0].parent)
    assert len(told) == 1 and "wiring.svg is damaged" in told[0]
    assert "no prior: no norm before it" in page


def test_letters_that_no_file_can_hold_are_escaped(runs, tmp_path):
    record = read_json(runs[0] / "recipe.json")
    record["recipe"]["dataset"] = "di\udc80gits\x00"
    record["origin"]["command"] = "\ud800"
    (runs[0] / "recipe.json").write_text(json.dumps(record))
    page, told = reported(runs[0].parent)
    assert told == [] and r"di\udc80gits\x00" in page
