"""Views, permutations, slices, shuffles and concatenations: the function that the model called runs on labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kalmannorm import moments as algebra
from kalmannorm._wiring.program import Program, combined
from kalmannorm._wiring.recording.trace import Op, Ref, Trace
from kalmannorm._wiring.rules import layout


@dataclass(frozen=True)
class Labelled:
    """A step of `size` moments, and for every element of a tensor which of them it has."""

    step: int
    size: int
    labels: Tensor


class NoBeliefError(Exception):
    """No belief: the message says why. `told` where it was said at an earlier operation."""

    def __init__(self, reason: str, told: bool = False) -> None:
        super().__init__(reason)
        self.told = told


_FIRST = ("input", "self", "tensors", "x")  # what functions call their first argument


def _first(op: Op) -> Any:
    """The first argument, however it was given."""
    return op.args[0] if op.args else next((op.kwargs[name] for name in _FIRST if name in op.kwargs), None)


def operands(op: Op) -> list[Ref]:
    """The tensors that are moved: the first argument, which may be a list."""
    first = _first(op)
    parts = list(first) if isinstance(first, (list, tuple)) else [first]
    if not parts or not all(isinstance(part, Ref) for part in parts):
        raise NoBeliefError(f"{op.name} of something that is no tensor")
    return parts


def relabelled(program: Program, trace: Trace, op: Op, given: Sequence[Labelled]) -> list[Labelled]:
    """What each output holds, from what the operands hold."""
    try:
        return _relabelled(program, trace, op, given)
    except NoBeliefError:
        raise
    except Exception as error:
        raise NoBeliefError(f"{op.name} cannot be followed: {type(error).__name__}: {error}") from error


def _relabelled(program: Program, trace: Trace, op: Op, given: Sequence[Labelled]) -> list[Labelled]:
    shapes = [trace.values[ref.index].shape for ref in operands(op)]
    listed = isinstance(_first(op), (list, tuple))
    if op.name in ("view_as", "reshape_as", "expand_as"):
        target = trace.values[op.args[1].index].shape
        op = replace(op, args=(op.args[0], target), name=op.name[:-3], func=None)
    if op.name in ("cat", "concat", "concatenate"):
        shapes = _needed(shapes, [part.labels for part in given], _axis(op))
    offset, spread = 0, []
    for part, shape in zip(given, shapes, strict=True):
        spread.append((part.labels + offset).expand(shape))
        offset += part.size
    result = on_labels(trace, op, spread if listed else spread[0])
    step = given[0].step
    if len(given) > 1:
        step = combined(program, algebra.concatenate, [part.step for part in given])
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    return [Labelled(step, offset, layout.reduce(labels)) for labels in results]


def on_labels(trace: Trace, op: Op, labels: Any) -> Any:
    """The recorded call with labels for its first argument."""
    rest = [_constant(trace, a) for a in op.args[1:]]
    kwargs = {name: a if name in _FIRST else _constant(trace, a) for name, a in op.kwargs.items()}
    if not op.args:
        kwargs.pop(next(name for name in _FIRST if name in kwargs))
    # Labels lie otherwise in memory than the tensor did, which matters to `view` alone.
    name = "reshape" if op.name == "view" and not _retypes(rest) else op.name
    func = op.func if op.func is not None and name == op.name else getattr(torch.Tensor, name)
    try:
        return func(labels, *rest, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NoBeliefError(f"{op.name} cannot be followed: {error}") from None


def _retypes(rest: Sequence[Any]) -> bool:
    return bool(rest) and isinstance(rest[0], torch.dtype)


def _constant(trace: Trace, argument: Any) -> Any:
    if isinstance(argument, Ref):
        constant = trace.values[argument.index].constant
        if constant is None:
            raise NoBeliefError("an index that depends on the data")
        return constant.cpu()
    if isinstance(argument, (list, tuple)):
        return type(argument)([_constant(trace, a) for a in argument])
    return argument


def _axis(op: Op) -> int:
    axis: int = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", op.kwargs.get("axis", 0))
    return axis


def _needed(shapes: list[tuple[int, ...]], labels: list[Tensor], axis: int) -> list[tuple[int, ...]]:
    """Shapes in which a concatenation of labels says all, without spreading them over every position."""
    rank = max(len(shape) for shape in shapes)
    # An empty vector is welcome in any concatenation, and adds nothing.
    parts = [part for part in labels if part.dim() == rank]
    varying = [any(part.shape[i] > 1 for part in parts) or i == axis % rank for i in range(rank)]
    return [
        tuple(size if varying[i] else 1 for i, size in enumerate(shape)) if len(shape) == rank else shape
        for shape in shapes
    ]
