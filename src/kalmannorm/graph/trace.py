"""What a model does with its input, from one concrete run: every operation, in order, and the tensors between.

The run happens under a `TorchFunctionMode`, which sees modules, functions, methods and in-place operations alike and
follows whatever control flow the input takes. Tensors are known by identity and not kept alive, so the run needs no
more memory than any forward without gradients. Norms run as stubs that touch no statistics, so that nothing of the run
stays behind.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from kalmannorm.graph.untouched import untouched

# Without a gradient: what depends on these depends on no norm.
_NO_GRADIENT = {"detach", "detach_", "argmax", "argmin", "argsort", "floor", "ceil", "round", "sign", "bernoulli"}
# The second tensor gives its shape or type, not its values.
_SHAPED_AS = {"view_as", "reshape_as", "expand_as", "type_as"}
# Made of no tensor's values, only like one.
_FRESH = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty",
}  # fmt: skip
_RANDOM = {
    "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint", "randperm", "uniform_", "normal_",
    "normal", "exponential_", "multinomial", "random_",
}  # fmt: skip
# Constants above this many elements are not kept: a belief that needs one is given up instead.
_LARGEST_CONSTANT = 1 << 20


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
    owner: tuple[nn.Module, str] | None = None  # the parameter or buffer it is
    constant: Tensor | None = None  # neither fed nor made from parameters
    seen: bool = True  # False where it came out of nowhere


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


def function_name(func: Callable[..., Any]) -> str:
    """`Tensor.add_`, `torch.add` and `x += y` are one operation; getters are named by their attribute."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return {"iadd": "add", "radd": "add", "isub": "sub", "imul": "mul", "rmul": "mul", "itruediv": "div",
                "truediv": "div"}.get(name, name)  # fmt: skip
    if name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return name


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


