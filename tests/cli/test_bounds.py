"""Numbers that no option can mean: each is refused in one line, before any work, and by the Python API as well."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kalmannorm.lab.analysis.analyse import analyse
from kalmannorm.lab.bench.turns import check_rounds
from kalmannorm.lab.comparing.pool import seats
from kalmannorm.lab.errors import DivergedError, LabError
from kalmannorm.lab.machine import memory
from kalmannorm.lab.recipes.recipe import BOUNDS, Execution, Recipe
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.training.loading import data_of
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run as command
from support.saying import said

TINY = Recipe(epochs=1, train_examples=64, test_examples=64)
PLAIN = Execution(tensorboard=False)
LONG = "1" * 4000
"""More digits than any number that is meant."""


@pytest.fixture
def few_threads(monkeypatch):
    """Fails where a million threads would be started."""

    def bounded(count):
        assert count <= 1024, f"{count} threads"

    monkeypatch.setattr(torch, "set_num_threads", bounded)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--epochs 1e308", "--epochs must be a positive number of at most 1e+06, got 1e+308"),
        ("--evaluate-every 1e308", "--evaluate-every must be a number from 0 to 1e+06"),
        ("--warmup -1", "--warmup must be a number from 0 to 1e+06, got -1"),
        (f"--seed {10**30}", f"--seed must be a whole number from {-(2**63):,} to {2**63 - 1:,}, got {10**30}"),
        ("--learning-rate 1e300", "--learning-rate must be a positive number of at most 1e+30, got 1e+300"),
        ("--weight-decay 1e39", "--weight-decay must be a number from 0 to 1e+06, got 1e+39"),
        ("--image-size 1000000", "--image-size must be a whole number from 1 to 8,192, got 1000000"),
        ("--train-examples 0", "--train-examples must be at least 1, got 0"),
        ("--threads 1000000", "--threads must be a whole number from 1 to "),
        (f"--threads {10**30}", "--threads must be a whole number from 1 to "),
        ("--setting 1000000000039,999999999999", "at most 1,000,000"),  # no divisor is looked for
        (f"--setting {LONG},2", "is not understood"),
        ("--device cpu:7", "device 'cpu:7'"),
        ("--dataset folder:~nosuchuser/images", "there is no folder ~nosuchuser/images"),
    ],
)
def test_train(capsys, tmp_path, monkeypatch, few_threads, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in said(capsys, "train", *arguments.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("compare --jobs 1000000000000", "--jobs must be a whole number from 1 to "),
        ("compare --seeds 1000000000", "--seeds must be a whole number from 1 to 1,000"),
        ("demo --seeds 1000000000", "--seeds must be a whole number from 1 to 1,000"),
        ("reproduce cifar --dataset digits --seeds 1000000000", "--seeds must be a whole number from 1 to 1,000"),
        ("reproduce cifar --dataset digits --budget 1e308", "--budget must be a positive number of at most 1,000"),
        ("reproduce speed --dataset digits --budget 1e307", "--budget must be a positive number of at most 1,000"),
        ("reproduce speed --dataset digits --threads 1000000", "--threads must be a whole number from 1 to "),
        ("compare --save-every 0", "--save-every must be at least 1"),
        ("compare --threads 1000000", "--threads must be a whole number from 1 to "),
        ("compare --cuda-graph --device cpu", "--cuda-graph needs one GPU"),
        ("bench step --image-size -5", "--image-size must be a whole number from 1 to 8,192, got -5"),
        ("bench step --model resnet18 --setting 1000000,2", "GiB of memory"),
        ("bench step --rounds 1000000000", "--rounds must be a whole number from 5 to 10,000"),
        ("bench inference --model digits-net --batch 1000000000", "invalid value for '--batch'"),
        ("bench inference --model digits-net --image-size 0", "--image-size must be a whole number from 1 to 8,192"),
        ("bench op --shape 00x3x3x3", "--shape '00x3x3x3' is not understood"),
        ("bench op --shape 999999x999999x9999x9999", "GiB of memory"),
        (f"bench op --shape 8x8x8x8 --statistics-batches {LONG}", "--statistics-batches"),
        ("bench op --threads 1000000", "--threads must be a whole number from 1 to "),
        ("bench op --device cpu:7", "device 'cpu:7'"),
    ],
)
def test_other_commands(capsys, tmp_path, monkeypatch, few_threads, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in said(capsys, *arguments.split())
    assert not list(tmp_path.iterdir())


def test_options_are_named_as_they_are_typed(capsys):
    assert "leave out --finish-epochs" in said(capsys, "train", "--resume", "nowhere", "--finish-epochs", "1")
    assert "leave out --warmup" in said(capsys, "train", "--resume", "nowhere", "--warmup", "1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(TINY, folder, PLAIN)
    return folder


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 10**30), ("width", 1e300), ("image_size", 10**6), ("statistics_batch", 0)]
)
@pytest.mark.parametrize("command", [["evaluate"], ["analyse"], ["train", "--resume"]])
def test_a_recipe_that_was_edited_by_hand(capsys, finished, tmp_path, command, name, value):
    record = json.loads((finished / "recipe.json").read_text())
    record["recipe"][name] = value
    (tmp_path / "recipe.json").write_text(json.dumps(record))
    line = said(capsys, *command, str(tmp_path))
    assert str(tmp_path / "recipe.json") in line and "must" in line


@pytest.mark.parametrize("options", [[], ["--threads", "1"]], ids=str)
def test_a_run_that_began_on_a_machine_with_more_cores(capsys, finished, tmp_path, few_threads, options):
    record = json.loads((finished / "recipe.json").read_text())
    record["execution"]["threads"] = 10**6
    (tmp_path / "recipe.json").write_text(json.dumps(record))
    assert command(["train", "--resume", str(tmp_path), *options, "--json"]) == 0
    capsys.readouterr()
    assert "must be a whole number" in said(capsys, "train", "--resume", str(tmp_path), "--threads", "1000000")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"evaluate --batch {2 * 10**30}", "--batch"),
        ("evaluate --threads 1000000", "--threads must be a whole number from 1 to "),
        ("analyse --threads 1000000", "--threads must be a whole number from 1 to "),
        ("analyse --workers -1", "--workers must be at least 0"),
    ],
)
def test_commands_on_a_run(capsys, finished, few_threads, arguments, expected):
    command, *options = arguments.split()
    assert expected in said(capsys, command, str(finished), *options)


def test_more_batches_than_there_are(finished):
    """All of them are taken, as `max_groups` takes all groups."""
    assert analyse(finished, batches=10**30, max_groups=10**30).layers
    with pytest.raises(LabError, match="--batches must be at least 1, got 0"):
        analyse(finished, batches=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("end", ["least", "most"])
def test_the_ends_of_the_bounds_can_be_trained(tmp_path, optimizer, end):
    """A run may diverge there, and it says so; no number is too large for what computes with it."""
    names = ("epochs", "learning_rate", "weight_decay", "evaluate_every", "momentum", "label_smoothing", "gain", "seed")
    values = {name: getattr(BOUNDS[name], end) for name in names}
    recipe = dataclasses.replace(TINY, **values, optimizer=optimizer, warmup_epochs=0)

    def watch(event):
        if event.get("step", 0) >= 1:
            raise EOFError  # enough

    with pytest.raises((EOFError, DivergedError)):
        train(recipe, tmp_path / "run", dataclasses.replace(PLAIN, log_every=1), watch=watch)


def test_the_python_api_has_the_same_bounds():
    for name, value in {"width": 1e300, "seed": -(2**64), "epochs": float("nan"), "gain": 1.0, "momentum": 1.0}.items():
        with pytest.raises(LabError, match=f"{name} must"):
            dataclasses.replace(TINY, **{name: value}).checked()
    for call in (
        lambda: Execution(threads=10**9).checked(),
        lambda: seats("cpu", 10**12),
        lambda: seats("cpu", 1, 10**9),
        lambda: check_rounds(10**9),
        lambda: Setting(10**9, 1).checked(),
    ):
        with pytest.raises(LabError, match="must"):
            call()


def test_what_does_not_fit_into_memory(monkeypatch):
    """Images of a small data set, and a gradient batch of a large one."""
    monkeypatch.setattr(memory, "total", lambda: 2**20)
    device = torch.device("cpu")
    with pytest.raises(LabError, match=r"128 images of 64×64 take 2\.0 MiB of memory.*--image-size"):
        data_of(dataclasses.replace(TINY, image_size=64), device, PLAIN)
    monkeypatch.setattr(memory, "total", lambda: None)  # as where the system does not say
    assert data_of(dataclasses.replace(TINY, image_size=64), device, PLAIN).shape == (1, 64, 64)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_running_out_of_memory(capsys, finished, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("kalmannorm.lab.training.step.Step.__call__", fail)
    options = ["--train-examples", "64", "--test-examples", "64", "--no-tensorboard", "--json"]
    assert "out of memory at step 0: give --micro-batch" in said(capsys, "train", *options, "-o", str(tmp_path / "run"))
    monkeypatch.setattr("kalmannorm.lab.training.evaluate.evaluate", fail)
    assert "out of memory" in said(capsys, "evaluate", str(finished))
