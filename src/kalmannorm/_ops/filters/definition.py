"""How a convolution computes its filter from its weight W. Per output channel:

    centred         W - mean(W)                             Moving Average Batch Norm (Yan et al., 2020)
    standardized    (W - mean(W)) / sqrt(var(W) + eps)      Weight Standardization (Qiao et al., 2019); eps = 1e-5

The variance is the biased one. Statistics of half-precision weights are computed in float32. Tests compare every other
version with this one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPS = 1e-5

Computation = Literal["centred", "standardized"]


def centred(weight: Tensor) -> Tensor:
    """With a mean of 0 per output channel."""
    full = _precise(weight)
    return (full - full.mean(_inputs(weight), keepdim=True)).to(weight.dtype)


def standardized(weight: Tensor) -> Tensor:
    """With a mean of 0 and a variance of 1 per output channel."""
    full = _precise(weight)
    var, mean = torch.var_mean(full, _inputs(weight), correction=0, keepdim=True)
    return ((full - mean) * (var + EPS).rsqrt()).to(weight.dtype)  # in the memory format of the weight


def _precise(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def _inputs(weight: Tensor) -> tuple[int, ...]:
    """All dimensions but that of output channels."""
    return tuple(range(1, weight.dim()))
