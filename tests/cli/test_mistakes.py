"""Bad input and bad luck: one clear line, and nothing lost that was finished."""

from __future__ import annotations

import dataclasses
import errno
import json
import os

import pytest

from kalmannorm.lab.comparing.cells import grid
from kalmannorm.lab.errors import DivergedError, LabError
from kalmannorm.lab.files import checkpoint
from kalmannorm.lab.files.records import Run, write_json
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run
from support.lab_runs import find_runs
from support.saying import said
from support.stopped_runs import train_until

TINY = Recipe(epochs=4, train_examples=128, test_examples=64)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "resnet5O"], "resnet50"),
        (["--model", "digit-net"], "digits-net"),
        (["--dataset", "cifar"], "cifar10"),
        (["--method", "bkm"], "bkn"),
        (["--setting", "64,3"], "(64, 2)"),
        (["--setting", "64"], "128,2"),
        (["--setting", "0,0"], "positive"),
        (["--setting", "2,4"], "(2, 2)"),
        (["--setting", "1024,2"], "901 training images"),
        (["--micro-batch", "3", "--setting", "64,2"], "multiple of the statistics batch 2"),
        (["--precision", "int8"], "bf16"),
        (["--optimizer", "adam"], "adamw"),
        (["--schedule", "cosin"], "cosine"),
        (["--epochs", "0"], "epochs must be a positive number"),
        (["--epochs", "inf"], "epochs must be a positive number"),
        (["--label-smoothing", "1.5"], "less than 1"),
        (["--momentum", "1.5"], "less than 1"),
        (["--save-every", "0"], "--save-every must be at least 1"),
        (["--log-every", "-3"], "--log-every must be at least 1"),
        (["--test-examples", "0"], "--test-examples must be at least 1"),
        (["--resume", "nowhere", "--seed", "4"], "leave out --seed"),
        (["--epochs", "nan"], "epochs must be"),
        (["--learning-rate", "-1"], "--learning-rate must be a positive number"),
        (["--gain", "1.5"], "between 0 and 1"),
        (["--device", "gpu"], "cuda"),
        (["--device", "cuda:99"], "--device cpu"),
        (["--cuda-graph", "--device", "cpu"], "--cuda-graph"),
        (["--dataset", "folder:/nowhere"], "there is no folder /nowhere"),
        (["--method", "gn", "--gain", "0.5"], "--gain has no effect on GN: leave it out"),
        (["--method", "gn", "--finish-epochs", "1"], "--finish-epochs has no effect on GN"),
        (["--method", "brn", "--closing-start", "0.3"], "--closing-start has no effect on BRN"),
        (["--closing-present", "0.5"], "--closing-present needs --closing-start"),
        (["--closing-start", "0", "--closing-present", "2"], "--closing-present must be"),
        (["--optimizer", "adamw", "--momentum", "0.5"], "--momentum is an option of sgd"),
        (["--threads", "0"], "--threads must be a whole number from 1"),
        (["--resume", "nowhere"], "there is no folder nowhere"),
        (["--resume", "nowhere", "--epochs", "3"], "leave out --epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_in_train(capsys, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in said(capsys, "train", *arguments)
    assert not (tmp_path / "runs").exists(), "a refused run leaves no folder"


@pytest.mark.parametrize(("name", "meant"), [("resnet5O", "resnet50"), ("digit-net", "digits-net")])
def test_an_unknown_model_of_a_comparison(capsys, tmp_path, monkeypatch, name, meant):
    """Refused before a worker starts."""
    monkeypatch.chdir(tmp_path)
    line = said(capsys, "compare", "--model", name)
    assert f"unknown model {name!r}; did you mean {meant!r}?" in line
    assert not list(tmp_path.iterdir())


def test_settings():
    assert Setting.parse("(256, 4)") == Setting.parse("256,4") == Setting.parse("256x4") == Setting(256, 4)
    assert str(Setting(256, 4)) == "(256, 4)"


def test_options_are_for_the_methods_that_take_them(capsys):
    changes = {"gain": 0.7, "finish_epochs": 2}
    cells = grid(Recipe(), ["bn", "gn", "bkn", "bkn-learned"], [Setting(64, 2)], [0], changes)
    taken = {cell.method: (cell.gain, cell.finish_epochs) for _, cell in cells}
    assert taken == {"bn": (None, 2), "gn": (None, 0), "bkn": (0.7, 2), "bkn-learned": (0.7, 2)}
    line = said(capsys, "compare", "--methods", "bn,gn", "--gain", "0.7")
    assert "--gain has no effect on any of these methods" in line
    for recipe in (Recipe(method="bn", gain=0.7), Recipe(method="gn", finish_epochs=1)):
        with pytest.raises(LabError, match=f"has no effect on {recipe.method.upper()}"):
            recipe.checked()


def test_a_loss_that_turns_nan(capsys, tmp_path):
    """The run is kept as a result, marked; its log and weights are there."""
    folder = tmp_path / "run"
    with pytest.raises(DivergedError, match="diverged"):
        train(dataclasses.replace(TINY, method="gn", learning_rate=1e20, schedule="constant"), folder)
    saved = Run.read(folder)
    assert saved.result is not None and saved.result["diverged"] is True
    assert saved.result["steps"] < 8
    assert saved.events("train")[-1]["loss"] is None
    json.loads((folder / "result.json").read_text(), parse_constant=pytest.fail)
    options = ["--method", "gn", "--learning-rate", "1e20", "--train-examples", "128", "--out", str(tmp_path / "other")]
    assert run(["train", *options]) == 3
    assert capsys.readouterr().err.count("kalmannorm: ") == 1


def test_a_nan_in_the_middle_of_what_is_averaged(tmp_path):
    """One NaN among the steps between two events is enough, and so is one that comes after the last event."""
    recipe = dataclasses.replace(
        TINY, method="gn", epochs=2, train_examples=256, learning_rate=1e20, schedule="constant"
    )
    with pytest.raises(DivergedError):
        train(recipe, tmp_path / "run", Execution(log_every=5))
    assert Run.read(tmp_path / "run").result["diverged"] is True
    with pytest.raises(DivergedError, match="that is its result"):
        train(recipe, tmp_path / "run", resume=True)


def test_a_group_with_one_value(capsys, tmp_path):
    """The last stage of a ResNet has one position on small images: batch norm of one example has nothing to average."""
    options = ["--model", "resnet18", "--method", "bn", "--train-examples", "16", "--test-examples", "16"]
    line = said(capsys, "train", "--setting", "16,1", *options, "--out", str(tmp_path / "run"))
    assert "resnet18 cannot be trained at (16, 1)" in line


def test_test_examples_that_fill_no_group(tmp_path):
    """They are left out of `batch` inference, where a group of one would have one value per channel."""
    recipe = Recipe(model="resnet18", method="bn", gradient_batch=16, statistics_batch=16, epochs=1)
    recipe = dataclasses.replace(recipe, train_examples=16, test_examples=33)
    assert train(recipe, tmp_path / "run")["accuracy"].keys() == {"population", "batch", "example"}


@pytest.mark.parametrize("phase", ["evaluate", "weights"])
def test_trouble_after_the_last_step_costs_no_step(tmp_path, monkeypatch, phase):
    recipe = dataclasses.replace(TINY, epochs=1)
    whole = train(recipe, tmp_path / "whole")

    def fail(*_, **__):
        raise KeyboardInterrupt if phase == "evaluate" else OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as trouble:
        trouble.setattr(
            "kalmannorm.lab.training.train.evaluate"
            if phase == "evaluate"
            else "kalmannorm.lab.files.checkpoint.weights",
            fail,
        )
        if phase == "weights":  # the last checkpoint is written as well
            trouble.setattr(checkpoint, "save", checkpoint.save)
        with pytest.raises(KeyboardInterrupt if phase == "evaluate" else LabError):
            train(recipe, tmp_path / "run")
    steps = []
    result = train(recipe, tmp_path / "run", resume=True, watch=lambda event: steps.append(event["event"]))
    assert result["accuracy"] == whole["accuracy"]
    if phase == "evaluate":
        assert "train" not in steps, "nothing is trained again"


def test_two_processes_in_one_folder(tmp_path):
    from kalmannorm.lab.files.lock import locked

    with locked(tmp_path / "run"), pytest.raises(LabError, match="another process"):
        train(TINY, tmp_path / "run")
    train(TINY, tmp_path / "run")


def test_a_stale_checkpoint_is_not_continued(tmp_path):
    interrupted(tmp_path / "run")
    (tmp_path / "run" / "recipe.json").unlink()
    for resume in (False, True):
        with pytest.raises(LabError, match=r"without its recipe\.json"):
            train(dataclasses.replace(TINY, learning_rate=0.01), tmp_path / "run", resume=resume)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("recipe.json", '{"recipe": {"model": 1}}', "model cannot be 1"),
        ("recipe.json", '{"recipe": {"epochs": "x"}}', "epochs cannot be 'x'"),
        ("recipe.json", '{"recipe": {"statistics_batch": 0}}', "must have positive numbers"),
        ("recipe.json", '{"recipe": {}, "execution": [1]}', "is damaged"),
        ("recipe.json", '{"recipe": {}, "execution": {"threads": "many"}}', "threads cannot be 'many'"),
        ("recipe.json", '{"recipe": {}, "execution": {"save_every": [2]}}', "save_every cannot be [2]"),
        ("recipe.json", '{"recipe": {}, "execution": {"data_root": 7}}', "data_root cannot be 7"),
        ("recipe.json", '{"recipe": {}, "execution": {"workers": -1}}', "--workers must be at least 0"),
        ("recipe.json", '{"recipe": {}, "format": 2}', "has format 2"),
        ("recipe.json", '{"recipe": {}, "format": "x"}', "its format cannot be 'x'"),
        pytest.param("recipe.json", "[" * 100_000, "is damaged", id="nested too deeply"),
        ("result.json", "{}", "is damaged"),
    ],
)
def test_records_of_another_kind(capsys, tmp_path, name, content, expected):
    """Of a folder without digests, which would be told first."""
    write_json(tmp_path / "recipe.json", {"recipe": TINY.to_json()})
    (tmp_path / name).write_text(content)
    assert expected in said(capsys, "train", "--resume", str(tmp_path))


