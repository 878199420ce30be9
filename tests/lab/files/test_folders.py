"""A run's folder, met again: taken, unfinished, full of others, or on a full disk. Each is said as it is."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import time
from contextlib import ExitStack, nullcontext

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kalmannorm.lab.analysis.analyse import analyse
from kalmannorm.lab.errors import FullDiskError, LabError
from kalmannorm.lab.files import checkpoint
from kalmannorm.lab.files.lock import locked
from kalmannorm.lab.files.records import Log, Run
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training import launcher
from kalmannorm.lab.training.fabric import Fabric
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run
from support.lab_runs import weights
from support.saying import said
from support.stopped_runs import train_until

TINY = Recipe(epochs=4, train_examples=128, test_examples=64)
PLAIN = Execution(tensorboard=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(TINY, folder, PLAIN)
    return folder


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """Stopped at step 5 of 8, with its last checkpoint at step 4."""
    execution = dataclasses.replace(PLAIN, save_every=2, log_every=1)
    return train_until(5, TINY, tmp_path_factory.mktemp("runs") / "unfinished", execution)


def test_a_folder_that_is_taken(capsys, finished, unfinished):
    line = said(capsys, "train", "--out", str(finished))
    assert "holds a finished run: give another --out" in line and "--resume" not in line
    assert f"resume it with --resume {unfinished}" in said(capsys, "train", "--out", str(unfinished))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("--device cuda:99", "device"), ("--micro-batch 7", "--micro-batch 7"), ("--precision fp16 --device cpu", "bf16")],
)
def test_other_mistakes_come_before_a_taken_folder(capsys, finished, arguments, expected):
    assert expected in said(capsys, "train", "--out", str(finished), *arguments.split())


def test_a_finished_run_that_is_resumed_says_so(capsys, finished):
    assert run(["train", "--resume", str(finished)]) == 0
    out, err = capsys.readouterr()
    assert "8 steps" in out and err == f"{finished} is already finished: nothing to train\n"
    assert run(["train", "--resume", str(finished), "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_an_unfinished_run_says_where_it_is(capsys, unfinished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unfinished, folder)
    assert run(["evaluate", str(folder), "--no-recalibrate"]) == 0
    assert "64 test images, at step 4 of 8\n" in capsys.readouterr().out
    record = json.loads((folder / "evaluation.json").read_text())
    assert (record["step"], record["steps"]) == (4, 8)
    assert run(["analyse", str(folder), "--batches", "1"]) == 0
    assert f"Norms of {folder}, at step 4 of 8\n" in capsys.readouterr().out
    assert Run.read(folder).analysis("layers")["step"] == Run.read(folder).analysis("variance-gap")["step"] == 4
    assert run(["export", str(folder), "-o", str(tmp_path / "model.safetensors")]) == 0
    assert "digits-net at step 4 of 8, population" in capsys.readouterr().out


def test_what_was_measured_before_a_run_went_on_is_gone(capsys, unfinished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unfinished, folder)
    assert run(["evaluate", str(folder), "--no-recalibrate"]) == 0
    analyse(folder, batches=1, device="cpu")
    train(TINY, folder, PLAIN, resume=True)
    assert not (folder / "evaluation.json").exists() and not (folder / "analysis").exists()
    capsys.readouterr()
    assert run(["evaluate", str(folder), "--no-recalibrate"]) == 0
    assert "64 test images\n" in capsys.readouterr().out
    train(TINY, folder, PLAIN, resume=True)
    assert (folder / "evaluation.json").exists(), "the run is finished, and what was measured still true"


OPTIONS = ["--epochs", "4", "--train-examples", "128", "--test-examples", "64", "--no-tensorboard"]


@pytest.fixture
def given_again(monkeypatch):
    """By a launcher, which gives the same command again."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")


def test_who_gives_a_command_again(monkeypatch):
    for name, value, again in (
        ("SLURM_JOB_ID", "5", False),
        ("SLURM_RESTART_COUNT", "0", False),
        ("SLURM_RESTART_COUNT", "2", True),
        ("TORCHELASTIC_RUN_ID", "none", True),
    ):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            assert launcher.repeats_commands() is again, name


@pytest.mark.parametrize("left", ["checkpoint", "recipe", "half a recipe", "half a checkpoint", "nothing"])
def test_a_launcher_goes_on_by_the_same_command(given_again, capsys, finished, unfinished, tmp_path, left):
    folder = tmp_path / "run"
    shutil.copytree(unfinished, folder)
    if left in ("recipe", "half a recipe", "nothing"):
        shutil.rmtree(folder / "checkpoint")
    if left == "half a recipe":
        (folder / "recipe.json").rename(folder / ".recipe.json.77.partial")
    if left == "half a checkpoint":
        last = checkpoint.checkpoints(folder)[-1]
        last.rename(last.with_name(f".{last.name}.partial"))
    if left == "nothing":
        shutil.rmtree(folder)
        folder.mkdir()
    assert run(["train", *OPTIONS, "--out", str(folder)]) == 0
    for name, value in weights(finished).items():
        assert torch.equal(weights(folder)[name], value), name
    capsys.readouterr()
    assert run(["train", *OPTIONS, "--out", str(folder)]) == 0
    assert capsys.readouterr().err == f"{folder} is already finished: nothing to train\n"


