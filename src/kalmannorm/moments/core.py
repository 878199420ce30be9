"""Moments: what the filter believes about a layer, one row per group and one column per channel.

Rows (G) are statistics batches: 1 row is a belief that holds for every group; in `example` inference each
example is a row of its own. Values are float32 whatever the activations are (float64 for float64).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean and variance of each channel, (G, C); `cov` (G, C, C) only where the full covariance is kept.

    `var` is always there and is the diagonal of `cov`. A named tuple, so that it passes through
    `torch.compile`, checkpointing, DDP and pytrees as any tuple of tensors does. (It has methods but no properties:
    torch.compile does not see through the properties of a named tuple.)
    """

    mean: Tensor
    var: Tensor
    cov: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Moments:
        return Moments(self.mean.to(dtype), self.var.to(dtype), None if self.cov is None else self.cov.to(dtype))

    def pooled(self) -> Moments:
        """One row (1, C): the moments of all groups' values together, the groups counting alike.

        By the law of total variance: the average variance *plus* the variance of the means.
        """
        if self.mean.shape[0] == 1:
            return self
        mean = self.mean.mean(0, keepdim=True)
        spread = self.mean - mean
        var = (self.var + spread * spread).mean(0, keepdim=True)
        if self.cov is None:
            return Moments(mean, var)
        outer = spread.unsqueeze(2) * spread.unsqueeze(1)
        return Moments(mean, var, (self.cov + outer).mean(0, keepdim=True))


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Within it products stay float32 under autocast, which would run them, and the statistics, in half precision."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()  # an exporter would wrap what is inside into a graph of its own
    return torch.autocast(device.type, enabled=False)


def belief(weight: Tensor | None, bias: Tensor | None, channels: int | None = None) -> Moments:
    """What a norm's output is believed to be, whatever the batch: N(bias, weight²) per channel, one row.

    A missing `weight` is 1 and a missing `bias` is 0; `channels` is needed where both are missing.
    """
    given = weight if weight is not None else bias
    if given is None:
        if channels is None:
            raise ValueError("belief: give `channels` where both weight and bias are None")
        mean = torch.zeros(1, channels, dtype=torch.float32)
        return Moments(mean, torch.ones_like(mean))
    dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
    mean = torch.zeros_like(given, dtype=dtype) if bias is None else bias.to(dtype)
    var = torch.ones_like(given, dtype=dtype) if weight is None else weight.to(dtype).square()
    return Moments(mean.unsqueeze(0), var.unsqueeze(0))
