"""What the lab asks of a data set, whether it lives on the device or streams from files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Images (n, C, H, W), normalized, and labels (n,), both on the device."""


class Data(Protocol):
    """Every batch is a function of (seed, epoch, position) alone: a resumed, accumulated or distributed run sees the
    same images, augmented in the same way, as an uninterrupted one on one device."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    """(C, H, W) of an image as the model gets it."""
    train_size: int
    test_size: int
    mean: Tensor
    """(C, 1, 1), like `std`: an image is (pixels - mean) / std, of pixels as stored: 0 to 255, digits to 16."""
    std: Tensor

    def train_batches(
        self, size: int, *, seed: int, epoch: int, start: int = 0, augment: bool = True, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """The shuffled epoch in gradient batches of `size`, from the batch numbered `start`; of each batch this
        rank's contiguous share of size / ranks. The rest of train_size / size is left out."""
        ...

    def plain_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """The training set in its own order, not augmented, whole; every `ranks`-th batch."""
        ...

    def test_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """The test set in its own order, whole; every `ranks`-th batch. The last one may be smaller."""
        ...
