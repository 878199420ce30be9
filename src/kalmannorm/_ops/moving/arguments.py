"""What both versions of Moving Average Batch Norm get and return: PyTorch operations and Triton kernels.

x has no gaps in memory, and the gradient of y has its layout.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

R_MAX = 5.0
"""r is at least 1 / R_MAX and at most R_MAX."""


class History(NamedTuple):
    """What earlier forwards left. The present forward reads it before it changes it."""

    past: Tensor
    """x̄² of the last K - 1 groups, (K - 1, C)."""
    running: Tensor
    """The running second moment, (C,)."""
    groups: Tensor
    """The number of groups seen so far."""
    batches: Tensor
    """The number of forwards so far."""


class Settings(NamedTuple):
    size: int
    """m. 0: the whole batch is one group."""
    eps: float
    warmup_steps: int


class Rows(NamedTuple):
    """What a forward computes for each group, (G, C). The backward reads it too."""

    mean: Tensor
    """Zeros: nothing is subtracted."""
    moving: Tensor
    """v"""
    r: Tensor
    own: Tensor
    """Whether the groups use their own v and c. One number."""
