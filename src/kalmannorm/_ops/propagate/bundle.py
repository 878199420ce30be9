"""A bundle: the moments of many layers, computed together on one flat vector.

Entries are pairs (mean, variance), one per channel of every step. Each operation below writes adjacent entries and
reads entries by index. So slices, shuffles and concatenations of channels cost nothing. The order of entries is:

    beliefs      (β, γ²) of norms
    given        moments that were computed elsewhere
    then, stage by stage,
        elementwise    activations, sums, products, scalings; operands come first
        layers         convolutions and linear layers

Each norm of a bundle gets one tensor of rows, (5, G, C): γ, β, the mean and the variance of its prior, and its gain.
All G rows are the same memory, one row for each group of the batch. So a norm returns the gradients of its groups
without summing them, and the bundle sums the gradients of all norms together.

Each tensor has a mask with one bit per result that depends on it. If the gradients of none of these results are needed,
the tensor gets no gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmannorm.moments.windows import Axis

WEIGHT, BIAS, PRIOR_MEAN, PRIOR_VAR, GAIN = range(5)
ROWS = 5
"""What the rows of a norm hold, in this order."""


class Function(NamedTuple):
    """A function of entries. `kind` is one of

    add, subtract, product    of two entries
    affine                    numbers (a, b, c): a mean + b, c var
    piecewise                 a piecewise quadratic: knots and pieces
    smooth                    by quadrature: the name of a function, see `SMOOTH`
    """

    kind: str
    numbers: tuple[float, ...] = ()
    knots: tuple[float, ...] = ()
    pieces: tuple[tuple[float, float, float], ...] = ()
    name: str = ""


RELU = Function("piecewise", knots=(0.0,), pieces=((0.0, 0.0, 0.0), (0.0, 1.0, 0.0)))


class Elementwise(NamedTuple):
    """A function on the entries `a` (and `b`). Its results are the entries from `start` on, as many as `a` has."""

    function: Function
    a: Tensor
    b: Tensor | None
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.a.numel()


class Layer(NamedTuple):
    """A convolution on the entries `a`, or a linear layer if `axes` is empty. Its results are the `outputs` entries
    from `start` on.

    `weight` and `bias` are positions in the bundle's list of tensors.
    """

    weight: int
    bias: int | None
    shape: tuple[int, ...]
    groups: int
    transposed: bool
    axes: tuple[Axis, ...]
    a: Tensor
    start: int
    outputs: int


class Belief(NamedTuple):
    """Positions of β and γ in the list of tensors. A missing β is 0, and a missing γ is 1."""

    bias: int | None
    weight: int | None
    size: int


class Given(NamedTuple):
    mean: int
    var: int
    size: int


class Norm(NamedTuple):
    """A norm that gets its prior from the bundle. Positions of γ, β and the gain's logit in the list of tensors.

    The logit has one value for all channels, or one per channel. A missing γ is 1, and a missing β is 0. A norm without
    a prior has no logit: its gain is 1, and its prior, which then has no weight, is N(0, 1).
    """

    weight: int | None
    bias: int | None
    logit: int | None
    logits: int
    channels: int


@dataclass
class Stage:
    elementwise: list[Elementwise] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)


@dataclass
class Bundle:
    """Positions refer to one list of tensors: those of beliefs, given moments, gains and layers."""

    beliefs: list[Belief]
    given: list[Given]
    norms: list[Norm]
    stages: list[Stage]
    results: list[Tensor]  # the entries of each result: the priors of `norms`, then results for other bundles
    entries: int
    masks: list[int]  # for each tensor: the results that need it, one bit each
    filters: list[int] = field(default_factory=list)  # positions of weights that every forward computes anew
    tables: dict[Any, Any] = field(default_factory=dict)  # caches of `aten` and `triton_bundle`, by device

    @functools.cached_property
    def copies(self) -> bool:
        """Whether the rows only copy γ and β, so that no gradient depends on their values."""
        alone = all(norm.logit is None for norm in self.norms)
        return alone and not self.stages and not self.given and len(self.results) == len(self.norms)

    @functools.cached_property
    def leaves(self) -> int:
        return sum(belief.size for belief in self.beliefs) + sum(given.size for given in self.given)

    @functools.cached_property
    def believed(self) -> int:
        """Entries of all beliefs."""
        return sum(belief.size for belief in self.beliefs)

    @functools.cached_property
    def widths(self) -> list[int]:
        """The number of channels of each norm."""
        return [norm.channels for norm in self.norms]

    @functools.cached_property
    def logit_places(self) -> Tensor:
        """For each channel of each norm: the position of its logit among all logits."""
        places, start = [torch.zeros(0, dtype=torch.long)], 0
        for norm in self.norms:
            places.append((start + torch.arange(norm.logits)).expand(norm.channels))
            start += norm.logits
        return torch.cat(places)

    @functools.cached_property
    def channels(self) -> int:
        """Channels of all norms together."""
        return sum(norm.channels for norm in self.norms)
