"""Where to compute: which device a name means, or the line that says why it means none; and on how many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kalmannorm.lab.bounds import whole
from kalmannorm.lab.errors import LabError


def resolve(device: str) -> torch.device:
    """ "auto" is the first GPU, or the CPU where there is none."""
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
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_at_once() -> int:
    """Threads or processes that make any sense here. A run may have begun on a machine with more cores than this."""
    return max(64, 4 * cores())


def check_threads(count: int | None) -> None:
    if count is not None:
        whole(1, most_at_once()).check("threads", count)


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """The CPU computes on so many threads while this lasts; None leaves their number as it is."""
    check_threads(count)
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)
