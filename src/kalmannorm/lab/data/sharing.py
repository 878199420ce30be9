"""Divides data into batches and batches among ranks, for every kind of data set."""

from __future__ import annotations

from kalmannorm.lab.errors import LabError


def batch_count(name: str, train_size: int, size: int) -> int:
    """The number of gradient batches in an epoch. The remaining examples are not used."""
    if train_size < size:
        raise LabError(
            f"{name} has {train_size} training examples, fewer than a gradient batch of {size}: use a smaller batch, "
            "or more examples"
        )
    return train_size // size


def share(size: int, rank: int, ranks: int) -> slice:
    """This rank's part of a gradient batch."""
    if size % ranks:
        raise LabError(f"{ranks} processes cannot share a gradient batch of {size}: its size must be a multiple")
    part = size // ranks
    return slice(rank * part, (rank + 1) * part)


def spans(count: int, size: int, rank: int = 0, ranks: int = 1) -> list[slice]:
    """A whole set in batches of `size`, every `ranks`-th of them. The last may be smaller."""
    return [slice(start, start + size) for start in range(rank * size, count, ranks * size)]
