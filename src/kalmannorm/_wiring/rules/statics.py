"""Tensors that do not depend on data: parameters, buffers, constants, and tensors that the model computes from them.

Examples are a standardized weight, a reshaped layer scale and the shift of a frozen norm. The functions that made them
in the trace become steps. The steps compute them again from the current parameters, with gradients.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import MethodDescriptorType
from typing import Any

import torch
from torch import Tensor

from kalmannorm._wiring.program import Parameter, Program, Replay
from kalmannorm._wiring.recording.records import Op, Ref, Trace, Value, attribute_name
from kalmannorm._wiring.weak_modules import WeakModule


def get_attribute(tensor: Tensor, name: str) -> Any:
    """`w.T` as a function that can be copied and pickled. The getters of torch cannot."""
    return getattr(tensor, name)


def call_method(name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`w.to(…)` as a function that dynamo can trace. It cannot trace an unbound method that a step holds."""
    return getattr(tensor, name)(*args, **kwargs)


def _again(op: Op) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The function and arguments that compute an operation's result again.

    None if that would write into a tensor, or if the function cannot be saved with the model.
    """
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
        """The step that computes this tensor. None if it cannot be computed again."""
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
        if isinstance(func, MethodDescriptorType):
            func, args = call_method, (func.__name__, *args)
        return self.program.add(Replay(tuple(inputs), func, args, kwargs, output))

    def _of(self, value: Value, func: Any) -> int | None:
        step = self.step(value)
        return None if step is None else self.program.add(Replay((step,), func, (Ref(0),)))

    def reciprocal(self, value: Value) -> int | None:
        return self._of(value, torch.reciprocal)

    def transposed(self, value: Value) -> int | None:
        return self._of(value, torch.t)
