"""The paper's ten experiments: each runs end to end on digits, and its record holds what the paper's table needs."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kalmannorm.lab.analysis.analyse import analyse
from kalmannorm.lab.comparing import compare
from kalmannorm.lab.errors import DivergedError, LabError
from kalmannorm.lab.experiments import planning, reproducing
from kalmannorm.lab.experiments.catalogue import EXPERIMENTS, experiment
from kalmannorm.lab.experiments.planning import Wanted
from kalmannorm.lab.experiments.reproducing import Reproduced, reproduce
from kalmannorm.lab.experiments.widths import batchnorm_parameters, learned_parameters, matching_width
from kalmannorm.lab.files.records import Log, Run, read_json, write_json
from kalmannorm.lab.recipes.recipe import Execution
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run as command
from support.wide import narrow

EXECUTION = Execution(device="cpu", tensorboard=False)


def in_process(cells, folder, execution, *, jobs=None, cluster=None, quiet=False, analyse=()):
    """Cells one after another, without worker processes: these take a moment each."""
    for name, recipe in cells:
        try:
            train(recipe, folder / name, EXECUTION, resume=True)
        except DivergedError:
            continue
        if name in analyse:
            _analyse(folder / name)
    return [Run.read(folder / name) for name, _ in cells]


def _analyse(folder):
    return analyse(folder, device="cpu")


def few_steps(name: str) -> Wanted:
    """Two epochs of two steps of the experiment's largest gradient batch."""
    small = {"train_examples": EXAMPLES.get(name, 256), "test_examples": 40}
    return Wanted("digits", budget=0.1, seeds=1, changes=small)


EXAMPLES = {
    "moderate": 512,
    "micro-256-4": 512,
    "single-256-1": 512,
    "small-64-8": 128,
    "small-16-4": 32,
    "small-8-2": 16,
}


def reproduced(name: str, wanted: Wanted, folder: Path, runner, **options) -> Reproduced:
    """Without its page: that is the report's own test."""
    return reproduce(experiment(name), wanted, folder, EXECUTION, runner=runner, quiet=True, page=False, **options)


def column(table: dict, heading: str, **where: str) -> list:
    """The cells under a heading, of rows whose other cells are as `where` says."""
    at = table["columns"].index(heading)
    chosen = [
        row for row in table["rows"] if all(row[table["columns"].index(key)] == value for key, value in where.items())
    ]
    return [row[at] for row in chosen]


def paper(table: dict, heading: str, **where: str) -> list:
    """What the paper says, in the column beside ours."""
    at = table["columns"].index(heading) + 1
    assert table["columns"][at] == "paper"
    return column({**table, "columns": [*table["columns"][:at], "it", *table["columns"][at + 1 :]]}, "it", **where)


def is_accuracy(cell) -> bool:
    return isinstance(cell, dict) and 0 <= cell["mean"] <= 100 and cell["n"] >= 1


def test_there_are_ten_and_each_has_its_question_and_source():
    names = "moderate micro-256-4 single-256-1 small-64-8 small-16-4 small-8-2 cifar speed parameters variance-gap"
    assert list(EXPERIMENTS) == names.split()
    for each in EXPERIMENTS.values():
        assert each.question.endswith("?") and each.source.split()[0] in ("table", "figure")
        keys = {arm.key for arm in each.arms}
        assert len(keys) == len(each.arms)
        assert {number.arm for number in each.published} <= keys
        assert {claim.over for claim in each.claims} <= keys


ACCURACIES = {
    "moderate": ("(256, 32)", ["BN", "BKN learned", "BKN"]),
    "micro-256-4": ("(256, 4)", ["BN", "BKN learned", "BKN"]),
    "single-256-1": ("(256, 1)", ["BN", "BRN", "BKN learned", "BKN"]),
    "small-64-8": ("(64, 8)", ["BN", "BKN learned", "BKN"]),
    "small-16-4": ("(16, 4)", ["BN", "BRN", "BKN learned", "BKN"]),
    "small-8-2": ("(8, 2)", ["BN", "BRN", "BKN learned", "BKN"]),
    "cifar": (
        "(128, 2)",
        [
            *("BN", "BN wide", "BKN learned", "BKN", "BKN, closing phase", "BKN + WS, closing phase"),
            *("BN, closing phase", "BN + WS, closing phase", "BRN", "MABN"),
        ],
    ),
}
ALONE = {"cifar": ["GN", "GN + WS"]}
"""Methods without a statistics batch. Elsewhere group norm."""
MISSING = {"BRN": {"example"}, "MABN": {"batch", "example"}}
"""Ways of inference that a method does not have."""


