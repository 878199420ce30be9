"""The interface of a loaded data set, on the device or in files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Images (n, C, H, W), normalized, and labels (n,), both on the device."""


class Data(Protocol):
    """Every batch depends on (seed, epoch, position) alone.

    So a resumed, accumulated or distributed run sees the same images, augmented in the same way, as an uninterrupted
    run on one device.
    """

    name: str
    classes: int
    shape: tuple[int, int, int]
    """(C, H, W) of an image as the model gets it."""
    train_size: int
    test_size: int
    mean: Tensor
    """(C, 1, 1), like `std`. An image is (pixels - mean) / std. Pixels are 0 to 255, for digits 0 to 16."""
    std: Tensor

    def train_batches(
        self, size: int, *, seed: int, epoch: int, start: int = 0, augment: bool = True, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """The shuffled epoch in gradient batches of `size`, from the batch with number `start`.

        Each rank gets its contiguous share, size / ranks, of each batch. The remainder of train_size / size is omitted.
        """
        ...

    def plain_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """The whole training set in its own order, not augmented. Each rank gets every `ranks`-th batch."""
        ...

    def test_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """The whole test set in its own order. Each rank gets every `ranks`-th batch. The last batch may be smaller."""
        ...
