"""Where data sets are stored, their errors, and how a download replaces the old files in one step."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kalmannorm.lab.errors import LabError

Say = Callable[[str], None]
"""Prints a line about the progress of a download."""


class MissingDataError(LabError):
    """A data set is missing. The message says how to get it."""


class DamagedDataError(LabError):
    """A file has the wrong content. The message says how to repair it."""


class OutOfReachError(LabError):
    """A source cannot be downloaded from. Another source may work."""


def data_root(given: Path | None = None) -> Path:
    """The folder of all data sets: the given one, else $KALMANNORM_DATA, else kalmannorm in the user's cache."""
    if given is not None:
        return at_home(given)
    if chosen := os.environ.get("KALMANNORM_DATA"):
        return at_home(chosen)
    return at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kalmannorm"


def at_home(path: str | Path) -> Path:
    """Replace ~ by the user's home. For an unknown user the path stays unchanged."""
    return Path(os.path.expanduser(path))


def remedy(name: str, root: Path) -> str:
    """The command that downloads a data set to this root."""
    return f"kalmannorm data fetch {name}" + ("" if root == data_root() else f" --data-root {root}")


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


@contextmanager
def arriving(target: Path) -> Iterator[Path]:
    """An empty temporary folder beside `target`. If no error occurs, its entry `target.name` replaces the target.

    Until then, and after any error, the old target stays unchanged.
    """
    folder = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(
            f"cannot write to {target.parent} ({error.strerror or error}): choose another --data-root"
        ) from error
    try:
        yield folder
        _swap(folder / target.name, target, folder / "replaced")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LabError(f"no space left in {target.parent}: free some, or choose another --data-root") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise LabError(f"cannot write to {target.parent}: choose another --data-root") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _swap(arrived: Path, target: Path, replaced: Path) -> None:
    if not target.exists():
        os.replace(arrived, target)
        return
    os.replace(target, replaced)
    try:
        os.replace(arrived, target)
    except OSError:
        os.replace(replaced, target)
        raise
