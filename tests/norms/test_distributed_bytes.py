"""The bytes that a synchronised norm sends in a training step are those of docs/distributed.md, counted by the kernel.

gloo adds a header to every message. Its size does not depend on the channels. So the test compares bytes per channel,
from the difference between a wide and a narrow norm.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import distributed as dist

from kalmannorm import BatchKalmanNorm2d, GhostBatchNorm2d, Moments
from support import two_ranks
from support.sent_bytes import sent_bytes
from support.wide import narrow

NARROW, WIDE = 64, 1088
EXAMPLES = 4


def per_channel(ranks: int, *, groups: int, prior: bool, itemsize: int = 4) -> float:
    """As on paper: the observation in float64, the posterior and the gradient in the norm's dtype."""
    gathered = 2 * 8 + (2 * itemsize if prior else 0)
    reduced = 2 * itemsize
    return groups * ((ranks - 1) * gathered + 2 * (ranks - 1) / ranks * reduced)


def step(channels: int, kind: type, m: int | None, prior: bool, rank: int) -> int:
    options = {"prior_features": channels, "transition": "identity"} if prior else {}
    norm = kind(channels, statistics_batch_size=m, process_group="world", **options)
    x = torch.randn(EXAMPLES, channels, 2, 2, requires_grad=True)
    previous = [Moments(torch.randn(1, channels), torch.rand(1, channels))] if prior else []
    dist.barrier()
    before = sent_bytes()
    norm(x, *previous).square().sum().backward()
    return sent_bytes() - before


CASES = {
    "bn": (GhostBatchNorm2d, None, False),
    "bn, m = 2": (GhostBatchNorm2d, 2, False),
    "bkn": (BatchKalmanNorm2d, None, True),
    "bkn, m = 2": (BatchKalmanNorm2d, 2, True),
}


@pytest.mark.parametrize("ranks", narrow([2, 3, 4], [4]))
def test_bytes_per_channel_are_those_of_the_document(tmp_path, ranks):
    steps = {
        f"{name} {channels}": partial(step, channels, *case)
        for name, case in CASES.items()
        for channels in (NARROW, WIDE)
    }
    found = two_ranks.run(tmp_path, steps, ranks)
    for name, (_, m, prior) in CASES.items():
        expected = per_channel(ranks, groups=1 if m is None else EXAMPLES // m, prior=prior)
        for own in found:
            counted = (own[f"{name} {WIDE}"] - own[f"{name} {NARROW}"]) / (WIDE - NARROW)
            assert counted == pytest.approx(expected, rel=0.02), (name, counted, expected)
