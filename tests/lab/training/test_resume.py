"""A run that was interrupted, in whatever way, ends as if it had not been: the same weights, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from kalmannorm.lab.errors import Interrupted, LabError
from kalmannorm.lab.files import checkpoint
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run
from support.lab_runs import ENVIRONMENT, command, kalmannorm, launcher, numbers, weights, workers
from support.wide import narrow, wide

STEPS = ["--epochs", "6", "--evaluate-every", "5", "--save-every", "9", "--log-every", "4"]


def assert_same(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(["train", *STEPS, "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    "kind",
    narrow([signal.SIGINT, signal.SIGKILL, signal.SIGTERM], [signal.SIGINT, signal.SIGKILL]),
    ids=lambda kind: kind.name,
)
def test_resumes_to_the_same_weights(uninterrupted, tmp_path, kind):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command("train", *STEPS, "--out", str(folder)), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and len(checkpoint.checkpoints(folder)) < 2:
        time.sleep(0.01)
    process.send_signal(kind)
    _, errors = process.communicate(timeout=60)
    assert not (folder / "result.json").exists(), "the run ended before the signal came: make it longer"
    if kind == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert f"kalmannorm train --resume {folder}" in errors.splitlines()[-1]
    assert run(["train", "--resume", str(folder)]) == 0
    assert_same(folder, uninterrupted)
    assert not (folder / "checkpoint").exists()


def test_a_second_signal_stops_at_once_and_keeps_what_was_saved(tmp_path):
    recipe = Recipe(epochs=2, train_examples=256, evaluate_every=0)

    def impatient(event):
        if event.get("step") == 3:
            signal.raise_signal(signal.SIGINT)
            time.sleep(1.1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="at once; --resume continues"):
        train(recipe, tmp_path / "run", Execution(save_every=2, log_every=1), watch=impatient)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["step-00000002"]


@wide  # a minute; `test_meeting.py` guards how ranks of a new start find each other
def test_two_ranks_start_and_restart_by_one_command(tmp_path):
    """A rank is killed, and torchrun starts both again; then the job is told to end, and the command given again."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    steps = ["--epochs", "3", "--evaluate-every", "2", "--save-every", "10", "--log-every", "6"]
    steps += ["--method", "bkn-learned", "--setting", "64,2", "--precision", "float64"]
    kalmannorm("train", *steps, "--out", str(whole), ranks=2)
    words = [*launcher(2), "--max-restarts", "1", "-m", "kalmannorm", "train", *steps, "--out", str(folder)]
    process = subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)

    def wait(reached):
        while process.poll() is None and not reached():
            time.sleep(0.01)

    wait(lambda: checkpoint.checkpoints(folder))
    os.kill(workers(process)[1], signal.SIGKILL)
    wait(lambda: len(checkpoint.checkpoints(folder)) == 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert not (folder / "result.json").exists(), "the run ended before the signal came: make it longer"
    assert errors.count(f"kalmannorm train --resume {folder}") == 1
    assert errors.count("kalmannorm: another rank has ended") == 1, "rank 0 says it of rank 1, in one line"
    assert "kalmannorm/lab" not in errors, "no traceback of ours"
    subprocess.run(words, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    assert_same(folder, whole)


def test_a_log_cut_in_the_middle_of_a_line_goes_on(tmp_path):
    """As a crash may leave it: what came after the checkpoint is written again."""
    recipe, quick = Recipe(epochs=1, statistics_batch=1, train_examples=256), Execution(save_every=2, log_every=1)
    train(recipe, tmp_path / "whole", quick)

    def crash(event):
        if event.get("step") == 3:
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError):
        train(recipe, tmp_path / "cut", quick, watch=crash)
    with (tmp_path / "cut" / "log.jsonl").open("a") as log:
        log.write('{"event": "tra')
    train(recipe, tmp_path / "cut", quick, resume=True)
    assert_same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(method="brn", optimizer="adamw", learning_rate=1e-3), marks=wide),
        Recipe(method="bkn-learned", precision="bf16", channels_last=True),
        Recipe(method="bn", statistics_batch=1, finish_epochs=1, schedule="linear"),
        Recipe(method="bkn", statistics_batch=1, closing_start=0.4, closing_end=0.9),
        # The next one is a net without statistics.
        Recipe(method="gn", warmup_epochs=1, label_smoothing=0.1, deterministic=True),
    ],
    ids=["brn-adamw", "learned-bf16", "bn-finish", "bkn-closing", "gn-warmup"],
)
def test_resumes_whatever_the_recipe(tmp_path, recipe):
    recipe = dataclasses.replace(recipe, epochs=3, train_examples=256, test_examples=64, evaluate_every=0)
    execution = Execution(save_every=5, tensorboard=False)
    train(recipe, tmp_path / "whole", execution)
    stop_at = 11  # in the last epoch, on frozen statistics where the recipe says so

    def stop(event):
        if event.get("step", 0) >= stop_at:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(LabError, match="saved at step"):
        train(recipe, tmp_path / "parts", execution, watch=stop)
    train(recipe, tmp_path / "parts", execution, resume=True)
    assert_same(tmp_path / "parts", tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is(tmp_path):
    recipe = Recipe(epochs=1, train_examples=64, test_examples=64)
    result = train(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    assert train(recipe, tmp_path / "run", resume=True)["accuracy"] == result["accuracy"]
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == before
    with pytest.raises(LabError, match="another recipe"):
        train(dataclasses.replace(recipe, seed=1), tmp_path / "run", resume=True)
    with pytest.raises(LabError, match="holds a finished run"):
        train(recipe, tmp_path / "run")