def check_accuracies(name: str, table: dict) -> None:
    """Every method of the paper, and ours, in every way of inference that it has."""
    setting, methods = ACCURACIES[name]
    alone = f"{setting.partition(',')[0]}, –)"  # group norm has no statistics batch
    assert column(table, "method", setting=setting) == methods
    assert column(table, "method", setting=alone) == ALONE.get(name, ["GN"])
    for mode, title in EXPERIMENTS[name].columns:
        for method, cell in zip(methods, column(table, title, setting=setting), strict=True):
            has_mode = mode not in MISSING.get(method, ())
            assert is_accuracy(cell) if has_mode else cell is None, (method, mode)
        for cell in column(table, title, setting=alone):
            assert is_accuracy(cell) if mode == "population" else cell is None, mode


def check_moderate(record: dict, folder: Path) -> None:
    """The paper's numbers, and the steps to the baseline."""
    accuracies, claims, steps = record["tables"]
    assert paper(accuracies, "population", method="BN") == [73.1]
    assert paper(accuracies, "population", method="BKN learned") == [74.0]
    assert column(claims, "BKN in the paper") == [0.9]
    assert paper(steps, "steps") == [170_000, 100_000, None, None]
    assert paper(steps, "fewer steps, %", method="BKN learned") == [41.2]
    assert column(steps, "seeds that reach it", method="BN") == ["1 of 1"]
    assert column(steps, "fewer steps, %", method="BN") == [None]


def check_micro(record: dict, folder: Path) -> None:
    """Beside the moderate baseline."""
    table = record["tables"][0]
    assert column(table, "setting", method="BN baseline") == ["(256, 32)"]
    assert is_accuracy(column(table, "population", method="BN baseline")[0])
    assert paper(table, "population", method="BN baseline") == [73.1]
    assert paper(table, "population", method="BKN learned") == [70.04]
    labels = [group["label"] for group in record["figures"][0]["groups"]]
    assert labels[:2] == ["BN baseline (256, 32)", "BN (256, 4)"]


def check_single(record: dict, folder: Path) -> None:
    """Both options."""
    accuracies, claims = record["tables"]
    assert paper(accuracies, "A: batch", method="BKN learned") == [47.99]
    assert paper(accuracies, "B: population", method="BKN learned") == [0.4]
    assert column(claims, "over") == ["BN (256, 1)", "BRN (256, 1)"]
    assert column(claims, "BKN in the paper") == [2.11, 2.75] and column(claims, "inference") == ["batch", "batch"]
    assert [figure["mode"] for figure in record["figures"]] == ["batch", "population"]
    assert "GN (256, –)" not in [group["label"] for group in record["figures"][0]["groups"]]


def check_small(record: dict, folder: Path) -> None:
    """The learning rate goes with the gradient batch."""
    recipes = [Run.read(path.parent).recipe for path in folder.glob("*/recipe.json")]
    assert {recipe.learning_rate / recipe.gradient_batch for recipe in recipes} == {0.1 / 64}


def check_cifar(record: dict, folder: Path) -> None:
    """Batch and moving statistics, against the baseline; closing phases, and an epoch of warm-up for group norm."""
    table = record["tables"][0]
    assert column(table, "setting") == [*["(128, 128)"] * 3, *["(128, 2)"] * 10, *["(128, –)"] * 2]
    assert paper(table, "batch mean/var", setting="(128, 2)")[:4] == [90.0, None, 90.9, None]
    assert paper(table, "moving mean/var")[:6] == [92.1, None, None, 89.4, None, 90.9]
    assert table["columns"][-1] == "parameters", "the paper's are not of CIFAR-10"
    counts = dict(zip(column(table, "method"), column(table, "parameters"), strict=True))
    assert counts["BN"] < counts["BN wide"] and counts["BKN"] == counts["BKN, closing phase"]
    recipes = [Run.read(path.parent).recipe for path in folder.glob("*/recipe.json")]
    phases = {
        recipe.method: (recipe.closing_start, recipe.closing_end, recipe.fade_prior)
        for recipe in recipes
        if recipe.closing_start is not None
    }
    assert phases == {
        "bkn": (0.3, 0.6, False),
        "bkn-ws": (0.02, 0.12, True),
        "bn": (0.05, 0.35, False),
        "bn-ws": (0.02, 0.12, False),
    }
    assert {recipe.method for recipe in recipes if recipe.warmup_epochs} == {"gn", "gn-ws"}


