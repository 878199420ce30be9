"""Random numbers that depend only on their place: seed, epoch, batch or example.

Generators are on the CPU, so that all devices, ranks and workers draw the same numbers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(*place: int | str) -> torch.Generator:
    """The generator of a place, such as ("order", seed, epoch)."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the training set in an epoch."""
    return torch.randperm(count, generator=generator("order", seed, epoch))


def stratified(labels: Tensor, count: int | None, seed: int = 0) -> Tensor:
    """Indices of `count` examples, ascending, with the same share of each class. A smaller count gives a subset."""
    if count is None or count >= len(labels):
        return torch.arange(len(labels))
    rng = generator("subset", seed)
    shuffled = torch.randperm(len(labels), generator=rng)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    sizes = torch.bincount(labels)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    place = (torch.arange(len(labels)) - starts + torch.rand(len(labels), generator=rng)) / sizes.repeat_interleave(
        sizes
    )
    return by_class[place.argsort(stable=True)[:count]].sort().values
