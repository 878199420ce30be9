"""CIFAR-100 from image files: `train/CLASS/*.png` and `test/CLASS/*.png`, as some collections of data sets have it.

The classes of CIFAR-100 are numbered in the order of their names. The images are sorted by a checksum of their content.
So the order depends on nothing but the images, and neighbours are not of one class.
"""

from __future__ import annotations

import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kalmannorm.lab.errors import LabError

PARTS = ("train", "test")


def convert(folder: Path, target: Path, classes: int, label_key: str) -> None:
    """Write the images of `folder` into `target`, one pickle for each part."""
    target.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        names = sorted(path.name for path in (folder / part).iterdir() if path.is_dir()) if folder.is_dir() else []
        if len(names) != classes:
            raise LabError(f"{folder / part} has {len(names)} folders of classes, and {classes} are expected")
        files = [
            (path, label) for label, name in enumerate(names) for path in sorted((folder / part / name).glob("*.png"))
        ]
        with ThreadPoolExecutor() as pool:
            pixels = list(pool.map(_pixels, (path for path, _ in files)))
        order = sorted(range(len(files)), key=lambda number: hashlib.sha256(pixels[number].data).digest())
        record = {
            "data": np.stack([pixels[number] for number in order]),
            label_key: [files[number][1] for number in order],
        }
        (target / part).write_bytes(pickle.dumps(record, protocol=4))


def _pixels(path: Path) -> NDArray[np.uint8]:
    """Channel by channel, as in CIFAR's own files."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1)).reshape(-1)
    except OSError as error:
        raise LabError(f"{path} cannot be read as an image: {error}") from None
