"""Views, permutations, slices, shuffles and concatenations: the function that the model called runs on labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kalmannorm import moments as algebra
from kalmannorm._wiring.program import Program, combined
from kalmannorm._wiring.recording.trace import Op, Ref, Trace, Value
from kalmannorm._wiring.rules import layout, names


@dataclass(frozen=True)
class Labelled:
    """A step of `size` moments, and labels that say which of them each element of a tensor has."""

    step: int
    size: int
    labels: Tensor


class NoBeliefError(Exception):
    """There is no belief. The message gives the reason. `told` is True if an earlier operation gave it already."""

    def __init__(self, reason: str, told: bool = False) -> None:
        super().__init__(reason)
        self.told = told


_FIRST = ("input", "self", "tensors", "x")  # names that functions have for their first argument


def _first(op: Op) -> Any:
    """The first argument, passed by position or by name."""
    return op.args[0] if op.args else next((op.kwargs[name] for name in _FIRST if name in op.kwargs), None)


def operands(op: Op) -> list[Ref]:
    """The tensors that are rearranged: the first argument, which may be a list."""
    first = _first(op)
    parts = list(first) if isinstance(first, (list, tuple)) else [first]
    if not parts or not all(isinstance(part, Ref) for part in parts):
        raise NoBeliefError(f"{op.name} of an argument that is not a tensor")
    return parts


def relabelled(program: Program, trace: Trace, op: Op, given: Sequence[Labelled]) -> list[Labelled]:
    """The step and labels of each output, from those of the operands."""
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
    """Repeat the recorded call, with labels as its first argument."""
    rest = [fixed(trace, a) for a in op.args[1:]]
    kwargs = {name: a if name in _FIRST else fixed(trace, a) for name, a in op.kwargs.items()}
    if not op.args:
        kwargs.pop(next(name for name in _FIRST if name in kwargs))
    # The memory layout of the labels differs from that of the tensor. Only `view` depends on it.
    name = "reshape" if op.name == "view" and not _retypes(rest) else op.name
    func = op.func if op.func is not None and name == op.name else getattr(torch.Tensor, name)
    try:
        return func(labels, *rest, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NoBeliefError(f"{op.name} cannot be followed: {error}") from None


def _retypes(rest: Sequence[Any]) -> bool:
    return bool(rest) and isinstance(rest[0], torch.dtype)


def fixed(trace: Trace, argument: Any) -> Any:
    """An argument of a call, with tensors for its references: constants, and buffers of integers or masks.

    Such a buffer is read at conversion. After a change of its values, call `rewire`.
    """
    if isinstance(argument, Ref):
        value = trace.values[argument.index]
        constant = value.constant if value.constant is not None else _buffer(trace, value)
        if constant is None:
            raise NoBeliefError("an index that depends on the data")
        return constant.cpu()
    if isinstance(argument, (list, tuple)):
        return type(argument)([fixed(trace, a) for a in argument])
    return argument


def _buffer(trace: Trace, value: Value) -> Tensor | None:
    """A buffer that is no floating-point number, or a view of it."""
    if value.fed or value.random or value.dtype.is_floating_point:
        return None
    if value.owner is not None:
        found: Tensor = getattr(*value.owner)
        return found
    op = None if value.op is None else trace.ops[value.op]
    if op is None or op.func is None or op.name not in names.REARRANGEMENTS or len(op.outputs) > 1:
        return None
    made: Tensor = op.func(*fixed(trace, op.args), **{name: fixed(trace, a) for name, a in op.kwargs.items()})
    return made


def _axis(op: Op) -> int:
    axis: int = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", op.kwargs.get("axis", 0))
    return axis


def _needed(shapes: list[tuple[int, ...]], labels: list[Tensor], axis: int) -> list[tuple[int, ...]]:
    """Shapes that are large enough to concatenate the labels. They are not expanded over every position."""
    rank = max(len(shape) for shape in shapes)
    # Any concatenation accepts an empty vector, which adds nothing.
    parts = [part for part in labels if part.dim() == rank]
    varying = [any(part.shape[i] > 1 for part in parts) or i == axis % rank for i in range(rank)]
    return [
        tuple(size if varying[i] else 1 for i, size in enumerate(shape)) if len(shape) == rank else shape
        for shape in shapes
    ]
