"""Devices by name, and CPU threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kalmannorm.lab.bounds import whole
from kalmannorm.lab.errors import LabError


def resolve(device: str) -> torch.device:
    """The device of this name. "auto" is the first GPU, or the CPU if there is no GPU."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise LabError(f"unknown device {device!r}: give auto, cpu, cuda or cuda:1") from None
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise LabError(f"device {device!r}: torch sees no GPU here; give --device cpu")
        if (found.index or 0) >= torch.cuda.device_count():
            raise LabError(f"device {device!r}: torch sees {torch.cuda.device_count()} GPUs here, numbered from 0")
        return torch.device("cuda", found.index or 0)
    if found.type != "cpu" or found.index is not None:
        raise LabError(f"device {device!r} is not supported: give auto, cpu, cuda or cuda:1")
    return found


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_at_once() -> int:
    """Limit for threads and processes. A resumed run may ask for more, if it began on a machine with more cores."""
    return max(64, 4 * cores())


def check_threads(count: int | None) -> None:
    if count is not None:
        whole(1, most_at_once()).check("threads", count)


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Use this many CPU threads inside the context. None changes nothing."""
    check_threads(count)
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)