def test_cifar_takes_the_papers_numbers_of_each_data_set():
    cifar = experiment("cifar")
    assert cifar.paper("bkn-learned-128x2", "population", "inception", "cifar100") == 67.3
    assert cifar.paper("bkn-learned-128x2", "batch", "inception", "cifar100") is None
    assert cifar.paper("bkn-learned-128x2", "population", "inception", "cifar10") == 90.9
    assert cifar.paper("bn-wide-128x2", "population", "inception", "cifar100") == 63.1
    assert cifar.paper("bn-wide-128x2", "population", "inception", "cifar10") is None


def check_speed(record: dict, folder: Path) -> None:
    """Images per second, and the ratio to batch norm round by round."""
    (table,) = record["tables"]
    assert column(table, "method", setting="(32, 32)") == ["BN", "BKN learned", "BKN"]
    assert paper(table, "images/s")[:2] == [325.74, 320.94]
    assert paper(table, "speed relative to BN")[1] == 0.985
    assert {len(seconds) for seconds in record["timings"].values()} == {3}
    assert column(table, "speed relative to BN")[0] == {"mean": 1.0, "std": 0.0, "n": 3}
    bn, learned = record["timings"]["bn-32x32"], record["timings"]["bkn-learned-32x32"]
    ratio = sum(b / k for b, k in zip(bn, learned, strict=True)) / 3
    assert column(table, "speed relative to BN")[1]["mean"] == pytest.approx(ratio)
    assert column(table, "images/s")[0]["mean"] == pytest.approx(sum(32 / s for s in bn) / 3)
    assert not list(folder.glob("*/recipe.json"))


def check_parameters(record: dict, folder: Path) -> None:
    """As many in the widened net as in the one with BKN, as nearly as whole channels allow."""
    table = record["tables"][0]
    counts = dict(zip(column(table, "method"), column(table, "parameters"), strict=True))
    assert counts["BN"] == counts["BN baseline"] < counts["BN wide"] == counts["BN baseline, wide"]
    off = counts["BN wide"] / counts["BKN learned"] - 1
    assert abs(off) < 0.02
    assert any("parameters compared with BKN learned" in note for note in record["notes"]) == (abs(off) > 0.01)
    assert counts["BKN"] == counts["BN"] + 4  # a gain for each norm but the first
    assert all(is_accuracy(cell) for cell in column(table, "moving mean/var"))
    assert paper(table, "moving mean/var", method="BN wide") == [63.1]


def test_the_papers_net_is_widened_to_within_a_percent():
    net = "cifar-inception", 100, (3, 32, 32)
    width, wanted = matching_width(*net), learned_parameters(*net)
    assert abs(batchnorm_parameters(net[0], width, *net[1:]) / wanted - 1) <= 0.01
    assert batchnorm_parameters(net[0], 1.0, *net[1:]) < 0.9 * wanted


def check_variance_gap(record: dict, folder: Path) -> None:
    """The matrices of BN beside those of BKN."""
    figure = next(figure for figure in record["figures"] if figure["kind"] == "variance-gap")
    assert [run["label"] for run in figure["runs"]] == ["BN (128, 2)", "BKN learned (128, 2)", "BKN (128, 2)"]
    overall, layers = record["tables"][-2:]
    for one in figure["runs"]:
        found = read_json(folder / one["run"] / "analysis" / "variance-gap.json")
        assert found["examples"] == found["of"] == 256
        assert len(found["layers"]) == 5
        for layer in found["layers"]:
            assert layer["batches"] == 128 and len(layer["gap"]) == layer["channels"]
            assert all(len(row) == 128 and all(map(math.isfinite, row)) for row in layer["gap"])
        statistics = read_json(folder / one["run"] / "analysis" / "layers.json")["layers"]
        assert [layer["gain"] is None for layer in statistics] == [True, *[one["label"].startswith("BN")] * 4]
    assert column(overall, "method") == ["BN", "BKN learned", "BKN"]
    spreads = {
        name: column(overall, "spread over groups", method=name)[0]["mean"] for name in column(overall, "method")
    }
    assert spreads["BKN"] < spreads["BN"]
    assert len(layers["rows"]) == 5 and all(cell["mean"] > 0 for row in layers["rows"] for cell in row[1:])


CHECKS = {
    "moderate": check_moderate,
    "micro-256-4": check_micro,
    "single-256-1": check_single,
    "small-64-8": check_small,
    "small-16-4": check_small,
    "small-8-2": check_small,
    "cifar": check_cifar,
    "speed": check_speed,
    "parameters": check_parameters,
    "variance-gap": check_variance_gap,
}