def test_a_launcher_is_refused_another_recipe(given_again, capsys, unfinished):
    line = said(capsys, "train", *OPTIONS, "--seed", "3", "--momentum", "0.5", "--out", str(unfinished))
    assert f"{unfinished} holds a run of another recipe, with momentum 0.9 instead of 0.5: give another --out" in line


def test_a_person_is_asked(monkeypatch, capsys, unfinished):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    line = said(capsys, "train", *OPTIONS, "--out", str(unfinished))
    assert f"holds an unfinished run: resume it with --resume {unfinished}" in line


def test_a_restart_waits_for_the_lock(given_again, tmp_path, monkeypatch):
    """Until the processes of the start before have ended."""
    folder, waits = tmp_path / "run", []
    holder = ExitStack()
    holder.enter_context(locked(folder))

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            holder.close()

    with monkeypatch.context() as clock:
        clock.setattr(time, "sleep", sleep)  # which filelock calls between two attempts
        assert train(TINY, folder, PLAIN)["steps"] == 8
    assert len(waits) == 3
    monkeypatch.setattr("kalmannorm.lab.training.train.PATIENCE", 0.2)
    with locked(tmp_path / "other"), pytest.raises(LabError, match="another process is at work"):
        train(TINY, tmp_path / "other", PLAIN)


def test_a_run_that_ends_while_a_restart_waits_is_left_as_it_is(given_again, tmp_path, finished, monkeypatch):
    def late(folder, patience):
        shutil.copytree(finished, folder)
        return nullcontext()

    monkeypatch.setattr("kalmannorm.lab.training.train.locked", late)
    train(TINY, tmp_path / "run", PLAIN)
    for name in ("log.jsonl", "result.json", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_ranks_that_do_not_share_a_folder(unfinished, tmp_path, monkeypatch):
    shutil.copytree(unfinished, tmp_path / "run")
    monkeypatch.setattr(Fabric, "all_gather", lambda self, own: torch.stack([own, torch.zeros_like(own)]))
    with pytest.raises(LabError, match=r"of steps 0, 4: give an --out on a disk that all ranks share"):
        train(TINY, tmp_path / "run", PLAIN, resume=True)


def test_event_files_hold_a_restarted_run_once(tmp_path):
    """One that was killed before its first checkpoint."""

    def crash(event):
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError):
        train(TINY, tmp_path / "run", Execution(log_every=1), watch=crash)
    train(TINY, tmp_path / "run", Execution(log_every=1), resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))


@pytest.mark.parametrize("command", [["evaluate"], ["analyse"], ["train", "--resume"]])
def test_a_folder_of_runs_is_not_a_run(capsys, finished, tmp_path, command):
    line = said(capsys, *command, str(finished.parent))
    assert "holds one: give one, such as" in line and str(finished) in line
    assert "there is no folder" in said(capsys, *command, str(tmp_path / "nowhere"))
    assert "is not a run: it holds no recipe.json" in said(capsys, *command, str(tmp_path))


@pytest.fixture
def full_disk(monkeypatch):
    """Call it with a condition under which nothing more fits."""
    synced = os.fsync

    def fill(when):
        def sync(descriptor):
            if when():
                raise OSError(errno.ENOSPC, "No space left on device")
            synced(descriptor)

        monkeypatch.setattr(os, "fsync", sync)

    return fill


def test_a_full_disk_says_which_command_goes_on(capsys, tmp_path, full_disk):
    folder = tmp_path / "run"
    options = ["--epochs", "4", "--train-examples", "128", "--test-examples", "64", "--out", str(folder), "--json"]
    full_disk(lambda: True)
    line = said(capsys, "train", *options)
    assert "free some, then run the same command again" in line and "--resume" not in line
    full_disk(lambda: checkpoint.checkpoints(folder))
    line = said(capsys, "train", *options)
    assert line.strip().endswith(f"free some, then resume with: kalmannorm train --resume {folder}")
    full_disk(lambda: False)
    assert run(["train", "--resume", str(folder)]) == 0


def test_commands_without_resume_do_not_speak_of_it(capsys, finished, tmp_path, full_disk):
    full_disk(lambda: True)
    line = said(capsys, "report", str(finished), "--out", str(tmp_path / "report.html"))
    assert "free some, then run the same command again" in line and "--resume" not in line
    with pytest.raises(FullDiskError):  # as a comparison hears of it
        train(TINY, tmp_path / "run", PLAIN)


def test_event_files_on_a_full_disk(capsys, tmp_path, monkeypatch):
    """They are written by another library, which knows nothing of our errors."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    line = said(capsys, "train", "--epochs", "1", "--train-examples", "128", "--out", str(tmp_path / "run"), "--json")
    assert line == (
        f"kalmannorm: no space left in {tmp_path / 'run'}: free some, then resume with: "
        f"kalmannorm train --resume {tmp_path / 'run'}\n"
    )


def test_a_log_that_cannot_be_opened(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(LabError, match="cannot write"):
        Log(tmp_path / "log.jsonl")


def test_a_damaged_run_is_named_in_the_terminal_too(capsys, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "good")
    shutil.copytree(finished, tmp_path / "bad")
    (tmp_path / "bad" / "recipe.json").write_text("{")
    options = ["--no-draw", "--out", str(tmp_path / "report.html")]
    assert run(["report", str(tmp_path / "good"), str(tmp_path / "bad"), *options]) == 0
    out, err = capsys.readouterr()
    assert out == f"Wrote {tmp_path / 'report.html'}\n"
    assert err.startswith("kalmannorm: left out bad: ") and "is damaged" in err and err.count("\n") == 1
