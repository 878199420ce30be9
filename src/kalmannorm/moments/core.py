"""Moments: estimated means and variances of a layer, one row per group and one column per channel.

Rows (G) are groups. A single row is a belief that holds for every group. In `example` inference each example has its
own row. Values are float32 for all activation dtypes but float64, and float64 for float64.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean and variance of each channel, (G, C). `cov` (G, C, C) exists only if the full covariance is kept.

    `var` always exists and is the diagonal of `cov`. `Moments` is a named tuple, so `torch.compile`, checkpointing, DDP
    and pytrees treat it as a tuple of tensors. It has methods but no properties, because torch.compile cannot trace
    properties of a named tuple.
    """

    mean: Tensor
    var: Tensor
    cov: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Moments:
        return Moments(self.mean.to(dtype), self.var.to(dtype), None if self.cov is None else self.cov.to(dtype))

    def pooled(self) -> Moments:
        """One row (1, C): the moments of the values of all groups. All groups have the same weight.

        By the law of total variance, this is the average variance *plus* the variance of the means.
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
    """A context in which matrix products stay float32. Under autocast they would run in half precision."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()  # under autocast an exporter would make a separate graph of the body
    return torch.autocast(device.type, enabled=False)


def belief(weight: Tensor | None, bias: Tensor | None, channels: int | None = None) -> Moments:
    """The belief about a norm's output, for every batch: N(bias, weight²) per channel, in one row.

    A missing `weight` is 1 and a missing `bias` is 0. If both are missing, `channels` is needed.
    """
    given = weight if weight is not None else bias
    if given is None:
        if channels is None:
            raise ValueError("belief: give `channels` if both weight and bias are None")
        mean = torch.zeros(1, channels, dtype=torch.float32)
        return Moments(mean, torch.ones_like(mean))
    dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
    mean = torch.zeros_like(given, dtype=dtype) if bias is None else bias.to(dtype)
    var = torch.ones_like(given, dtype=dtype) if weight is None else weight.to(dtype).square()
    # The gradient of `expand` is a sum, and so a tensor of its own. That of `unsqueeze` is a view: if two beliefs are
    # added, both biases would get views of one gradient, and autograd would make one memory the `.grad` of both.
    return Moments(mean.expand(1, -1), var.expand(1, -1))
