"""Image files to pixels, in threads; a file that is no image is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kalmannorm.lab.data.files import DamagedDataError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")


def opened(path: str | Path) -> Image:
    """The decoded image, in RGB."""
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            rgb: Image = image.convert("RGB")
            return rgb
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        reason = str(error).replace(f" {str(path)!r}", "") or type(error).__name__
        raise DamagedDataError(f"{path} is no image that can be read ({reason}): restore it or take it away") from None


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