QUICK = ("single-256-1", "moderate", "variance-gap")


@pytest.mark.parametrize("name", narrow(EXPERIMENTS, [name for name in QUICK if name in EXPERIMENTS]))
def test_experiment(name, tmp_path):
    """End to end on digits: the record says on what terms it ran, and holds what the paper's table or figure needs."""
    done = reproduced(name, few_steps(name), tmp_path / name, in_process)
    record, folder = done.record, done.folder
    assert read_json(folder / "experiment.json") == json.loads(json.dumps(record))
    assert record["name"] == name and record["stand_in"] is True
    assert record["dataset"] == "digits" and record["models"] == ["digits-net"] and record["budget"] == 0.1
    assert record["origin"]["torch"] and "a stand-in" in record["notes"][0]
    for group in [group for figure in record["figures"] for group in figure.get("groups", [])]:
        assert group["runs"] and all((folder / run / "result.json").is_file() for run in group["runs"])
    if name in ACCURACIES:
        check_accuracies(name, record["tables"][0])
    CHECKS[name](record, folder)


def told(curves: dict[str, list[tuple[int, float]]]):
    """A runner that writes logs and results with these accuracies, by (method, seed)."""

    def runner(cells, folder, execution, *, jobs=None, cluster=None, quiet=False, analyse=()):
        for name, recipe in cells:
            points = curves[f"{recipe.method}-{recipe.seed}"]
            write_json(folder / name / "recipe.json", {"recipe": recipe.to_json()})
            log = Log(folder / name / "log.jsonl")
            for step, accuracy in points:
                log.write("evaluate", step=step, epoch=step / 10, modes={"population": {"accuracy": accuracy}})
            log.close()
            result = {"accuracy": {"population": points[-1][1]}, "parameters": 1, "diverged": points[-1][1] < 20}
            write_json(folder / name / "result.json", result)

    return runner


def test_steps_to_accuracy_gains_and_divergence_are_counted_seed_by_seed(tmp_path):
    curves = {
        "bn-0": [(10, 50.0), (20, 70.0), (30, 80.0), (40, 79.0)],
        "bn-1": [(10, 50.0), (20, 60.0), (30, 70.0), (40, 90.0)],
        "bkn-learned-0": [(10, 60.0), (20, 80.0), (30, 81.0), (40, 82.0)],
        "bkn-learned-1": [(10, 60.0), (20, 80.0), (30, 81.0), (40, 84.0)],
        "bkn-0": [(10, 85.0), (20, 86.0), (30, 87.0), (40, 88.0)],
        "bkn-1": [(10, 95.0), (20, 96.0), (30, 97.0), (40, 10.0)],
        "gn-0": [(40, 70.0)],
        "gn-1": [(40, 70.0)],
    }
    wanted = Wanted("digits", seeds=2)
    record = reproduced("moderate", wanted, tmp_path / "told", told(curves)).record
    accuracies, claims, steps = record["tables"]
    assert column(accuracies, "population", method="BN") == [{"mean": 84.5, "std": pytest.approx(11 / 2**0.5), "n": 2}]
    assert column(steps, "accuracy to reach, %", method="BN")[0]["mean"] == pytest.approx(
        85.0
    )  # the best, not the last
    assert column(steps, "steps", method="BN")[0]["mean"] == pytest.approx(35.0)
    assert column(steps, "seeds that reach it") == ["2 of 2", "1 of 2", "2 of 2", "0 of 2"]
    assert column(steps, "steps", method="BKN learned") == [{"mean": 20.0, "std": None, "n": 1}]
    assert column(steps, "fewer steps, %", method="BKN learned")[0]["mean"] == pytest.approx(100 / 3)
    assert column(steps, "fewer steps, %", method="BKN")[0]["mean"] == pytest.approx((200 / 3 + 75) / 2)
    assert column(steps, "steps", method="GN") == [None]
    assert column(claims, "BKN learned")[0]["mean"] == pytest.approx((3 - 6) / 2)
    assert "digits-net with BKN (256, 32) on digits: 1 of 2 seeds diverged." in record["notes"]


def test_a_claim_made_early_in_the_training_is_compared_there(tmp_path):
    """The paper compares (16, 4) after 240,000 steps, a tenth of the way."""
    curve = {name: [(10 * i, start + i) for i in range(1, 11)] for name, start in (("bn-0", 40.0), ("bkn-0", 45.0))}
    curve["brn-0"] = curve["gn-0"] = curve["bn-0"]
    curve["bkn-learned-0"] = [(step, accuracy + (9 if step == 10 else 1)) for step, accuracy in curve["bn-0"]]
    wanted = Wanted("digits", seeds=1)
    record = reproduced("small-16-4", wanted, tmp_path / "told", told(curve)).record
    claims = record["tables"][1]
    assert column(claims, "after training") == ["9%"]
    assert column(claims, "BKN learned")[0]["mean"] == pytest.approx(9)
    assert column(claims, "BKN")[0]["mean"] == pytest.approx(5)


