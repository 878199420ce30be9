"""A training step as a CUDA graph gives the losses, weights and scores of eager steps. Skipped without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import signal

import pytest
import torch

from kalmannorm.lab.comparing.compare import run_cells
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.step import Graph, Step
from kalmannorm.lab.training.train import train
from support import lab_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]
EAGER = Execution(device="cuda", log_every=1, tensorboard=False)
GRAPH = dataclasses.replace(EAGER, cuda_graph=True)
RECIPE = Recipe(
    gradient_batch=32,
    epochs=3,
    warmup_epochs=0.5,
    learning_rate=0.05,
    label_smoothing=0.1,
    train_examples=128,
    test_examples=64,
    evaluate_every=1,
)
"""Twelve steps: two of warm-up, then a cosine; evaluations in between, which use what the graph has written."""
TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bf16": 3e-2}
"""Eager steps differ among themselves where a library's kernel adds in no fixed order, and steps amplify that."""


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@functools.cache
def _eager(root, recipe, execution):
    folder = root / f"{recipe.digest}-{execution.fuse}"
    train(recipe, folder, execution)
    return folder


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """Runs without a graph, each trained once."""
    return functools.partial(_eager, tmp_path_factory.mktemp("eager"))


@pytest.fixture
def counted(monkeypatch):
    """How often a step was captured, and how often its Python ran."""
    counts = {"captures": 0, "runs": 0}

    def counting(name, method):
        def counted(*args):
            counts[name] += 1
            return method(*args)

        return counted

    monkeypatch.setattr(Graph, "_capture", counting("captures", Graph._capture))
    monkeypatch.setattr(Step, "run", counting("runs", Step.run))
    return counts


def assert_same_run(one, other, precision, slack=1.0):
    tolerance = slack * TOLERANCE[precision]
    torch.testing.assert_close(lab_runs.losses(one), lab_runs.losses(other), rtol=tolerance, atol=tolerance)
    scores, expected = ([each["modes"] for each in Run.read(folder).events("evaluate")] for folder in (one, other))
    assert len(scores) == len(expected)
    near = max(10 * tolerance, 1e-6)  # scores are summed in float32
    for here, there in zip(scores, expected, strict=True):
        for mode, found in here.items():
            assert found["loss"] == pytest.approx(there[mode]["loss"], rel=near, abs=near), mode
    left, right = lab_runs.weights(one), lab_runs.weights(other)
    assert list(left) == list(right)
    for name, value in left.items():
        if value.is_floating_point():
            scale = float(right[name].abs().max()) + 0.1
            torch.testing.assert_close(value, right[name], rtol=0, atol=10 * tolerance * scale, msg=name)
        else:
            assert torch.equal(value, right[name]), name  # counts of batches and values


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("changes", "micro_batch"),
    [
        ({"precision": "float64"}, None),
        ({"precision": "float32"}, None),
        ({"precision": "bf16", "channels_last": True}, None),
        ({"precision": "float64"}, 8),
        ({"precision": "bf16", "channels_last": True}, 8),
        ({"precision": "float64", "optimizer": "adamw", "learning_rate": 1e-3}, None),
    ],
    ids=["float64", "float32", "bf16", "float64-micro-batches", "bf16-micro-batches", "adamw"],
)
def test_same_numbers_as_eager_steps(eager, counted, tmp_path, changes, micro_batch, fuse):
    recipe = dataclasses.replace(RECIPE, **changes)
    train(recipe, tmp_path / "run", dataclasses.replace(GRAPH, micro_batch=micro_batch, fuse=fuse))
    assert counted == {"captures": 1, "runs": Graph.WARMUP + 1}
    whole = eager(recipe, dataclasses.replace(EAGER, fuse=fuse))  # in one pass, whatever the graph does
    assert_same_run(tmp_path / "run", whole, recipe.precision)