class Recorder(TorchFunctionMode):
    """Records every call of a torch function into a `Trace`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self.paused = False
        self.path: list[str] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in self._known:
                    self._bind(tensor, self._value(tensor, owner=(module, name)))

    def _value(self, tensor: Tensor, **known: Any) -> Value:
        value = Value(len(self.trace.values), tuple(tensor.shape), tensor.dtype, tensor.device, **known)
        self.trace.values.append(value)
        return value

    def _bind(self, tensor: Tensor, value: Value) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), value.index)

    def value_of(self, tensor: Tensor) -> Value:
        entry = self._known.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return self.trace.values[entry[1]]
        # Made outside what this mode sees: a constant of the model's code, or the result of a custom function.
        small = tensor.numel() <= _LARGEST_CONSTANT
        value = self._value(tensor, seen=False, constant=tensor.detach() if small else None)
        self._bind(tensor, value)
        return value

    def add_input(self, tensor: Tensor) -> None:
        value = self._value(tensor, fed=True)
        self._bind(tensor, value)

    def record(
        self, name: str, func: Callable[..., Any] | None, args: Any, kwargs: Any, out: Any, *, random: bool = False
    ) -> Op:
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        inputs = [] if name in _FRESH else [self.value_of(t) for t in given[: 1 if name in _SHAPED_AS else None]]
        made = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        place = self.path[-1] if self.path else ""
        args, kwargs = tree_map_only(Tensor, lambda t: Ref(self.value_of(t).index), (args, kwargs))
        op = Op(name, args, kwargs, [v.index for v in inputs], [], place, func)
        self.trace.ops.append(op)
        fed = any(v.fed for v in inputs)
        random = random or any(v.random for v in inputs)
        constant = not random and all(v.constant is not None for v in inputs)
        sources = 0
        if name not in _NO_GRADIENT:
            for v in inputs:
                sources |= v.sources
        for tensor in made:
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            keep = constant and not fed and tensor.numel() <= _LARGEST_CONSTANT
            value = self._value(
                tensor,
                op=len(self.trace.ops) - 1,
                sources=sources if differentiable else 0,
                fed=fed,
                random=random,
                constant=tensor.detach() if keep else None,
            )
            op.outputs.append(value.index)
            self._bind(tensor, value)
        return op

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        target = args[0] if args and isinstance(args[0], Tensor) and _writes(func) else None
        before = None if target is None else self.value_of(target).index
        out = func(*args, **kwargs)
        name = function_name(func)
        if name == "setitem":
            self.record(name, func, args, kwargs, target)
        elif any(isinstance(t, Tensor) for t in tree_flatten(out)[0]):
            random = name in _RANDOM or getattr(func, "__name__", "") in _RANDOM
            if target is not None and out is target:
                # The arguments speak of the value before the write.
                assert before is not None
                self._bind(target, self.trace.values[before])
            self.record(name, func, args, kwargs, out, random=random)
        if target is not None and target._base is not None and target._base is not target:
            self.record("write_through_view", None, (target._base, target), {}, target._base)
        return out

    def norm_call(self, name: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        value = self.value_of(x)
        op = self.record("norm", None, (x,), {}, y)
        call = len(self.trace.norms)
        op.norm = call
        output = self.trace.values[op.outputs[0]]
        output.sources, output.fed = 1 << call, True
        self.trace.norms.append(NormCall(name, module, value.index, output.index))

    def made_by(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Outputs that no recorded operation made: the whole module or function is the operation."""
        made = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        unseen = [t for t in made if id(t) not in self._known or self._known[id(t)][0]() is not t]
        if unseen:
            self.record(name, None, args, kwargs, unseen)

    @contextmanager
    def watching(self, names: Mapping[int, str]) -> Iterator[None]:
        """Follow which of the model's modules is running."""

        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in names:
                self.path.append(names[id(module)])

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            if id(module) in names and self.path:
                self.made_by(type(module).__name__, args, {}, out)
                self.path.pop()

        handles = [
            nn_module.register_module_forward_pre_hook(enter),
            nn_module.register_module_forward_hook(leave, always_call=False),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def seeing_functions(self) -> Iterator[None]:
        """What a custom autograd function's forward does says nothing of its gradient: all its inputs are sources."""
        original = torch.autograd.Function.__dict__["apply"]
        thread, recorder = threading.get_ident(), self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.paused or threading.get_ident() != thread:
                return original.__func__(cls, *args, **kwargs)
            sources = 0
            for tensor in (t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)):
                sources |= recorder.value_of(tensor).sources
            out = original.__func__(cls, *args, **kwargs)
            recorder.made_by(cls.__name__, args, kwargs, out)
            for tensor in (t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.is_floating_point()):
                recorder.value_of(tensor).sources |= sources
            return out

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]

    @contextmanager
    def pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


def _standardized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """What a norm does, from this batch alone and for any number of values."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    statistics = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    var, mean = torch.var_mean(statistics, axes, correction=0)
    mean, var = mean.to(x.dtype), var.to(x.dtype)
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def _stub(recorder: Recorder, name: str, norm: nn.Module, then: Sequence[str]) -> Callable[..., Any]:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with recorder.pause():
            y = _standardized(x, norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
        recorder.norm_call(name, norm, x, y)
        for child in then:
            y = getattr(norm, child)(y)
        return y

    return forward


def arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple is positional arguments, a dict keyword arguments, anything else one argument."""
    if isinstance(example_input, dict):
        return (), example_input
    if type(example_input) is tuple:
        return example_input, {}
    return (example_input,), {}


def trace(
    model: nn.Module, example_input: Any, norms: Mapping[str, tuple[nn.Module, Sequence[str]]], *, training: bool
) -> Trace:
    """Run the model once in the given mode and record it; the model is left as it was.

    `norms` are the norms to recognise: by name, the module and the children it applies to its result, in order.
    """
    args, kwargs = arguments(example_input)
    recorder = Recorder(model)
    for tensor in tree_flatten((args, kwargs))[0]:
        if isinstance(tensor, Tensor):
            recorder.add_input(tensor)
    names = {id(module): name for name, module in model.named_modules()}
    with untouched(model, training=training), torch.no_grad(), recorder.watching(names):
        for name, (norm, then) in norms.items():
            norm.__dict__["forward"] = _stub(recorder, name, norm, then)
        with recorder, recorder.seeing_functions():
            out = model(*args, **kwargs)
    made = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
    recorder.trace.outputs = [recorder.value_of(t).index for t in made]
    return recorder.trace
