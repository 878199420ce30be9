"""Data sets by name. Small ones are kept on the device, image folders are read from files. See docs/data.md."""

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
    """Load a data set for training.

    Args:
        name: one of `names()`, or "folder:PATH" for an image folder with train/ and val/.
        root: the folder of all data sets; None is $KALMANNORM_DATA, else kalmannorm in the user's cache.
        device: the device of the batches, and of small data sets as a whole.
        image_size: images are scaled to this many pixels square; None is the data set's own size.
        train_examples, test_examples: the most examples, with the same share of each class, and equal in all runs.
        workers: processes that read an image folder. Their number affects only the speed.
        seed: chooses those examples. Compared runs must have the same seed here. It is not the seed of a training.
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
