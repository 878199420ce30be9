"""How a convolution computes its filter from its weight W. Per output channel:

    centred         W - mean(W)                             Moving Average Batch Norm (Yan et al., 2020)
    standardized    (W - mean(W)) / sqrt(var(W) + eps)      Weight Standardization (Qiao et al., 2019); eps = 1e-5
    scaled          standardized(W) / sqrt(n)               n is the number of values per output channel

A scaled filter has a mean of 0 and a norm of 1, up to eps. So its output is about as large as its input. The output of
a standardized filter is sqrt(n) times as large. A norm after it removes this factor, but running statistics that begin
at 0 and 1 have to follow it first. Scaled Weight Standardization (Brock et al., 2021) has the same factor.

The variance is the biased one. Statistics of half-precision weights are computed in float32. Tests compare every other
version with this one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

EPS = 1e-5

Computation = Literal["centred", "standardized", "scaled"]


def centred(weight: Tensor) -> Tensor:
    """With a mean of 0 per output channel."""
    full = _precise(weight)
    return (full - full.mean(_inputs(weight), keepdim=True)).to(weight.dtype)


def standardized(weight: Tensor) -> Tensor:
    """With a mean of 0 and a variance of 1 per output channel."""
    full = _precise(weight)
    var, mean = torch.var_mean(full, _inputs(weight), correction=0, keepdim=True)
    return ((full - mean) * (var + EPS).rsqrt()).to(weight.dtype)  # in the memory format of the weight


def scaled(weight: Tensor) -> Tensor:
    """With a mean of 0 and a norm of 1 per output channel."""
    full = _precise(weight)
    away = full - full.mean(_inputs(weight), keepdim=True)
    squares = away.square().sum(_inputs(weight), keepdim=True)
    return (away * (squares + EPS * math.prod(weight.shape[1:])).rsqrt()).to(weight.dtype)


def _precise(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def _inputs(weight: Tensor) -> tuple[int, ...]:
    """All dimensions but that of output channels."""
    return tuple(range(1, weight.dim()))
