"""A bundle: the moments of many layers, computed together on one flat vector.

Entries are pairs (mean, variance), one per channel of every step. They are laid out so that each piece of work below
writes neighbours, and reads entries by index, so that slices, shuffles and concatenations of channels cost nothing:

    beliefs      (β, γ²) of norms
    given        moments that were computed elsewhere
    then, stage by stage,
        elementwise    activations, sums, products, scalings; in an order in which each finds its operands
        layers         convolutions and linear layers

What each tensor is needed for: the results are bits, and a tensor's mask has those that depend on it, so that a tensor
of which nobody asked the consequences gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from kalmannorm.moments.windows import Axis


class Function(NamedTuple):
    """What happens to an entry. `kind` is one of

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
    """A function on as many entries as `a` has, for the entries from `start` on."""

    function: Function
    a: Tensor
    b: Tensor | None
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.a.numel()


class Layer(NamedTuple):
    """A convolution, or without `axes` a linear layer, on the entries `a`, for the `outputs` entries from `start` on.

    `weight` and `bias` are places among the tensors of the bundle.
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
    """Places of β and γ; None is 0 and 1."""

    bias: int | None
    weight: int | None
    size: int


class Given(NamedTuple):
    mean: int
    var: int
    size: int


class Gain(NamedTuple):
    """Place of a gain's logit, one for all channels or one for each."""

    logit: int
    logits: int
    channels: int


@dataclass
class Stage:
    elementwise: list[Elementwise] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)


@dataclass
class Bundle:
    """Places count through the tensors that it runs on: of beliefs, given moments, gains and layers."""

    beliefs: list[Belief]
    given: list[Given]
    gains: list[Gain]
    passed: list[int]  # places of γ and β that are results too, for the op to read: their gradients come back to here
    stages: list[Stage]
    results: list[Tensor]  # the entries that each result is made of
    entries: int
    masks: list[int]  # of each tensor: the results that it is needed for; gains and what is passed follow the last
    tables: dict[Any, Any] = field(default_factory=dict)  # what the ways to run it keep, by device

    @property
    def leaves(self) -> int:
        return sum(belief.size for belief in self.beliefs) + sum(given.size for given in self.given)
