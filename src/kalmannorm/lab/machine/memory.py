"""Memory: refuse tensors that cannot fit before the work starts, and recognize out-of-memory errors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from kalmannorm.lab.errors import LabError


def total() -> int | None:
    """Bytes of memory of this machine; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def check_fits(what: str, shape: Sequence[int], bytes_each: int, remedy: str) -> None:
    """Raise if a single tensor of this shape needs more than the whole memory."""
    wanted, there = bytes_each * math.prod(shape), total()
    if there is not None and wanted > there:
        raise LabError(f"{what} take {_shown(wanted)} of memory, but this machine has {_shown(there)}: {remedy}")


def ran_out(error: BaseException) -> bool:
    """Whether this is an out-of-memory error. The CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _shown(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:,.1f} {name}"
