"""One process at a time in a run's folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kalmannorm.lab.errors import LabError

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows, where two processes are on their own
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: Path, patience: float = 0) -> Iterator[None]:
    """The folder is this process's while this lasts; the lock goes with the process, however it ends.

    Where another process holds it, this one waits for so many seconds before it gives up.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("wb")
    except OSError as error:
        raise LabError(f"cannot write to {folder}: {error.strerror or error}") from None
    with file:
        until = time.monotonic() + patience
        while not _taken(file):
            if time.monotonic() >= until:
                raise LabError(f"another process is at work in {folder}: wait for it, or give another --out")
            time.sleep(0.1)
        yield


def _taken(file: IO[bytes]) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
