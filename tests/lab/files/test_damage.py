"""Damage on the disk is found, said in one line, and gone around where it can be: never trained on, never shown."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric.plugins.precision import Precision

from kalmannorm.lab.errors import DamagedError, LabError
from kalmannorm.lab.files import checkpoint, manifest
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.files.resuming import resumable
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.loading import data_of, load_run, model_of
from kalmannorm.lab.training.optimizer import optimizer_of
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run
from support.lab_runs import find_runs, numbers, weights
from support.saying import said
from support.stopped_runs import train_until

TINY = Recipe(epochs=2, gradient_batch=16, train_examples=48, test_examples=32, width=0.1)
PLAIN = Execution(device="cpu", tensorboard=False, save_every=2, log_every=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(TINY, folder, PLAIN)
    return folder


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """Stopped in its fifth step of six, with checkpoints of steps 2 and 4."""
    return train_until(5, TINY, tmp_path_factory.mktemp("runs") / "unfinished", PLAIN)


@pytest.fixture
def broken(unfinished, tmp_path):
    """A copy of the unfinished run, for a test to break."""
    return Path(shutil.copytree(unfinished, tmp_path / "run"))


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def goes_on(capsys, folder: Path, problem: str, finished: Path, start: str = "step-00000002") -> None:
    """Resuming says so in one line, and ends where the undisturbed run did."""
    capsys.readouterr()
    train(TINY, folder, PLAIN, resume=True)
    said = capsys.readouterr().err
    assert problem in said and said.endswith(f": using {start} instead\n") and said.count("\n") == 1
    assert numbers(folder) == numbers(finished)
    assert all(torch.equal(tensor, weights(folder)[name]) for name, tensor in weights(finished).items())


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flipped", "cut", "gone"])
@pytest.mark.parametrize("name", ["model.safetensors", "resume.pt"])
def test_a_damaged_checkpoint_costs_some_steps(capsys, broken, finished, name, damage):
    damage(broken / "checkpoint" / "step-00000004" / name)
    goes_on(capsys, broken, f"step-00000004/{name} is damaged (", finished)


def test_a_damaged_manifest_and_an_empty_checkpoint(capsys, broken, finished):
    flip(broken / "checkpoint" / "step-00000004" / "manifest.json")
    (broken / "checkpoint" / "step-00000006").mkdir()
    capsys.readouterr()
    train(TINY, broken, PLAIN, resume=True)
    lines = capsys.readouterr().err.splitlines()
    assert "step-00000006/model.safetensors is damaged (No such file" in lines[0]
    assert "step-00000004/manifest.json is damaged (its own sha256 differs)" in lines[1]
    assert len(lines) == 2 and numbers(broken) == numbers(finished)


@pytest.mark.parametrize("command", ["evaluate", "analyse", "export", "train"])
def test_without_a_good_checkpoint(capsys, broken, command):
    for saved in checkpoint.checkpoints(broken):
        flip(saved / "model.safetensors")
    output = ["-o", str(broken / "model.pt2")] if command == "export" else []
    arguments = ["--resume", str(broken)] if command == "train" else [str(broken), *output]
    line = said(capsys, command, *arguments)
    assert line.count("is damaged (its sha256 differs from the recorded one)") == 2
    assert f"delete {broken / 'checkpoint'} to train from the start with: kalmannorm train --resume {broken}" in line


def test_an_unfinished_run_is_evaluated_where_it_is_good(capsys, broken):
    flip(broken / "checkpoint" / "step-00000004" / "model.safetensors")
    assert run(["evaluate", str(broken), "--no-recalibrate", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "at step 2 of 6" in out and err.endswith("using step-00000002 instead\n") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["evaluate", "analyse", "export", "train"])
def test_damaged_weights_of_a_finished_run(capsys, finished, tmp_path, command):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    flip(folder / "model.safetensors", 0.9)
    output = ["-o", str(folder / "model.pt2")] if command == "export" else []
    line = said(capsys, command, *(["--resume", str(folder)] if command == "train" else [str(folder), *output]))
    assert "model.safetensors is damaged (its sha256 differs from the recorded one): restore it from a copy" in line
    assert line.endswith(
        f"delete it and result.json and train the run again with: kalmannorm train --resume {folder}\n"
    )
    if command == "train":  # do as it says
        for name in ("model.safetensors", "result.json"):
            (folder / name).unlink()
        train(TINY, folder, PLAIN, resume=True)
        assert numbers(folder) == numbers(finished)


@pytest.mark.parametrize("name", ["recipe.json", "result.json", "log.jsonl"])
def test_a_digit_of_a_record(finished, tmp_path, name):
    """It is another number, and JSON as good as before."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    path = folder / name
    number = {"recipe.json": '"learning_rate": 0.1', "result.json": '"steps": 6', "log.jsonl": '"step": 3'}[name]
    path.write_text(path.read_text().replace(number, number[:-1] + "5"))
    with pytest.raises(LabError, match=f"{name} is damaged"):
        [(found.result, found.events()) for found in find_runs(tmp_path)]
    (folder / "manifest.json").unlink()  # as the message says, where it was done on purpose
    assert [(found.result, found.events()) for found in find_runs(tmp_path)]


