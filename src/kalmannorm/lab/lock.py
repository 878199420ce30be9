"""One process at a time in a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kalmannorm.lab.errors import LabError

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows, where two processes are on their own
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder is this process's while this lasts; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("wb")
    except OSError as error:
        raise LabError(f"cannot write to {folder}: {error.strerror or error}") from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise LabError(f"another process is at work in {folder}: wait for it, or give another --out") from None
        yield
