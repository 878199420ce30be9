"""Numbers of programs: how many blocks cover a size, and how many processors a GPU has."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def blocks_of(size: int, BLOCK: int) -> int:
    """How many blocks cover `size`. `triton.cdiv` computes the same, but is as slow as two views."""
    return -(-size // BLOCK)


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def processors_of(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 1  # Triton's interpreter
    return _processors(x.device.index)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
