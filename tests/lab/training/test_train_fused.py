"""`--fuse` in the lab: the same run in fewer passes. Numbers, checkpoints and what reads a run stay as they were."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal

import pytest
import torch
from torch.nn import functional as F

from kalmannorm.lab.analysis.analyse import analyse
from kalmannorm.lab.comparing.compare import run_cells
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.experiments import speed
from kalmannorm.lab.experiments.catalogue import experiment
from kalmannorm.lab.experiments.planning import Wanted, plan
from kalmannorm.lab.export import export
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.evaluate import evaluate
from kalmannorm.lab.training.loading import load_run
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run as command
from support import lab_runs
from support.wide import narrow, wide

PLAIN = Execution(device="cpu", log_every=1, tensorboard=False)
FUSED = dataclasses.replace(PLAIN, fuse=True)
EXACT = Recipe(gradient_batch=32, epochs=3, train_examples=128, test_examples=64, evaluate_every=0, precision="float64")
"""Twelve steps, in which a difference in meaning shows and rounding does not."""


def trained(recipe, folder, execution=FUSED, **options):
    train(recipe, folder, execution, **options)
    return folder


def assert_same_run(one, other, tolerance=1e-10):
    """Losses of all steps, scores, weights, running statistics and their counts."""
    torch.testing.assert_close(lab_runs.losses(one), lab_runs.losses(other), rtol=tolerance, atol=tolerance)
    results = [Run.read(folder).result for folder in (one, other)]
    near = max(10 * tolerance, 1e-6)  # scores are summed in float32
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=near, abs=near)
    left, right = lab_runs.weights(one), lab_runs.weights(other)
    assert list(left) == list(right)
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=100 * tolerance, atol=100 * tolerance, msg=name)


@functools.cache
def _unfused(root, recipe):
    return trained(recipe, root / recipe.digest, PLAIN)


@pytest.fixture(scope="module")
def unfused(tmp_path_factory):
    """Runs without --fuse, each trained once."""
    return functools.partial(_unfused, tmp_path_factory.mktemp("unfused"))


@pytest.mark.parametrize("method", narrow(["bkn", "bkn-learned", "bn", "brn"], ["bkn", "brn"]))
def test_same_numbers_and_no_relu_by_itself(unfused, tmp_path, monkeypatch, method):
    recipe = dataclasses.replace(EXACT, method=method)
    expected = unfused(recipe)
    told, calls = [], []
    relu = F.relu

    def counted(*args, **kwargs):
        calls.append(1)
        return relu(*args, **kwargs)

    def watch(event):
        told.append(event)
        if event["event"] == "fuse":  # from here on: fusing itself runs the model as it was
            monkeypatch.setattr(F, "relu", counted)

    folder = trained(recipe, tmp_path / "run", watch=watch)
    assert told[0] == {"event": "fuse", "text": "5 of 5 norms fused: 5 with ReLU"}
    assert not calls
    assert Run.read(folder).record["execution"]["fuse"] is True
    assert_same_run(folder, expected)


def test_sums_are_fused_too(unfused, tmp_path):
    """A small net with shortcuts."""
    told = []
    recipe = dataclasses.replace(EXACT, model="timm/test_resnet", gradient_batch=8, train_examples=32, epochs=1)
    folder = trained(recipe, tmp_path / "run", watch=told.append)
    assert told[0]["text"] == "12 of 15 norms fused: 8 with ReLU, 4 with sum and ReLU"
    assert_same_run(folder, unfused(recipe), 1e-8)  # maps of one pixel: groups of two values amplify rounding


@pytest.mark.parametrize(
    ("changes", "execution", "tolerance"),
    [
        ({}, {"micro_batch": 8}, 1e-10),
        pytest.param({"channels_last": True}, {}, 1e-10, marks=wide),
        pytest.param({"finish_epochs": 1}, {}, 1e-10, marks=wide),
        ({"finish_epochs": 1, "method": "brn", "statistics_batch": 1}, {}, 1e-10),
        pytest.param({"precision": "float32"}, {}, 1e-4, marks=wide),
        ({"precision": "bf16", "channels_last": True, "learning_rate": 0.01}, {}, 1e-2),
    ],
    ids=["micro-batch", "channels-last", "finish", "finish-brn-1", "float32", "bf16-channels-last"],
)
def test_same_numbers_however_it_runs(unfused, tmp_path, changes, execution, tolerance):
    recipe = dataclasses.replace(EXACT, **changes)
    folder = trained(recipe, tmp_path / "run", dataclasses.replace(FUSED, **execution))
    assert_same_run(folder, unfused(recipe), tolerance)


@wide
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # what dynamo meets
def test_same_numbers_compiled(unfused, tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    recipe = dataclasses.replace(EXACT, method="bn", epochs=1)
    folder = trained(recipe, tmp_path / "run", dataclasses.replace(FUSED, compile=True))
    assert_same_run(folder, unfused(recipe))


@wide
def test_same_numbers_over_ranks(unfused, tmp_path):
    options = ["--setting", "32,2", "--learning-rate", "0.1", "--epochs", "3", "--precision", "float64", "--fuse"]
    options += ["--train-examples", "128", "--test-examples", "64", "--evaluate-every", "0", "--log-every", "1"]
    done = lab_runs.kalmannorm("train", *options, "--out", str(tmp_path / "run"), ranks=2)
    assert done.stderr.count("5 of 5 norms fused: 5 with ReLU") == 1
    recipe = Run.read(tmp_path / "run").recipe
    assert recipe == dataclasses.replace(EXACT, learning_rate=0.1)
    assert_same_run(tmp_path / "run", unfused(recipe), 1e-9)


def interrupted(recipe, folder, execution, step=7):
    def stop(event):
        if event.get("step", 0) >= step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(LabError, match="saved at step"):
        train(recipe, folder, execution, watch=stop)
    return folder


@pytest.mark.parametrize("before", [PLAIN, FUSED], ids=["from-plain", "from-fused"])
@pytest.mark.parametrize("after", narrow([PLAIN, FUSED], [FUSED]), ids=["to-plain", "to-fused"])
def test_resumed_either_way(unfused, tmp_path, before, after):
    folder = interrupted(EXACT, tmp_path / "run", before)
    trained(EXACT, folder, after, resume=True)
    assert_same_run(folder, unfused(EXACT))


def test_a_resumed_run_stays_fused_unless_told_otherwise(tmp_path, capsys):
    for name, options, fused in (("as-it-was", [], True), ("unfused", ["--no-fuse"], False)):
        folder = interrupted(EXACT, tmp_path / name, FUSED)
        assert command(["train", "--resume", str(folder), *options]) == 0
        assert ("norms fused" in capsys.readouterr().err) == fused


def test_whatever_reads_a_run_reads_a_fused_one(unfused, tmp_path):
    recipe = dataclasses.replace(EXACT, precision="float32")
    folder = trained(recipe, tmp_path / "run")
    loaded, result = load_run(folder, device="cpu"), Run.read(folder).result
    scores = evaluate(loaded.model, loaded.data, recipe)
    assert {mode: found["accuracy"] for mode, found in scores.items()} == result["accuracy"]
    assert {mode: found["loss"] for mode, found in scores.items()} == pytest.approx(result["loss"], rel=1e-5)
    gaps = [analyse(each, device="cpu").overall["mean_abs"] for each in (folder, unfused(recipe))]
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-3)
    exported = export(folder, tmp_path / "net.pt2")
    assert exported["norms"] == 0 and exported["difference"] < 1e-4


def test_norms_of_torch_stay_as_they_are(tmp_path, capsys):
    """In a run of its own that is said; in a comparison it goes without saying."""
    options = ["--epochs", "1", "--train-examples", "64", "--test-examples", "64", "--fuse", "--device", "cpu"]
    assert command(["train", "--method", "gn", *options, "--out", str(tmp_path / "run")]) == 0
    assert "--fuse has no effect on GN: it uses torch's own norms" in capsys.readouterr().err
    assert command(["train", "--method", "gn", *options, "--out", str(tmp_path / "json"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["steps"] == 1


@wide
def test_a_comparison_fuses_what_it_can(unfused, tmp_path):
    cells = [(method, dataclasses.replace(EXACT, method=method)) for method in ("gn", "bkn")]
    runs = run_cells(cells, tmp_path, FUSED, jobs=1, quiet=True)
    assert [run.folder.name for run in runs] == ["gn", "bkn"]
    for run in runs:
        assert run.record["execution"]["fuse"] is True
        assert_same_run(run.folder, unfused(run.recipe))


def test_timed_steps_are_fused(monkeypatch):
    """`reproduce speed` times what the other commands would train."""
    seen = []
    own = speed.fused

    def watched(model, recipe, shape):
        seen.append((recipe.method, own(model, recipe, shape)))
        return seen[-1][1]

    monkeypatch.setattr(speed, "fused", watched)
    monkeypatch.setattr(speed, "WARMUP", 0)
    chosen = plan(experiment("speed"), Wanted("digits", budget=0.01), PLAIN)
    speed.time_steps(chosen, PLAIN)
    assert not seen
    speed.time_steps(chosen, FUSED)
    assert seen and all(hasattr(model, "fusion") == (method != "gn") for method, model in seen)
