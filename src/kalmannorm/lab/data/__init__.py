"""Data sets by name. Small ones live on the device; image folders stream from files. See docs/data.md."""

from __future__ import annotations

from pathlib import Path

import torch

from kalmannorm.lab.data import digits
from kalmannorm.lab.data.protocol import Batch, Data
from kalmannorm.lab.errors import one_of

__all__ = ["Batch", "Data", "load", "names"]


def names() -> list[str]:
    return ["digits"]


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
    """A data set, ready to be trained on."""
    one_of("dataset", name, names())
    return digits.load(torch.device(device), image_size, train_examples, test_examples, seed)