@pytest.mark.parametrize("method", ["bkn-learned", "bn", "brn", "gn"])
def test_every_method_goes_into_a_graph(eager, tmp_path, method):
    recipe = dataclasses.replace(RECIPE, method=method)
    train(recipe, tmp_path / "run", dataclasses.replace(GRAPH, fuse=True))
    assert_same_run(tmp_path / "run", eager(recipe, dataclasses.replace(EAGER, fuse=True)), "float32")


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("method", ["bkn", "bkn-learned"])
def test_captured_again_when_the_statistics_are_frozen(eager, counted, tmp_path, method, fuse):
    recipe = dataclasses.replace(RECIPE, method=method, precision="float64", finish_epochs=1)
    train(recipe, tmp_path / "run", dataclasses.replace(GRAPH, fuse=fuse))
    assert counted == {"captures": 2, "runs": 2 * (Graph.WARMUP + 1)}
    assert_same_run(tmp_path / "run", eager(recipe, dataclasses.replace(EAGER, fuse=fuse)), "float64")


def test_each_replay_draws_its_own_dropout(eager, counted, tmp_path):
    """A net with dropout: what a step draws depends on the step, in a graph too.

    Four steps: norms on single pixels amplify the last digit of a sum in another order a thousandfold at each.
    """
    recipe = dataclasses.replace(
        RECIPE, model="mobilenet_v2", method="bn", statistics_batch=8, image_size=32, epochs=1, precision="float64"
    )
    train(recipe, tmp_path / "run", GRAPH)
    assert counted["captures"] == 1
    assert_same_run(tmp_path / "run", eager(recipe, EAGER), "float64", slack=100)


def test_sums_fused_in_a_graph(eager, tmp_path):
    """A net with shortcuts; in float64, where no kernel has to be compiled for each of its shapes."""
    recipe = dataclasses.replace(
        RECIPE, model="resnet18", method="bn", statistics_batch=8, image_size=32, epochs=1, precision="float64"
    )
    told = []
    train(recipe, tmp_path / "run", dataclasses.replace(GRAPH, fuse=True), watch=told.append)
    assert told[0]["text"] == "17 of 20 norms fused: 9 with ReLU, 8 with sum and ReLU"
    assert_same_run(tmp_path / "run", eager(recipe, EAGER), "float64", slack=100)


@pytest.mark.parametrize(("stop_at", "finish"), [(6, 0.0), (11, 1.0)], ids=["in-training", "on-frozen-statistics"])
@pytest.mark.parametrize("before", [EAGER, GRAPH], ids=["from-eager", "from-graph"])
def test_resumed_under_a_graph(eager, counted, tmp_path, before, stop_at, finish):
    recipe = dataclasses.replace(RECIPE, precision="float64", finish_epochs=finish)

    def stop(event):
        if event.get("step", 0) >= stop_at:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(LabError, match=f"saved at step {stop_at}"):
        train(recipe, tmp_path / "run", before, watch=stop)
    counted["captures"] = 0
    train(recipe, tmp_path / "run", GRAPH, resume=True)
    assert counted["captures"] == 1
    assert_same_run(tmp_path / "run", eager(recipe, EAGER), "float64")


def test_two_runs_of_a_comparison_share_the_gpu(eager, tmp_path):
    cells = [(f"seed-{seed}", dataclasses.replace(RECIPE, precision="float64", seed=seed)) for seed in range(2)]
    runs = run_cells(cells, tmp_path, dataclasses.replace(GRAPH, fuse=True), jobs=2, quiet=True)
    assert [run.folder.name for run in runs] == ["seed-0", "seed-1"]
    for run in runs:
        assert run.record["execution"]["device"] == "cuda:0"
        assert run.result["peak_memory"] > 0
        assert_same_run(run.folder, eager(run.recipe, EAGER), "float64")


def test_what_a_graph_cannot_hold_is_said(tmp_path):
    with pytest.raises(LabError, match="--cuda-graph needs"):
        train(dataclasses.replace(RECIPE, precision="fp16"), tmp_path / "run", GRAPH)
    assert not (tmp_path / "run").exists()
