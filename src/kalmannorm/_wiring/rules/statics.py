"""Tensors that no data has entered: parameters, buffers, constants, and what the model's code makes of them.

A standardized weight, a layer scale reshaped, a frozen norm's shift: the functions that made them in the trace become
steps that make them again from the parameters of the moment, with their gradients.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmannorm._wiring.program import Parameter, Program, Replay
from kalmannorm._wiring.recording.records import Op, Ref, Trace, Value, attribute_name
from kalmannorm._wiring.weak_modules import WeakModule


def get_attribute(tensor: Tensor, name: str) -> Any:
    """`w.T` as a function that can be copied and saved; torch's getters cannot."""
    return getattr(tensor, name)


def _again(op: Op) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The function and arguments that make an operation's result once more; None where that would write somewhere, or
    where the function cannot be saved with the model."""
    name = getattr(op.func, "__name__", "")
    if op.func is None or (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")):
        return None
    if op.kwargs.get("out") is not None or op.kwargs.get("inplace"):
        return None
    if name == "__get__":
        return get_attribute, (op.args[0], attribute_name(op.func))
    try:
        pickle.dumps(op.func)
    except Exception:
        return None
    return op.func, op.args


class Statics:
    def __init__(self, trace: Trace, program: Program) -> None:
        self.trace, self.program = trace, program
        self._steps: dict[int, int | None] = {}

    def step(self, value: Value) -> int | None:
        """The step that gives this tensor; None where it cannot be made again."""
        if value.index not in self._steps:
            step = self._make(value)
            if step is not None and value.cut:
                step = self.program.add(Replay((step,), torch.detach, (Ref(0),)))
            self._steps[value.index] = step
        return self._steps[value.index]

    def _make(self, value: Value) -> int | None:
        if value.owner is not None:
            owner, name = value.owner
            return self.program.add(Parameter((), WeakModule(owner), name))
        if value.constant is not None:
            return self.program.constant(value.constant)
        if value.op is None or value.random or value.fed:
            return None
        op = self.trace.ops[value.op]
        call = _again(op)
        if call is None:
            return None
        func, given = call
        inputs: list[int] = []

        def place(argument: Any) -> Any:
            if isinstance(argument, Ref):
                made = self.step(self.trace.values[argument.index])
                if made is None:
                    raise LookupError
                inputs.append(made)
                return Ref(len(inputs) - 1)
            if isinstance(argument, (list, tuple)):
                return type(argument)([place(a) for a in argument])
            return argument

        try:
            args = tuple(place(a) for a in given)
            kwargs = {} if func is get_attribute else {name: place(a) for name, a in op.kwargs.items()}
        except LookupError:
            return None
        output = op.outputs.index(value.index) if len(op.outputs) > 1 else None
        return self.program.add(Replay(tuple(inputs), func, args, kwargs, output))

    def _of(self, value: Value, func: Any) -> int | None:
        step = self.step(value)
        return None if step is None else self.program.add(Replay((step,), func, (Ref(0),)))

    def reciprocal(self, value: Value) -> int | None:
        return self._of(value, torch.reciprocal)

    def transposed(self, value: Value) -> int | None:
        return self._of(value, torch.t)
