"""Memory: what cannot fit into this machine is refused before the work; running out of it is known by its error."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from kalmannorm.lab.errors import LabError


def total() -> int | None:
    """Bytes of this machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def check_fits(what: str, shape: Sequence[int], bytes_each: int, remedy: str) -> None:
    """Raise where a tensor of this shape alone takes more than all memory."""
    wanted, there = bytes_each * math.prod(shape), total()
    if there is not None and wanted > there:
        raise LabError(f"{what} take {_shown(wanted)} of memory, and this machine has {_shown(there)}: {remedy}")


def ran_out(error: BaseException) -> bool:
    """Whether this error says that memory was lacking. The CPU's allocator has no exception of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _shown(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:,.1f} {name}"
