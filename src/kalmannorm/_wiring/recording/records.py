"""The types of a trace: values, operations on them, and calls of norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

UNSEEN = "made by code that the trace cannot record"
FROM_NUMBERS = "made from numbers that may depend on the data"


@dataclass(frozen=True)
class Ref:
    """A tensor of the run, by the index of its `Value`. It replaces the tensor in the arguments of an `Op`."""

    index: int


@dataclass
class Value:
    """Facts about one tensor at one moment of the run. An in-place write makes a new value."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    op: int | None = None
    sources: int = 0  # bit k: norm call k feeds this value, with no other norm between
    fed: bool = False  # depends on the model's input
    random: bool = False
    cut: bool = False  # no gradient passes: detached, or computed without gradients
    owner: tuple[nn.Module, str] | None = None  # the parameter or buffer that this value is
    constant: Tensor | None = None  # depends neither on the input nor on parameters
    reason: str | None = None  # why nothing is known about it, if no operation gives the reason


@dataclass
class Op:
    """One call. `args` and `kwargs` are the arguments, with a `Ref` for every tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    place: str  # the innermost running module
    func: Callable[..., Any] | None = None
    norm: int | None = None  # for a norm: the index of its call


@dataclass
class NormCall:
    """One call of one norm: the value that it reads and the value that it writes."""

    name: str
    module: nn.Module
    value: int
    output: int


@dataclass
class Trace:
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def sources(self, call: int) -> list[int]:
        """The calls that feed this call, with no norm between."""
        bits = self.values[self.norms[call].value].sources
        return [k for k in range(len(self.norms)) if bits >> k & 1]


def attribute_name(func: Callable[..., Any]) -> str:
    """The name of the attribute that this getter or setter of a tensor accesses."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def function_name(func: Callable[..., Any]) -> str:
    """One name for `Tensor.add_`, `torch.add` and `x += y`. A getter has the name of its attribute."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return attribute_name(func)
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return {"iadd": "add", "radd": "add", "isub": "sub", "imul": "mul", "rmul": "mul", "itruediv": "div",
                "truediv": "div"}.get(name, name)  # fmt: skip
    if name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return name