def test_what_finished_is_recorded_where_other_cells_fail(tmp_path):
    def failing(cells, folder, execution, **_):
        told({"bn-0": [(1, 50.0)]})(cells[:1], folder, execution)
        raise compare.FailedCellsError({"x": "it broke"}, len(cells), [])

    done = reproduced("small-64-8", Wanted("digits", seeds=1), tmp_path / "x", failing)
    assert "it broke" in str(done.failure)
    record = read_json(tmp_path / "x" / "experiment.json")
    assert column(record["tables"][0], "population", method="BN") == [{"mean": 50.0, "std": None, "n": 1}]
    assert "digits-net with BKN learned (64, 8) on digits: 0 of 1 seed finished." in record["notes"]


def test_resume_insists_that_there_is_something_to_go_on_with(tmp_path):
    curves = {f"{method}-0": [(1, 50.0)] for method in ("bn", "bkn-learned", "bkn", "gn")}
    wanted = Wanted("digits", seeds=1)
    with pytest.raises(LabError, match="nothing to resume"):
        reproduced("small-64-8", wanted, tmp_path / "x", told(curves), resume=True)
    first = reproduced("small-64-8", wanted, tmp_path / "x", told(curves))
    again = reproduced("small-64-8", wanted, tmp_path / "x", told(curves), resume=True)
    assert first.record["tables"] == again.record["tables"]


def test_a_data_set_with_two_nets_has_both_beside_the_papers(monkeypatch, tmp_path):
    shown = SimpleNamespace(classes=10, train_size=50_000, shape=(3, 32, 32))
    monkeypatch.setattr(planning, "_data", lambda *_: shown)
    curves = {f"{method}-0": [(10, 50.0), (20, 60.0)] for method in ("bn", "bkn-learned", "bkn", "gn")}
    record = reproduced("moderate", Wanted("cifar10", seeds=1), tmp_path / "x", told(curves)).record
    accuracies, claims, steps = record["tables"]
    assert record["models"] == ["cifar-inception", "cifar-resnet-32"]
    assert paper(accuracies, "population", model="cifar-resnet-32") == [77.4, 78.3, None, None]
    assert paper(steps, "steps", model="cifar-resnet-32") == [None] * 4
    assert column(claims, "model") == record["models"]
    assert [figure["title"].split()[0] for figure in record["figures"]] == record["models"]


def test_the_command_prints_tables_and_names_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproducing, "reproduce", functools.partial(reproduce, runner=in_process))
    monkeypatch.setenv("COLUMNS", "200")
    options = "--budget 0.1 --seeds 1 --paper-only --train-examples 128 --test-examples 20 --device cpu"
    assert command(["reproduce", "small-64-8", "--dataset", "digits", *options.split()]) == 0
    shown = capsys.readouterr().out
    for words in ("figure 5 of the paper", "a stand-in", "66.02", "BKN learned", "The page: runs/small-64-8-digits"):
        assert words in shown, words
    assert "</html>" in Path("runs/small-64-8-digits/report.html").read_text()
    options = options.replace("--paper-only", "--rows bkn-learned-64x8")
    assert command(["reproduce", "small-64-8", "--dataset", "digits", *options.split(), "--out", "one"]) == 0
    shown = capsys.readouterr().out  # no table of gains, because the row that it compares with is not here
    assert "66.02" in shown and "63.66" not in shown and "Gain over another method" not in shown
    assert re.search(r"--rows chose 1 of \d rows", " ".join(shown.split()))
    assert command(["reproduce", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in EXPERIMENTS)
    assert command(["reproduce", "modrate"]) == 2
    assert "did you mean 'moderate'" in capsys.readouterr().err


def test_runs_that_are_too_short_have_no_gains(tmp_path):
    done = reproduced("small-64-8", few_steps("small-64-8"), tmp_path / "short", in_process)
    (gains,) = (table for table in done.record["tables"] if table["title"].startswith("Gain"))
    assert gains["columns"][-2:] == ["BKN learned", "BKN"]
    assert all(row[-2:] == [None, None] for row in gains["rows"]) and "too short" in gains["note"]
