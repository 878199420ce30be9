"""Cells on the workers of a Dask cluster: every cell once, the numbers of one machine, and no worker is missed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from kalmannorm.lab.comparing.cells import grid
from kalmannorm.lab.comparing.compare import FailedCellsError, run_cells
from kalmannorm.lab.files import checkpoint
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.presets import preset
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.recipes.setting import Setting
from support import cells_trainers as trainers
from support.dask_cluster import LocalCluster
from support.lab_runs import ENVIRONMENT, numbers, weights
from support.saying import said
from support.wide import narrow, wide

CHANGES = {"epochs": 8.0, "train_examples": 512, "test_examples": 64, "evaluate_every": 0.0}
CELLS = grid(preset("digits"), ["bn", "gn", "bkn"], [Setting(64, 2)], [0], CHANGES)
ONE_THREAD = Execution(device="cpu", threads=1, save_every=4, log_every=1, tensorboard=False)


@pytest.fixture
def cluster(tmp_path):
    made = LocalCluster(tmp_path)
    yield made
    made.close()


def begun(folder: Path) -> list[list[int]]:
    """Who began this cell: its process, and the worker that started this process."""
    path = folder / "begun"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def eventually(condition, seconds: float = 300) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_two_workers_one_killed_every_cell_once_the_same_numbers(cluster, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    run_cells(CELLS, here, ONE_THREAD, jobs=1, quiet=True)
    victim, _ = cluster.hire(), cluster.hire()
    killed: list[str] = []
    over = threading.Event()

    def kill() -> None:
        """The machine of a worker is lost, with the cell that it trains, after the first checkpoint of this cell."""
        while not _at_work(there, victim.pid):  # on a busy machine this takes minutes
            if over.wait(0.02):
                return
        for name, _ in CELLS:
            if any(parent == victim.pid for _, parent in begun(there / name)) and checkpoint.checkpoints(there / name):
                worker = psutil.Process(victim.pid)
                for process in [*worker.children(), worker]:
                    process.kill()
                killed.append(name)
                return

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        runs = run_cells(CELLS, there, ONE_THREAD, cluster=str(cluster.file), quiet=True, trainer=trainers.counted)
    finally:
        over.set()
    killer.join()
    assert [run.folder.name for run in runs] == [name for name, _ in CELLS]
    (lost,) = killed
    assert {name: len(begun(there / name)) for name, _ in CELLS} == {name: 1 + (name == lost) for name, _ in CELLS}
    for name, _ in CELLS:
        assert numbers(there / name) == numbers(here / name), name
        for key, value in weights(here / name).items():
            assert torch.equal(weights(there / name)[key], value), (name, key)
    # The same command again trains nothing, and needs no cluster.
    cluster.close()
    run_cells(CELLS, there, ONE_THREAD, cluster=str(cluster.file), quiet=True, trainer=trainers.counted)
    assert sum(len(begun(there / name)) for name, _ in CELLS) == len(CELLS) + 1


def _at_work(folder: Path, worker: int) -> bool:
    return any(
        parent == worker and checkpoint.checkpoints(folder / name) and not (folder / name / "result.json").exists()
        for name, _ in CELLS
        for _, parent in begun(folder / name)
    )


@wide
def test_a_cell_that_fails_stops_no_other(cluster, tmp_path):
    cluster.hire()
    cells = [(f"cell-{seed}", Recipe(seed=seed)) for seed in (0, 2, 4, 6)]
    with pytest.raises(FailedCellsError) as caught:
        run_cells(
            cells, tmp_path / "runs", ONE_THREAD, cluster=str(cluster.file), quiet=True, trainer=trainers.troubled
        )
    assert {run.folder.name for run in caught.value.runs} == {"cell-0", "cell-6"}
    assert caught.value.failures["cell-2"] == "the data are missing: fetch them"
    assert "SIGKILL" in caught.value.failures["cell-4"]
    assert cluster.workers[0].poll() is None, "the worker survives its cells"


SCRIPT = """
import sys
from pathlib import Path
from support import cells_trainers as trainers
from kalmannorm.lab.comparing.compare import run_cells
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.recipes.recipe import Execution, Recipe

cells = [(f"cell-{seed}", Recipe(seed=seed)) for seed in range(4)]
try:
    run_cells(cells, Path(sys.argv[1]), Execution(device="cpu"), cluster=sys.argv[2], trainer=trainers.patient)
except LabError as error:
    print(error)
    sys.exit(error.status)
"""


@pytest.mark.parametrize("kind", narrow([signal.SIGINT, signal.SIGKILL], [signal.SIGINT]), ids=lambda kind: kind.name)
def test_workers_save_when_the_command_is_interrupted_or_killed(cluster, tmp_path, kind):
    cluster.hire()
    folder = tmp_path / "runs"
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", SCRIPT, str(folder), str(cluster.file)]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        asked = eventually(lambda: list(folder.glob("*/waiting")))
        process.send_signal(kind if asked else signal.SIGKILL)
        printed, _ = process.communicate(timeout=200)
    assert asked
    assert eventually(lambda: list(folder.glob("*/saved.json")), 100)
    assert Run.read(folder / "cell-0").finished
    assert not list(folder.glob("cell-[23]")), "a cell was begun afterwards"
    assert cluster.workers[0].poll() is None
    if kind == signal.SIGINT:
        assert process.returncode == 130
        assert "1 of 4 runs are finished" in printed


@wide
def test_a_worker_with_a_nanny_is_told(cluster, tmp_path):
    """Its process is a daemon of multiprocessing, and must not have children."""
    cluster.hire("--nanny", "--nthreads", "1", "--no-dashboard")
    with pytest.raises(FailedCellsError, match="give dask worker --no-nanny"):
        run_cells(CELLS[:1], tmp_path / "runs", ONE_THREAD, cluster=str(cluster.file), quiet=True)


def test_mistakes_are_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("kalmannorm.lab.comparing.cluster.PATIENCE", 1)
    out = ["--out", str(tmp_path / "runs"), "--seeds", "1"]
    assert "--cluster nowhere.json is no file" in said(capsys, "compare", "--cluster", "nowhere.json", *out)
    assert "--jobs is for one machine" in said(capsys, "compare", "--cluster", "nowhere.json", "--jobs", "2", *out)
    assert "no Dask scheduler answers" in said(capsys, "compare", "--cluster", "what://x", *out)
    assert "leave out --cluster" in said(capsys, "reproduce", "speed", "--cluster", "tcp://x", *out[:2])