@pytest.mark.parametrize("batch", ["-5", "0", "33"])
def test_evaluation_in_whole_groups(capsys, tmp_path, batch):
    train(TINY, tmp_path / "run", Execution(tensorboard=False))
    assert "multiple of the statistics batch 2" in said(capsys, "evaluate", str(tmp_path / "run"), "--batch", batch)
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_a_large_seed_and_a_file_in_the_way(capsys, tmp_path):
    train(dataclasses.replace(TINY, epochs=1, seed=20240101123), tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert "cannot write" in said(capsys, "train", "--epochs", "1", "--out", str(tmp_path / "file" / "run"))


def interrupted(folder):
    """A run with checkpoints at steps 2 and 4."""
    train_until(5, TINY, folder, Execution(save_every=2, log_every=1))
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("name", ["recipe.json", "result.json", "log.jsonl"])
def test_a_damaged_record(tmp_path, name):
    train(TINY, tmp_path / "run", Execution(tensorboard=False))
    path = tmp_path / "run" / name
    path.write_bytes(b"\xff{" + path.read_bytes()[3:])
    with pytest.raises(LabError, match=f"{name} is damaged"):
        [(found.result, found.events()) for found in find_runs(tmp_path)]


def test_a_recipe_of_another_version(tmp_path):
    write_json(tmp_path / "recipe.json", {"recipe": {**TINY.to_json(), "flavour": "mint"}})
    with pytest.raises(LabError, match="flavour"):
        Run.read(tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    synced = os.fsync

    def full(descriptor):
        if len(checkpoint.checkpoints(folder)) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(descriptor)

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(LabError, match="no space left"):
            train(TINY, folder, Execution(save_every=2))
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["step-00000002", "step-00000004"]
    assert not list(folder.rglob("*.partial"))
    train(TINY, folder, Execution(save_every=2), resume=True)
    whole = train(TINY, tmp_path / "whole", Execution(save_every=2))
    assert Run.read(folder).result["accuracy"] == whole["accuracy"]


def test_a_log_on_a_full_disk(tmp_path):
    from kalmannorm.lab.files.records import Log

    log = Log(tmp_path / "log.jsonl")
    log.close()
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed below; the log's own has no buffer either
    with pytest.raises(LabError, match="no space left"):
        log.write("train", step=1)
    log.close()
