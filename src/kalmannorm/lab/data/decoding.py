"""Decodes image files in threads. An error names a file that is not an image or is too large.

An image may have 89,478,485 pixels. Above this size Pillow warns of small files that decode to gigabytes. The longer
side of an image may be 100 times its shorter side, because scaling the shorter side scales the longer one equally.
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
"""Warning filters belong to the whole process, so only one thread at a time may change them."""


def opened(path: str | Path) -> Image:
    """The decoded image, in RGB."""
    import PIL.Image

    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedDataError(f"{path} is not a regular file: restore it or delete it")
            with _header(file) as image:
                _check_size(path, *image.size)
                rgb: Image = image.convert("RGB")
                return rgb
    except DamagedDataError:
        raise
    except PIL.Image.DecompressionBombError:
        raise _too_large(path, f"more than {2 * MOST_PIXELS:,}") from None
    except Exception as error:  # Pillow may raise anything for a damaged file
        reason = " ".join(_named(error).split())
        raise DamagedDataError(f"{path} is not a readable image ({reason}): restore it or delete it") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open without blocking, because a pipe without a writer would block forever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _header(file: IO[bytes]) -> Image:
    """The image before it is decoded. Warnings about its size are suppressed."""
    import PIL.Image

    file.read(1)  # wait for the disk before taking the lock
    file.seek(0)
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        return PIL.Image.open(file)


def _check_size(path: str | Path, width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise _too_large(path, f"{width * height:,}")
    if max(width, height) > MOST_LONG * min(width, height):
        raise DamagedDataError(
            f"{path} has {width:,}×{height:,} pixels; one side may be at most {MOST_LONG} times the other: "
            "crop it or delete it"
        )


def _too_large(path: str | Path, count: str) -> DamagedDataError:
    return DamagedDataError(f"{path} has {count} pixels; the limit is {MOST_PIXELS:,}: scale it down or delete it")


def _named(error: Exception) -> str:
    """The error message without the file name, which the caller adds."""
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
    """Raise DamagedDataError for a file that cannot be decoded."""
    _in_threads(opened, paths)


def _in_threads(work: Callable[[T], object], items: Sequence[T]) -> None:
    """Work in chunks, so that not all results and waiting tasks of a million items are kept in memory."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(items), 1024):
            for _ in pool.map(work, items[start : start + 1024]):
                pass
