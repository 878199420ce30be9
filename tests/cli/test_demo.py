"""`kalmannorm demo` and `compare`, from the command line to the page: what they say is what the runs found."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from kalmannorm.lab import report
from kalmannorm.lab.comparing import compare
from kalmannorm.lab.comparing.compare import FailedCellsError
from kalmannorm.lab.experiments.catalogue import RECIPE
from kalmannorm.lab.files.records import Run
from kalmannorm_command import demo as command
from kalmannorm_command.app import run
from support.lab_runs import find_runs

METHODS, SETTINGS, EXTRA = command.METHODS, command.SETTINGS, command.EXTRA


def called(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = run(list(arguments))
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """The demo with two methods, two settings and one seed; the folder and what was printed."""
    folder = tmp_path_factory.mktemp("demo") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "METHODS", ("bn", "bkn"))
        patch.setattr(command, "SETTINGS", ((64, 64), (64, 1)))
        patch.setattr(command, "EXTRA", {key: own for key, own in command.EXTRA.items() if key == ("bkn-ws", 1)})
        patch.setattr(command, "CHANGES", {**command.CHANGES, "epochs": 6.0})
        status, out, err = called("demo", "--out", str(folder), "--seeds", "1")
        assert status == 0, err
        yield folder, out


def accuracy(folder: Path, method: str, m: int) -> float:
    return Run.read(folder / f"digits-net-{method}-64x{m}-s0").result["accuracy"]["population"]


def test_batch_norm_fails_at_one_example_and_bkn_holds(small_demo):
    folder, _ = small_demo
    assert accuracy(folder, "bn", 64) > 95 and accuracy(folder, "bkn", 64) > 95
    assert accuracy(folder, "bn", 1) < accuracy(folder, "bn", 64) - 10
    assert accuracy(folder, "bkn", 1) > accuracy(folder, "bkn", 64) - 5
    assert accuracy(folder, "bkn-ws", 1) > accuracy(folder, "bkn", 64) - 5, "the recipe"


def test_it_ends_with_what_these_runs_show_and_names_the_page(small_demo):
    folder, out = small_demo
    lines = out.strip().splitlines()
    assert lines[-1] == f"The report: {folder / 'report.html'}"
    assert (folder / "report.html").is_file() and list((folder / "figures").glob("*.png"))
    sentences = lines[lines.index("", 5) + 1 : -2]
    assert 2 <= len(sentences) <= 4
    before, after = accuracy(folder, "bn", 64), accuracy(folder, "bn", 1)
    assert any(f"{before:.1f}" in line and f"{after:.1f}" in line and "(64, 1)" in line for line in sentences)


def test_the_page_has_what_analysis_found(small_demo):
    folder, _ = small_demo
    analysed = {run.folder.name for run in find_runs(folder) if run.analysis("variance-gap")}
    assert analysed == {"digits-net-bn-64x1-s0", "digits-net-bkn-64x1-s0"}
    assert {path.name.split("-64")[0] for path in (folder / "figures").glob("*-64-1-*.svg")} >= {"variance-gap"}


def test_a_second_call_keeps_everything(small_demo, monkeypatch):
    folder, out = small_demo
    monkeypatch.setattr(report, "write", unwritten)
    results = {run.folder: (run.folder / "result.json").stat().st_mtime_ns for run in find_runs(folder)}
    status, again, err = called("demo", "--out", str(folder), "--seeds", "1")
    assert status == 0
    assert "all 5 runs are already finished" in err
    assert again == out
    assert results == {run.folder: (run.folder / "result.json").stat().st_mtime_ns for run in find_runs(folder)}


def test_the_demo_compares_what_the_issue_asks(monkeypatch):
    for name, own in (("METHODS", METHODS), ("SETTINGS", SETTINGS), ("EXTRA", EXTRA)):
        monkeypatch.setattr(command, name, own)  # the small demo changes them
    assert {"bn", "brn", "gn", "bkn"} <= set(METHODS)
    assert SETTINGS == ((64, 64), (64, 2), (64, 1))
    cells = dict(command.cells_of(2))
    assert len(cells) == 38 and [recipe.seed for recipe in cells.values()] == [0] * 19 + [1] * 19
    recipe = cells["digits-net-bkn-ws-64x1-s0"]
    assert (recipe.closing_start, recipe.closing_end) == RECIPE and recipe.fade_prior and recipe.gain == 0.1
    assert cells["digits-net-bkn-ws-64x2-s1"].gain is None
    assert cells["digits-net-bn-ws-64x2-s0"].closing_end == RECIPE[1]
    assert cells["digits-net-bn-64x2-s0"].closing_start is None


def unwritten(folders, page, **options):
    """In place of `report.write`, whose figures take seconds."""
    return page


def test_compare_prints_json_alone(small_demo, monkeypatch):
    """And it knows the demo's runs for its own."""
    monkeypatch.setattr(report, "write", unwritten)
    folder, _ = small_demo
    options = ["--methods", "bn,bkn", "-s", "64,64", "-s", "64,1", "--seeds", "1", "--out", str(folder)]
    options += ["--epochs", "6", "--evaluate-every", "3"]
    status, out, err = called("compare", *options, "--json")
    assert (status, err) == (0, "")
    record = json.loads(out)
    rows = {(row["method"], row["setting"][1]): row["accuracy"]["population"]["mean"] for row in record["rows"]}
    assert rows == {(method, m): accuracy(folder, method, m) for method in ("bn", "bkn") for m in (64, 1)}
    assert record["report"] == str(folder / "report.html") and record["failed"] == {}
    # Other options in the same folder would mix what cannot be compared.
    status, _, err = called("compare", *options, "--learning-rate", "0.5")
    assert status == 2
    assert "learning_rate 0.1 there, 0.5 wanted" in err and len(err.splitlines()) == 1


