"""Finds the width at which a batch-norm network has as many parameters as one with the paper's learned transition."""

from __future__ import annotations

import functools

import torch
from torch import nn

from kalmannorm.lab import models
from kalmannorm.lab.recipes.methods import normalized

TOLERANCE = 0.01

Shape = tuple[int, int, int]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batchnorm_parameters(model: str, width: float, classes: int, shape: Shape) -> int:
    """The parameters of the plain network, which are also those of batch norm on groups. No weight is allocated."""
    with torch.device("meta"):
        return parameters(models.build(model, classes=classes, shape=shape, width=width))


def learned_parameters(model: str, classes: int, shape: Shape) -> int:
    """The parameters of the network with `bkn-learned`, including the filter."""
    with torch.random.fork_rng(devices=[]):
        net = models.build(model, classes=classes, shape=shape)
    return parameters(normalized(net, "bkn-learned", torch.zeros(2, *shape), statistics_batch=2, steps=1))


@functools.cache
def matching_width(model: str, classes: int, shape: Shape) -> float:
    """The width at which the batch-norm network has the parameters of `bkn-learned`, as closely as whole channels
    allow.

    Found by bisection, because the number of parameters grows with the width, in steps. The search ends within a tenth
    of the tolerance, or at a step that is larger than that, and returns the nearest width found.
    """
    wanted = learned_parameters(model, classes, shape)
    low, high = 1.0, 2.0
    while batchnorm_parameters(model, high, classes, shape) < wanted:
        low, high = high, 2 * high
    met = {}
    for _ in range(14):
        middle = (low + high) / 2
        met[middle] = batchnorm_parameters(model, middle, classes, shape)
        if abs(met[middle] / wanted - 1) <= TOLERANCE / 10:
            break
        low, high = (middle, high) if met[middle] < wanted else (low, middle)
    return min(met, key=lambda width: abs(met[width] - wanted))
