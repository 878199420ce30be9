"""--threads: used by what computes, recorded, left as it was; a hint where it would help."""

from __future__ import annotations

import pytest
import torch

from kalmannorm.lab.comparing.pool import Seat, seats
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run
from kalmannorm_command.progress import crowded

TINY = Recipe(epochs=1, train_examples=64, test_examples=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(TINY, folder, Execution(threads=2, tensorboard=False))
    return folder


def test_a_run_computes_on_them_and_says_so(folder):
    record = Run.read(folder).record
    assert record["execution"]["threads"] == 2 and record["origin"]["threads"] == "2"
    assert torch.get_num_threads() == 1, "as before"


@pytest.mark.parametrize(
    ("command", "target"),
    [
        ("evaluate", "kalmannorm.lab.training.evaluate.evaluate"),
        ("analyse", "kalmannorm.lab.analysis.analyse.analyse"),
    ],
)
def test_looking_at_a_run_computes_on_them(folder, monkeypatch, command, target):
    found = []

    def measure(*_, **__):
        found.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(target, measure)
    assert run([command, str(folder), "--threads", "3"]) == 130
    assert found == [3] and torch.get_num_threads() == 1


def test_timed_steps_run_on_them(tmp_path, monkeypatch):
    found = []

    def measure(*_, **__):
        found.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr("kalmannorm.lab.experiments.speed.time_steps", measure)
    assert run(["reproduce", "speed", "--dataset", "digits", "--threads", "3", "--out", str(tmp_path)]) == 130
    assert found == [3]


def test_workers_compute_on_them():
    assert seats("cpu", 2, 3) == [Seat("cpu", 3)] * 2
    assert all(seat.threads >= 1 for seat in seats("cpu", 64))


def test_a_resumed_run_keeps_them(tmp_path, monkeypatch):
    """A sum over other threads rounds differently, and the run would end with other weights."""
    options = ["--epochs", "1", "--train-examples", "64", "--test-examples", "64", "--no-tensorboard"]
    with monkeypatch.context() as trouble:
        trouble.setattr(
            "kalmannorm.lab.training.train.evaluate", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        assert run(["train", *options, "--threads", "2", "--out", str(tmp_path / "run")]) == 130
    found = []
    monkeypatch.setattr("kalmannorm.lab.training.train.train", lambda *given, **_: found.append(given[2]) or {})
    monkeypatch.setattr("kalmannorm_command.progress.result_table", lambda *_: None)
    assert run(["train", "--resume", str(tmp_path / "run")]) == 0
    assert run(["train", "--resume", str(tmp_path / "run"), "--threads", "1"]) == 0
    assert [execution.threads for execution in found] == [2, 1]


@pytest.mark.parametrize(
    ("load", "threads", "cores", "hinted"),
    [(3.0, 2, 2, True), (0.1, 2, 2, False), (9.0, 1, 2, False), (1, 8, 8, False)],
)
def test_a_hint_where_others_compute(monkeypatch, load, threads, cores, hinted):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hint = crowded()
    assert (hint is not None and "--threads 1" in hint) == hinted