def test_failures_are_told_beside_what_is_finished(small_demo, monkeypatch):
    """The table first, then what failed, and an exit status that scripts see."""
    folder, _ = small_demo
    runs = list(find_runs(folder))[:1]

    def failing(*_, **__):
        raise FailedCellsError({"one": "it fell"}, 2, runs)

    monkeypatch.setattr(report, "write", unwritten)
    monkeypatch.setattr(compare, "run_cells", failing)
    status, out, err = called("compare", "--out", str(folder))
    assert status == 1
    assert runs[0].recipe.method.upper() in out and "report.html" in out
    assert err == "kalmannorm: 1 of 2 runs failed; the same command keeps the rest and tries again:\n  one: it fell\n"
    status, out, _ = called("compare", "--out", str(folder), "--json")
    assert status == 1
    assert json.loads(out)["failed"] == {"one": "it fell"}


def test_where_nothing_could_run_only_the_reason_is_told(tmp_path, monkeypatch):
    def failing(*_, **__):
        raise FailedCellsError({"one": "no data", "two": "no data"}, 2, [])

    monkeypatch.setattr(compare, "run_cells", failing)
    assert called("compare", "--out", str(tmp_path / "none")) == (1, "", "kalmannorm: all 2 runs failed: no data\n")
    status, out, _ = called("compare", "--out", str(tmp_path / "none"), "--json")
    record = json.loads(out)
    assert (status, record["rows"], record["report"]) == (1, [], None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--methods", ","], "--methods: ',' has an empty entry: give a list such as bn,bkn"),
        (["-m", "bn,,"], "-m: 'bn,,' has an empty entry"),
        (["--methods", "bn,,bkn"], "--methods: 'bn,,bkn' has an empty entry"),
        (["--methods", "bn,xx"], "unknown method 'xx'"),
        (["--setting", "64,3"], "does not divide"),
        (["--dataset", "digitz"], "did you mean 'digits'"),
    ],
)
def test_mistakes_are_one_line(options, says):
    status, out, err = called("compare", *options)
    assert (status, out) == (2, "")
    assert says in err and len(err.splitlines()) == 1
