"""Data sets by name. Small ones live on the device; image folders stream from files. See docs/data.md."""

from __future__ import annotations

from pathlib import Path

import torch

from kalmannorm.lab.bounds import IMAGE_SIZE, at_least
from kalmannorm.lab.data.catalogue import find, names
from kalmannorm.lab.data.files import data_root
from kalmannorm.lab.data.protocol import Batch, Data
from kalmannorm.lab.data.source import Options

__all__ = ["Batch", "Data", "data_root", "find", "load", "names"]


def load(
    name: str,
    *,
    root: Path | None = None,
    device: str | torch.device = "cpu",
    image_size: int | None = None,
    train_examples: int | None = None,
    test_examples: int | None = None,
    workers: int = 4,
    seed: int = 0,
) -> Data:
    """A data set, ready to be trained on.

    Args:
        name: one of `names()`, or "folder:PATH" for an image folder with train/ and val/.
        root: the folder of all data sets; None is $KALMANNORM_DATA, else kalmannorm in the user's cache.
        device: where the batches, and small sets altogether, are to be.
        image_size: images are scaled to so many pixels square; None is the data set's own size.
        train_examples, test_examples: at most so many, of each class its share, the same for every run.
        workers: processes that read an image folder; their number changes nothing but the speed.
        seed: chooses those examples. Runs that are compared must share it; it is not the seed of a training.
    """
    for option, bounds, value in (
        ("image_size", IMAGE_SIZE, image_size),
        ("train_examples", at_least(1), train_examples),
        ("test_examples", at_least(1), test_examples),
        ("workers", at_least(0), workers),
    ):
        if value is not None:
            bounds.check(option, value)
    options = Options(torch.device(device), image_size, train_examples, test_examples, workers, seed)
    return find(name).load(data_root(root), options)
