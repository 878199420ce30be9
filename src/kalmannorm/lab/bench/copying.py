"""Measures the speed of memory by a copy of a large tensor, which reads and writes each byte once.

On a GPU it takes the faster of `copy_` and a plain Triton kernel, so that a slow copy does not count as slow memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kalmannorm._ops.dispatch import triton_for
from kalmannorm.lab.bench.timing import timed

BYTES = {"cuda": 2**30, "cpu": 2**27}
"""Much larger than any cache, and still fast to copy."""
SAMPLES = 9


def copy_speed(device: torch.device) -> float:
    """Bytes per second, read and written bytes added."""
    source = torch.ones(BYTES[device.type] // 4, device=device)
    target = torch.zeros_like(source)
    ways: list[Callable[[], object]] = [lambda: target.copy_(source)]
    if device.type == "cuda" and triton_for(device.index or 0) is not None:
        from kalmannorm.lab.bench.triton_copy import copy

        ways.append(lambda: copy(source, target))
    return max(_speed(way, source, target) for way in ways)


def _speed(way: Callable[[], object], source: Tensor, target: Tensor) -> float:
    def call() -> Sequence[Tensor]:
        way()
        return (target,)

    once = timed(call, source.device, graph=source.is_cuda, sample=0.01)
    (copied,) = once.results()
    assert torch.equal(copied, source), "the copy differs from its source"
    seconds = statistics.median(once.seconds().clock for _ in range(SAMPLES))
    return 2 * source.numel() * source.element_size() / seconds
