"""What a trace holds: values, the operations between them, and the calls of norms among those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

UNSEEN = "made where the trace cannot see"
FROM_NUMBERS = "made of numbers that may come from the data"


@dataclass(frozen=True)
class Ref:
    """A tensor of the run, by the index of its `Value`; stands in the arguments of an `Op`."""

    index: int


@dataclass
class Value:
    """What is known of one tensor at one moment of the run; writing into it in place makes a new value."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    op: int | None = None
    sources: int = 0  # bit k: norm call k feeds it with no other norm between
    fed: bool = False  # depends on the model's input
    random: bool = False
    cut: bool = False  # no gradient passes here: detached, or made without gradients
    owner: tuple[nn.Module, str] | None = None  # the parameter or buffer it is
    constant: Tensor | None = None  # neither fed nor made from parameters
    reason: str | None = None  # why nothing is known of it, where no operation says so


@dataclass
class Op:
    """One call: `args` and `kwargs` as given, with a `Ref` for every tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    place: str  # the innermost module that was running
    func: Callable[..., Any] | None = None
    norm: int | None = None  # of a norm: which call


@dataclass
class NormCall:
    """One call of one norm: which value it read, which it wrote."""

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
        """The calls that feed this one with no norm between."""
        bits = self.values[self.norms[call].value].sources
        return [k for k in range(len(self.norms)) if bits >> k & 1]


def attribute_name(func: Callable[..., Any]) -> str:
    """Of a getter or setter of a tensor's attribute, which attribute."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def function_name(func: Callable[..., Any]) -> str:
    """`Tensor.add_`, `torch.add` and `x += y` are one operation; getters are named by their attribute."""
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
