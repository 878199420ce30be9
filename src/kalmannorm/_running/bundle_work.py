"""Which kind of work each step of a program is in a bundle: belief, function of entries, layer or selection."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm import moments as algebra
from kalmannorm._ops.propagate.aten import SMOOTH
from kalmannorm._ops.propagate.bundle import Function
from kalmannorm._wiring.program import (
    Apply,
    Combine,
    Constant,
    NormBelief,
    Parameter,
    Program,
    Select,
    Slice,
    WeightedSum,
)
from kalmannorm._wiring.rules import unary
from kalmannorm.moments.activations import SHAPES
from kalmannorm.moments.linear import geometry
from kalmannorm.moments.windows import Axis, kinds

LARGEST_WINDOW = 64
"""The most taps, and the most kinds of positions, of a convolution in a bundle."""

_SUMS = {algebra.add: "add", algebra.subtract: "subtract", algebra.product: "product"}
_PIECEWISE = {algebra.ACTIVATIONS[name]: name for name in SHAPES}
_SMOOTH = {algebra.ACTIVATIONS[name]: name for name in SMOOTH}


class LayerOf(NamedTuple):
    """A convolution or linear layer: the steps that read its weight and bias, and its options."""

    weight: Parameter
    bias: Parameter | None
    groups: int
    transposed: bool
    axes: tuple[Axis, ...]

    def identity(self) -> tuple[object, ...]:
        bias = None if self.bias is None else (self.bias.owner.identity(), self.bias.name)
        return self.weight.owner.identity(), self.weight.name, bias, self.groups, self.transposed, self.axes

    def shape(self) -> tuple[int, ...]:
        tensor = _parameter(self.weight)
        assert tensor is not None
        return tuple(tensor.shape)

    def outputs(self) -> int:
        shape = self.shape()
        return shape[1] * self.groups if self.transposed else shape[0]


class Work(NamedTuple):
    """The work of one step. `inputs` are the steps whose moments it reads.

    Without belief, function and layer it is a selection of their entries.
    """

    inputs: tuple[int, ...] = ()
    belief: NormBelief | None = None
    function: Function | None = None
    layer: LayerOf | None = None

    def makes(self) -> bool:
        """Whether it computes something."""
        return self.function is not None or self.layer is not None


def work_of(program: Program, index: int, *, filters: bool) -> Work | None:
    """The work of a step, or None if a bundle cannot do it. `filters`: it can read computed filters."""
    step = program.steps[index]
    try:
        if isinstance(step, NormBelief):
            return Work(belief=step)
        if isinstance(step, Combine):
            return _combined(step)
        if isinstance(step, Slice):
            return Work(step.inputs)
        if isinstance(step, Select):
            return Work(step.inputs[:1]) if isinstance(program.steps[step.inputs[1]], Constant) else None
        if isinstance(step, WeightedSum):
            function = _weighted(program, step)
        elif isinstance(step, Apply) and step.function in (algebra.convolution, algebra.linear):
            layer = _layer(program, step, filters)
            return None if layer is None else Work(step.inputs[:1], layer=layer)
        else:
            function = _function(step) if isinstance(step, Apply) and len(step.inputs) == 1 else None
    except (AttributeError, TypeError, ValueError):  # a module was changed, or options are of another kind
        return None
    return None if function is None else Work(step.inputs[:1], function=function)


def _combined(step: Combine) -> Work | None:
    if step.function is algebra.concatenate:
        return Work(step.inputs)
    kind = None if step.function is None or len(step.inputs) != 2 else _SUMS.get(step.function)
    return None if kind is None else Work(step.inputs, function=Function(kind))


def _weighted(program: Program, step: WeightedSum) -> Function | None:
    """A sum of one entry, always with the same weight, is a scaling."""
    index, weights, spread = (program.steps[i] for i in step.inputs[1:])
    tensors = [part.tensor for part in (index, weights, spread) if isinstance(part, Constant)]
    if len(tensors) < 3 or tensors[0].shape[1] != 1:
        return None
    size = tensors[0].shape[0]
    if not torch.equal(tensors[0].flatten().cpu(), torch.arange(size)):
        return None
    factors = [part.flatten().double() for part in tensors[1:]]
    if any(part.numel() not in (1, size) or bool((part != part[0]).any()) for part in factors):
        return None
    return Function("affine", (float(factors[0][0]), 0.0, float(factors[1][0])))


def _function(step: Apply) -> Function | None:
    function, options = step.function, step.options
    if function in _PIECEWISE:
        return _shaped(*SHAPES[_PIECEWISE[function]](**options))
    if function in _SMOOTH and not options:
        return Function("smooth", name=_SMOOTH[function])
    if function is algebra.gelu and options == {"approximate": "none"}:
        return Function("smooth", name="gelu")
    if function is unary.absolute:
        return _shaped((0.0,), ((0.0, -1.0, 0.0), (0.0, 1.0, 0.0)))
    if function is unary.clamp:
        return _clamp(**options)
    if function is unary.averaged:
        return Function("affine", (1.0, 0.0, 1 / math.sqrt(options["positions"])))
    if function is unary.negative:
        return Function("affine", (-1.0, 0.0, 1.0))
    for number in options.values():
        if isinstance(number, Tensor):
            return None
    if function is algebra.scale:
        factor = float(options["factor"])
        return Function("affine", (factor, 0.0, factor * factor))
    if function is algebra.shift:
        return Function("affine", (1.0, float(options["offset"]), 1.0))
    return Function("affine", (1.0, 0.0, 1.0)) if function is algebra.identity else None


def _shaped(knots: tuple[float, ...], pieces: tuple[tuple[float, float, float], ...]) -> Function:
    return Function("piecewise", knots=knots, pieces=pieces)


def _clamp(min: float | None = None, max: float | None = None) -> Function | None:
    knots = tuple(float(knot) for knot in (min, max) if knot is not None and math.isfinite(knot))
    if not knots or sorted(set(knots)) != list(knots):
        return None
    pieces = [(0.0, 1.0, 0.0)]
    if min is not None and math.isfinite(min):
        pieces.insert(0, (float(min), 0.0, 0.0))
    if max is not None and math.isfinite(max):
        pieces.append((float(max), 0.0, 0.0))
    return _shaped(knots, tuple(pieces))


def _layer(program: Program, step: Apply, filters: bool) -> LayerOf | None:
    weight, *rest = (program.steps[i] for i in step.inputs[1:])
    bias = rest[0] if rest else None
    options = dict(step.options)
    for part in (weight, bias):
        # A computed weight has another memory address every time.
        if part is not None and not (isinstance(part, Parameter) and _parameter(part) is not None):
            return None
        if part is not None and is_filter(part) and not filters:
            return None
    assert isinstance(weight, Parameter) and (bias is None or isinstance(bias, Parameter))
    tensor = _parameter(weight)
    assert tensor is not None
    groups, transposed = options.pop("groups", 1), options.get("transposed", False)
    axes = () if step.function is algebra.linear else geometry(tuple(tensor.shape[2:]), **options)
    taps = math.prod(axis.kernel for axis in axes)
    if taps > LARGEST_WINDOW or math.prod(len(kinds(axis)[0]) for axis in axes) > LARGEST_WINDOW:
        return None
    return LayerOf(weight, bias, groups, transposed, axes)


def is_filter(step: Parameter) -> bool:
    """Whether a convolution computes the tensor from its weight, in each forward (`computed_weights`)."""
    return step.name == "filter" and step.owner.parameter("filter") is None


def _parameter(step: Parameter) -> Tensor | None:
    """The parameter. A filter has the shape of the weight that it is computed from."""
    found: Tensor | None = step.owner.parameter("weight" if is_filter(step) else step.name)
    return found
