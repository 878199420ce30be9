"""Runs of the lab as a user starts them: in a process of their own, with one thread, on digits."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import safetensors.torch
import torch

from kalmannorm.lab.files.records import Run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


@contextlib.contextmanager
def among_few_objects() -> Iterator[None]:
    """`convert` looks at every object of the process: it takes a tenth of the time where those of today are frozen.

    For models that the lab builds inside, which share no tensor with what was there before.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def launcher(ranks: int) -> list[str]:
    """Python, on so many ranks."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]


def command(*arguments: str, ranks: int = 1) -> list[str]:
    return [*launcher(ranks), "-m", "kalmannorm", *arguments]


def kalmannorm(
    *arguments: str, ranks: int = 1, status: int = 0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments, ranks=ranks), env=ENVIRONMENT, capture_output=True, text=True, timeout=300, cwd=cwd
    )
    assert done.returncode == status, done.stderr
    return done


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks that a torchrun process has started, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            found |= {int(rank): child.pid for rank in [child.environ().get("RANK")] if rank is not None}
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def numbers(folder: Path) -> list[dict[str, object]]:
    """The log, without what depends on the clock."""
    return [
        {key: value for key, value in event.items() if key not in ("seconds", "images_per_second")}
        for event in Run.read(folder).events()
    ]


def losses(folder: Path) -> torch.Tensor:
    return torch.tensor([event["loss"] for event in Run.read(folder).events("train")], dtype=torch.float64)


def find_runs(folder: Path) -> Iterator[Run]:
    """All runs in a folder, at any depth, sorted by path."""
    for path in sorted(folder.rglob("recipe.json")):
        yield Run.read(path.parent)
