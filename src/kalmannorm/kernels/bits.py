"""What a ReLU behind a residual let through, one bit for each value of its output y.

In the order the values lie in memory: bit i of byte k tells of value 8 k + i, and is 1 unless y ≤ 0, so a NaN came
through. The backward reads these bits where it would have to read all of y. *Gate* stands for either of the two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def whole_bytes(x: Tensor) -> bool:
    """Whether the values that follow each other in a row of x fill whole bytes, as the kernels need it."""
    positions = math.prod(x.shape[2:])
    row = x.shape[1] if positions == 1 or not x.is_contiguous() else positions
    return row % 8 == 0


def pack(y: Tensor, bits: Tensor) -> None:
    """Write the bits of y."""
    flat = y.reshape(-1) if y.is_contiguous() else y.movedim(1, -1).reshape(-1)
    passed = (flat <= 0).logical_not_().view(bits.numel(), 8)
    torch.sum(passed.to(torch.uint8) << _places(y), 1, dtype=torch.uint8, out=bits)


def shut(gate: Tensor, x: Tensor) -> Tensor:
    """Where nothing came through, in the shape of x, which lies as y did; the gate is y or its bits."""
    if gate.dtype != torch.uint8:
        return gate <= 0
    flags = (gate[:, None] >> _places(x) & 1) == 0
    if x.is_contiguous():
        return flags.view(x.shape)
    return flags.view(x.movedim(1, -1).shape).movedim(-1, 1)


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
