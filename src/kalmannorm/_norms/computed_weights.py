"""Convolutions that compute their weight from a parameter W, for norms that need it. Per output channel:

    centred         W - mean(W)                             Moving Average Batch Norm (Yan et al., 2020)
    standardized    (W - mean(W)) / sqrt(var(W) + eps)      Weight Standardization (Qiao et al., 2019); eps = 1e-5

Names and parameters stay those of the convolution. `plain_weights` makes it a convolution of torch again, whose weight
is the computed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

EPS = 1e-5

Computation = Literal["centred", "standardized"]


def centred(weight: Tensor) -> Tensor:
    """With a mean of 0 per output channel."""
    return weight - weight.mean(_inputs(weight), keepdim=True)


def standardized(weight: Tensor) -> Tensor:
    """With a mean of 0 and a variance of 1 per output channel."""
    var, mean = torch.var_mean(weight, _inputs(weight), correction=0, keepdim=True)
    return (weight - mean) * (var + EPS).rsqrt()  # in the memory format of the weight


def _inputs(weight: Tensor) -> tuple[int, ...]:
    """All dimensions but that of output channels."""
    return tuple(range(1, weight.dim()))


class ComputedWeight(_ConvNd):
    """A convolution with a computed weight."""

    @property
    def filter(self) -> Tensor:
        return self.computed(self.weight)

    def computed(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = super()._conv_forward(input, self.computed(weight), bias)
        return result


class _Centred(ComputedWeight):
    def computed(self, weight: Tensor) -> Tensor:
        return centred(weight)


class _Standardized(ComputedWeight):
    def computed(self, weight: Tensor) -> Tensor:
        return standardized(weight)


class CentredConv1d(_Centred, nn.Conv1d):
    """`nn.Conv1d` whose weight has a mean of 0 per output channel."""


class CentredConv2d(_Centred, nn.Conv2d):
    """`nn.Conv2d` whose weight has a mean of 0 per output channel."""


class CentredConv3d(_Centred, nn.Conv3d):
    """`nn.Conv3d` whose weight has a mean of 0 per output channel."""


class StandardizedConv1d(_Standardized, nn.Conv1d):
    """`nn.Conv1d` whose weight has a mean of 0 and a variance of 1 per output channel."""


class StandardizedConv2d(_Standardized, nn.Conv2d):
    """`nn.Conv2d` whose weight has a mean of 0 and a variance of 1 per output channel."""


class StandardizedConv3d(_Standardized, nn.Conv3d):
    """`nn.Conv3d` whose weight has a mean of 0 and a variance of 1 per output channel."""


PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CLASSES: dict[Computation, tuple[Any, ...]] = {
    "centred": (CentredConv1d, CentredConv2d, CentredConv3d),
    "standardized": (StandardizedConv1d, StandardizedConv2d, StandardizedConv3d),
}


def check_convolutions(model: nn.Module) -> None:
    """Raise an error for a convolution whose weight cannot be computed."""
    for name, module in model.named_modules():
        if not isinstance(module, _ConvNd) or isinstance(module, _ConvTransposeNd):
            continue
        if type(module) not in PLAIN or module._parameters.get("weight") is None or "forward" in vars(module):
            raise TypeError(
                f"{name!r} is a {type(module).__name__} with a weight or forward of its own. Only the weights of plain "
                "nn.Conv1d, 2d and 3d can be centred or standardized; replace it by one of these first"
            )


def compute_weights(model: nn.Module, computation: Computation, modules: Any = None) -> None:
    """Change the class of every convolution in place. Transposed ones stay as they are."""
    chosen = None if modules is None else set(map(id, modules))
    for module in model.modules():
        if type(module) in PLAIN and (chosen is None or id(module) in chosen):
            module.__class__ = CLASSES[computation][PLAIN.index(type(module))]


@torch.no_grad()
def plain_weights(model: nn.Module) -> bool:
    """Turn such convolutions into plain ones with the same outputs, in place. Returns whether there were any."""
    found = [module for module in model.modules() if isinstance(module, ComputedWeight)]
    for module in found:
        module.weight.copy_(module.computed(module.weight))
        module.__class__ = next(kind for kind in PLAIN if isinstance(module, kind))  # type: ignore[assignment]
    return bool(found)


@contextmanager
def without_computation(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Such convolutions as plain ones that use their weight as it is, to trace them. Yields them."""
    found = [module for module in model.modules() if isinstance(module, ComputedWeight)]
    kinds = [type(module) for module in found]
    try:
        for module in found:
            module.__class__ = next(kind for kind in PLAIN if isinstance(module, kind))  # type: ignore[assignment]
        yield [*found]
    finally:
        for module, kind in zip(found, kinds, strict=True):
            module.__class__ = kind
