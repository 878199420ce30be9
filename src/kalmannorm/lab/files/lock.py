"""A lock on a run's folder: only one process at a time may work in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kalmannorm.lab.errors import LabError


@contextmanager
def locked(folder: Path, patience: float = 0) -> Iterator[None]:
    """Hold the folder's lock. The operating system releases it when the process ends, even after a crash.

    If another process holds the lock, wait up to `patience` seconds for it, then raise.
    """
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=patience, poll_interval=0.1)
    except Timeout:
        raise LabError(f"another process is at work in {folder}: wait for it, or give another --out") from None
    except OSError as error:
        raise LabError(f"cannot write to {folder}: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()
