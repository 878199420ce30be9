"""Killed at a random moment, a run goes on to the same end: one attack here, many by `python benchmarks/attack.py`.

There every start is a new process, which imports torch for seconds. Here the starts are forks of one process that has.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch

from kalmannorm_command.app import run
from support.attacks import kills

OPTIONS = [
    *("--epochs", "1", "--train-examples", "192", "--test-examples", "16", "--setting", "16,2", "--device", "cpu"),
    *("--save-every", "2", "--log-every", "3", "--evaluate-every", "0", "--precision", "float64", "--no-tensorboard"),
]


class Forked:
    """A run in a fork, with what `kills` needs of a Popen."""

    def __init__(self, folder: Path, ranks: int, *, resume: bool = False) -> None:
        words = ["train", *(["--resume", str(folder)] if resume else [*OPTIONS, "--out", str(folder)])]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kalmannorm_command.app", "kalmannorm.lab.training.train", "support.lab_runs"])
        self._process = context.Process(target=inside, args=(words, folder.with_name(f"{folder.name}.stderr")))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("train", seconds or 0)
        return self._process.exitcode


def inside(words: list[str], errors: Path) -> None:
    with errors.open("a") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as sys.stdout:
        sys.exit(run(words))


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "_start", Forked)
    counts = kills.run(1, 148, tmp_path)
    assert counts["kills"] == counts["restarts"] == 1, "the run ended before it was killed: give another seed"
    assert not any(counts[name] for name in kills.MUST_BE_ZERO), counts