@pytest.mark.parametrize("name", ["log.jsonl", "model.safetensors"])
def test_a_lost_file_of_a_finished_run(capsys, finished, tmp_path, name):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / name).unlink()
    with pytest.raises(DamagedError, match=f"{name} is damaged .No such file or directory.: restore it"):
        Run.read(folder).events() if name == "log.jsonl" else load_run(folder, device="cpu")
    if name == "model.safetensors":
        assert said(capsys, "train", "--resume", str(folder)) == said(capsys, "evaluate", str(folder))


def test_a_damaged_manifest_of_a_run(capsys, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    flip(folder / "manifest.json")
    line = said(capsys, "evaluate", str(folder))
    assert "manifest.json is damaged (its own sha256 differs): delete it to read the files beside it" in line
    (folder / "manifest.json").unlink()
    assert run(["evaluate", str(folder), "--no-recalibrate", "--device", "cpu"]) == 0


@pytest.mark.parametrize("files", [[], None, {"recipe.json": {}}, {"recipe.json": "x"}, {"x": {"bytes": "1"}}], ids=str)
def test_a_manifest_of_something_else(capsys, finished, tmp_path, files):
    """Its own digest is right, as where another program wrote it."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "manifest.json").write_bytes(manifest.sealed({"format": 1, "files": files}))
    for command in (["evaluate"], ["train", "--resume"]):
        assert "manifest.json is damaged (its entries are not sizes and digests): delete it" in said(
            capsys, *command, str(folder)
        )
    assert run(["report", str(folder), "--out", str(tmp_path / "page.html"), "--no-draw"]) == 0
    assert "manifest.json is damaged" in capsys.readouterr().err


def test_a_damaged_manifest_does_not_cost_the_result(broken):
    """The end of a long run finds it so: what is written then is protected all the same."""

    def damage(event):
        if event["event"] == "train":
            (broken / "manifest.json").write_text("{")

    train(TINY, broken, PLAIN, resume=True, watch=damage)
    assert manifest.entries(broken).keys() == {"model.safetensors", "result.json", "log.jsonl"}


def events_of(folder: Path, count: int) -> int:
    """Bytes of the first events of the log."""
    return sum(len(line) for line in (folder / "log.jsonl").read_bytes().splitlines(keepends=True)[:count])


def test_a_log_that_lost_its_end(capsys, broken, finished):
    """The system may have written the checkpoint and not the log; the checkpoint before needs less of it."""
    size = events_of(broken, 3)
    (broken / "log.jsonl").write_bytes((broken / "log.jsonl").read_bytes()[:size])
    goes_on(capsys, broken, f"log.jsonl is damaged (it has {size} bytes instead of ", finished)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: flip(path, 0.01), Path.unlink])
def test_a_log_that_lost_its_start(capsys, broken, damage):
    damage(broken / "log.jsonl")
    before = (broken / "log.jsonl").read_bytes() if (broken / "log.jsonl").exists() else None
    line = said(capsys, "train", "--resume", str(broken))
    assert "log.jsonl is damaged (" in line and "no checkpoint is left: delete" in line
    assert before == ((broken / "log.jsonl").read_bytes() if before is not None else None), "nothing was written over"
    assert run(["evaluate", str(broken), "--no-recalibrate", "--device", "cpu"]) == 0, "which needs no log"


def test_strays_among_the_checkpoints(capsys, broken, finished):
    home = broken / "checkpoint"
    (home / "step-zzz").mkdir()
    (home / "step-9").mkdir()
    (home / "notes.txt").write_text("mine")
    (home / "step-00000006").write_text("a file of the name of a checkpoint to come")
    train(TINY, broken, PLAIN, resume=True)
    assert capsys.readouterr().err == "" and numbers(broken) == numbers(finished)


def test_a_checkpoint_ahead_of_the_run_goes_when_it_saves(broken):
    """It was damaged; kept, it would push a good one out."""
    flip(broken / "checkpoint" / "step-00000004" / "resume.pt")
    train_until(4, TINY, broken, dataclasses.replace(PLAIN, save_every=3), resume=True)
    assert [path.name for path in checkpoint.checkpoints(broken)] == ["step-00000002", "step-00000003"]


Change = Callable[[dict[str, Any]], Any]


def put(*where: Any) -> Change:
    """The last of these in the place that the others name."""

    def change(state: dict[str, Any]) -> None:
        *names, name, value = where
        for each in names:
            state = state[each]
        state[name] = value

    return change


MOMENTUM = ("optimizer", "state", 0)
CONTENTS: dict[str, tuple[Change, str]] = {
    "no dict": (lambda state: [1, 2], "it holds a list"),
    "no step": (lambda state: state.pop("step") and None, "it holds no 'step'"),
    "nan step": (put("step", float("nan")), "its step cannot be nan"),
    "list step": (put("step", [4]), "its step cannot be [4]"),
    "negative step": (put("step", -4), "its step cannot be -4"),
    "other step": (put("step", 3), "its step cannot be 3"),
    "true step": (put("step", True), "its step cannot be True"),
    "nan seconds": (put("seconds", float("nan")), "its seconds cannot be nan"),
    "seconds in words": (put("seconds", "long"), "its seconds cannot be 'long'"),
    "one logged": (put("logged", [4]), "its last event cannot be at [4]"),
    "logged ahead": (put("logged", [9, 0.1]), "its last event cannot be at [9, 0.1]"),
    "one speed": (put("speeds", 5.0), "its speeds are not a list"),
    "speeds in words": (put("speeds", ["fast"]), "its speeds are not a list of numbers"),
    "no average": (put("averages", {}), "it holds no 'loss'"),
    "average of three": (put("averages", "loss", torch.zeros(3)), "its average loss is not a sum and a count"),
    "average in words": (put("averages", "loss", "low"), "its average loss is not a sum and a count"),
    "list of averages": (put("averages", [1.0]), "resume.pt is damaged ("),
    "precision": (put("precision", 16), "its precision cannot be 16"),
    "log in words": (put("log", "bytes", "all"), "its log cannot be"),
    "negative log": (put("log", "bytes", -1), "its log cannot be"),
    "no log": (put("log", None), "resume.pt is damaged ("),
    "no optimizer": (put("optimizer", None), "resume.pt is damaged ("),
    "list optimizer": (put("optimizer", []), "resume.pt is damaged ("),
    "empty optimizer": (put("optimizer", "state", {}), "its optimizer's state is missing"),
    "no groups": (put("optimizer", "param_groups", []), "resume.pt is damaged ("),
    "groups of others": (put("optimizer", "param_groups", 0, "params", [0]), "resume.pt is damaged ("),
    "parameters of others": (put("optimizer", "state", 999, {}), "it holds no 999"),
    "no momentum": (put(*MOMENTUM, {}), "it holds no 'momentum_buffer'"),
    "momentum of no shape": (put(*MOMENTUM, "momentum_buffer", torch.zeros(())), "does not fit a parameter of shape"),
    "momentum in words": (put(*MOMENTUM, "momentum_buffer", "high"), "does not fit a parameter of shape"),
    "hyperparameter": (put("optimizer", "param_groups", 0, "momentum", "high"), "its optimizer's momentum cannot be"),
    "rate": (put("optimizer", "param_groups", 0, "lr", [0.1]), "its optimizer's lr cannot be [0.1]"),
    "format": (put("format", -1), "its format cannot be -1"),
}


@pytest.fixture(scope="module")
def state(unfinished):
    return checkpoint.read_state(unfinished / "checkpoint" / "step-00000004")


@pytest.fixture(scope="module")
def optimizer():
    return optimizer_of(model_of(TINY, data_of(TINY, torch.device("cpu"), PLAIN), torch.device("cpu")), TINY)


def replaced(folder: Path, state: Any) -> Path:
    """A checkpoint without a digest, and the only one, with another resume.pt."""
    shutil.rmtree(folder / "checkpoint" / "step-00000002")
    saved = folder / "checkpoint" / "step-00000004"
    (saved / "manifest.json").unlink()
    torch.save(state, saved / "resume.pt")
    return saved


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_of_another_kind(broken, state, optimizer, name):
    """A file that is whole, and not what was saved."""
    change, expected = CONTENTS[name]
    changed = copy.deepcopy(state)
    saved = replaced(broken, change(changed) or changed)
    with pytest.raises(DamagedError) as error:
        resumable(saved, TINY, 6, optimizer, Precision())
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_contents_of_another_kind_in_words(capsys, broken, state):
    replaced(broken, {**state, "step": float("nan")})
    line = said(capsys, "train", "--resume", str(broken))
    assert "resume.pt is damaged (its step cannot be nan" in line and "no checkpoint is left" in line


def test_a_pickle_of_something_else(capsys, broken):
    """Torch's own words advise to load it with weights_only=False."""
    replaced(broken, TINY)
    line = said(capsys, "train", "--resume", str(broken))
    assert "resume.pt is damaged (it is not a file of numbers and tensors)" in line and "weights_only" not in line


def test_a_newer_format_is_not_gone_around(capsys, broken, state):
    shutil.copytree(broken / "checkpoint" / "step-00000002", broken / "checkpoint" / "step-00000003")
    replaced(broken, {**state, "format": 2})
    line = said(capsys, "train", "--resume", str(broken))
    assert "resume.pt has format 2, but this version of kalmannorm reads formats up to 1: update kalmannorm" in line


def test_a_run_says_its_format(finished):
    assert Run.read(finished).record["format"] == json.loads((finished / "manifest.json").read_text())["format"] == 1
