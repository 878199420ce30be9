"""Image files to pixels, in threads; a file that is no image, or too large a one, is named.

An image may have 89,478,485 pixels, which is where Pillow begins to warn of files that are small and decode to
gigabytes, and its longer side may be 100 times its shorter: scaled to its shorter side it would grow by as much.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kalmannorm.lab.data.files import DamagedDataError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

MOST_PIXELS = 89_478_485
MOST_LONG = 100
_filters = threading.Lock()
"""Filters of warnings are the whole process's: one thread at a time may change them."""


def opened(path: str | Path) -> Image:
    """The decoded image, in RGB."""
    import PIL.Image

    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedDataError(f"{path} is no regular file: restore it or take it away")
            with _header(file) as image:
                _check_size(path, *image.size)
                rgb: Image = image.convert("RGB")
                return rgb
    except DamagedDataError:
        raise
    except PIL.Image.DecompressionBombError:
        raise _too_large(path, f"more than {2 * MOST_PIXELS:,}") from None
    except Exception as error:  # of a damaged file Pillow's readers may raise anything
        reason = " ".join(_named(error).split())
        raise DamagedDataError(f"{path} is no image that can be read ({reason}): restore it or take it away") from None


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to would be waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _header(file: IO[bytes]) -> Image:
    """The image before it is decoded, without a warning of its size."""
    import PIL.Image

    file.read(1)  # the disk is waited for outside of the lock
    file.seek(0)
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        return PIL.Image.open(file)


def _check_size(path: str | Path, width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise _too_large(path, f"{width * height:,}")
    if max(width, height) > MOST_LONG * min(width, height):
        raise DamagedDataError(
            f"{path} has {width:,}×{height:,} pixels, and one side may be {MOST_LONG} times the other: crop it or take "
            "it away"
        )


def _too_large(path: str | Path, count: str) -> DamagedDataError:
    return DamagedDataError(
        f"{path} holds {count} pixels, and {MOST_PIXELS:,} are the most: scale it down or take it away"
    )


def _named(error: Exception) -> str:
    """What it says, without the file, which is named before."""
    import PIL

    if isinstance(error, PIL.UnidentifiedImageError):
        return "cannot identify image file"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def pixels(paths: Sequence[Path], side: int) -> NDArray[np.uint8]:
    """All images, (N, 3, side, side)."""
    result = np.empty((len(paths), 3, side, side), np.uint8)

    def decode(position: int) -> None:
        image = np.asarray(opened(paths[position]))
        if image.shape != (side, side, 3):
            height, width = image.shape[:2]
            raise DamagedDataError(f"{paths[position]} is damaged: {width}×{height} pixels instead of {side}×{side}")
        result[position] = image.transpose(2, 0, 1)

    _in_threads(decode, range(len(paths)))
    return result


def check(paths: Sequence[str]) -> None:
    """Raise DamagedDataError at a file that cannot be decoded."""
    _in_threads(opened, paths)


def _in_threads(work: Callable[[T], object], items: Sequence[T]) -> None:
    """In chunks, so that neither a million results nor a million waiting tasks are kept."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(items), 1024):
            for _ in pool.map(work, items[start : start + 1024]):
                pass
