"""Records a run: every call of a torch function, with the tensors that it read, made and wrote.

A constant is a tensor that existed before the run, or one that a recorded function made from no data. Any other
unknown tensor was made by code that the mode cannot record, such as NumPy, `torch.vmap` or an extension. Such a tensor
counts as fed by the input, and nothing else is known about it. If a module, a custom autograd function or a scripted
function returned it, the norms that feed this module or function feed the tensor. Otherwise it has no sources.

Numbers that leave torch (`item`, `tolist`, `numpy`) can come back as tensors. After the first such number, tensors made
from numbers are not constants either. A number that is used directly, as in `x * y.max().item()`, looks the same as a
number in the code.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from kalmannorm._wiring.recording.aliases import Aliases, same_place, storage, version
from kalmannorm._wiring.recording.records import (
    FROM_NUMBERS,
    UNSEEN,
    NormCall,
    Op,
    Ref,
    Trace,
    Value,
    attribute_name,
    function_name,
)

# These have no gradient. Results that depend on them alone depend on no norm.
_CUTS = {"detach", "data", "tensor", "new_tensor", "asarray"}
_NO_GRADIENT = {"argmax", "argmin", "argsort", "floor", "ceil", "round", "sign", "bernoulli"}
# Only the shape or type of the second tensor is used, not its values.
_SHAPED_AS = {"view_as", "reshape_as", "expand_as", "type_as"}
# Only the shape and type of the argument are used, not its values.
_FRESH = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty",
}  # fmt: skip
_RANDOM = {
    "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint", "randperm", "uniform_", "normal_",
    "normal", "exponential_", "multinomial", "random_",
}  # fmt: skip
# `_LEAVES` take numbers out of torch, `_ENTERS` make tensors from numbers.
_LEAVES = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__complex__", "__index__", "__dlpack__"}
_ENTERS = {"tensor", "as_tensor", "asarray", "scalar_tensor", "full", "full_like", "new_full", "new_tensor", "fill_"}
_COPIES = {"tensor", "as_tensor", "asarray"}  # of these, the ones that also take a tensor
# In-place functions that change no element.
_KEEPS = {"squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims", "detach", "requires_grad", "as_strided"}
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__set__"}
# Larger constants are not kept. A tensor that needs one has no belief.
_LARGEST_CONSTANT = 1 << 20
_LARGEST_COPY = 1 << 12  # constants up to this size are copied; larger ones are dropped if they are written later


def tensors_in(*tree: Any) -> list[Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, Tensor)]


def _may_write(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITES or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


class Recorder(TorchFunctionMode):
    """Records every call of a torch function into a `Trace`.

    `restore` undoes what recorded functions wrote into tensors that existed before the run.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self.paused = False
        self.escaped = False  # data has left torch
        self.outside: set[int] = set()  # identities of tensors that were read, existed before and are not the model's
        self.path: list[str] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._aliases = Aliases()
        self._kept: list[tuple[Value, int | None]] = []
        self._saved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._before: dict[int, weakref.ref[Tensor]] = {}
        self._places: dict[int, list[weakref.ref[Tensor]]] = {}
        # Not isinstance: an object may report another class, or run code when asked for it.
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
        for tensor in [o for o in objects if type(o) in kinds]:
            self._before[id(tensor)] = weakref.ref(tensor)
            place = storage(tensor)
            if place is not None:
                self._places.setdefault(place, []).append(self._before[id(tensor)])
        del objects
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and self.find(tensor) is None:
                    self._bind(tensor, self._value(tensor, owner=(module, name)))

    def _value(self, tensor: Tensor, **known: Any) -> Value:
        value = Value(len(self.trace.values), tuple(tensor.shape), tensor.dtype, tensor.device, **known)
        self.trace.values.append(value)
        return value

    def _bind(self, tensor: Tensor, value: Value) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), value.index)
        self._aliases.add(tensor)

    def find(self, tensor: Tensor) -> Value | None:
        entry = self._known.get(id(tensor))
        return self.trace.values[entry[1]] if entry is not None and entry[0]() is tensor else None

    def _existed(self, tensor: Tensor) -> bool:
        entry = self._before.get(id(tensor))
        return entry is not None and entry() is tensor

    def value_of(self, tensor: Tensor) -> Value:
        value = self.find(tensor)
        if value is None:
            if self._existed(tensor):
                self.outside.add(id(tensor))
                value = self._value(tensor)
                self._keep(value, tensor)
            else:
                value = self._value(tensor, fed=True, reason=UNSEEN)
            self._bind(tensor, value)
        return value

    def _keep(self, value: Value, tensor: Tensor) -> None:
        """Mark the value as a constant with the elements of this tensor."""
        if tensor.numel() <= _LARGEST_CONSTANT:
            copied = tensor.numel() <= _LARGEST_COPY
            value.constant = tensor.detach().clone() if copied else tensor.detach()
            if not copied:
                self._kept.append((value, version(value.constant)))

    def add_input(self, tensor: Tensor) -> None:
        if self.find(tensor) is None:
            self._bind(tensor, self._value(tensor, fed=True))

    def record(
        self, name: str, func: Callable[..., Any] | None, args: Any, kwargs: Any, out: Any, *, random: bool = False
    ) -> Op:
        given = tensors_in(args, kwargs)
        read = given[: 1 if name in _SHAPED_AS else None]
        if name == "new_tensor":
            read = tensors_in(args[1:], kwargs)  # the tensor itself lends only its type
        inputs = [] if name in _FRESH else [self.value_of(t) for t in read]
        place = self.path[-1] if self.path else ""
        args, kwargs = tree_map_only(Tensor, lambda t: Ref(self.value_of(t).index), (args, kwargs))
        op = Op(name, args, kwargs, [v.index for v in inputs], [], place, func)
        self.trace.ops.append(op)
        fed = any(v.fed for v in inputs)
        random = random or any(v.random for v in inputs)
        constant = not random and not fed and all(v.constant is not None for v in inputs)
        sources, cut = 0, name in _CUTS or not torch.is_grad_enabled()
        if name not in _NO_GRADIENT and not cut:
            for v in inputs:
                sources |= v.sources
        for tensor in tensors_in(out):
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            value = self._value(
                tensor,
                op=len(self.trace.ops) - 1,
                sources=sources if differentiable else 0,
                fed=fed,
                random=random,
                cut=cut,
            )
            if constant:
                self._keep(value, tensor)
            op.outputs.append(value.index)
            self._bind(tensor, value)
        return op

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        given = tensors_in(args, kwargs)
        values = [self.value_of(t) for t in given]  # before anything is written
        versions = [version(t) for t in given]
        called = getattr(func, "__name__", "")
        if given and _may_write(func, kwargs):
            self._save(given, setter=called == "__set__")
        out = func(*args, **kwargs)
        name = function_name(func)
        if called in _LEAVES and any(value.fed for value in values):
            self.escaped = True
        if called == "__set__":
            if attribute_name(func) == "data" and len(given) == 2:
                self._same(given[0], given[1])
            return out
        made = tensors_in(out)
        if made:
            op = self.record(name, func, args, kwargs, out, random=name in _RANDOM or called in _RANDOM)
            from_tensor = called in _COPIES and isinstance(args[0] if args else None, Tensor)
            if self.escaped and called in _ENTERS and len(given) < 2 and not from_tensor:
                for value in (self.trace.values[i] for i in op.outputs):
                    value.fed, value.constant, value.reason = True, None, FROM_NUMBERS
        written = {id(t): t for t, before in zip(given, versions, strict=True) if version(t) != before}
        if made and kwargs.get("out") is not None:
            written |= {id(t): t for t in tensors_in(kwargs["out"])}
        unsaid = [t for t in written.values() if not any(t is m for m in made)]
        if unsaid:  # setitem, and functions that update statistics as a side effect
            self.record(name if name == "setitem" else f"a write of {name}", None, args, kwargs, unsaid)
        if name not in _KEEPS:
            for tensor in written.values():
                self._spread(tensor)
        return out

    def _spread(self, tensor: Tensor) -> None:
        """Record that a write into this tensor has also changed the tensors that share its memory."""
        for alias in self._aliases.of(tensor):
            if same_place(alias, tensor):
                self._same(alias, tensor)
            else:
                self.record("a write through a view", None, (alias, tensor), {}, alias)

    def _same(self, tensor: Tensor, other: Tensor) -> None:
        """Record that a tensor now has the elements of another one. It also keeps its own sources."""
        sources = self.value_of(tensor).sources
        op = self.record("identity", None, (other,), {}, tensor)
        self.trace.values[op.outputs[0]].sources |= sources

    def _save(self, given: list[Tensor], *, setter: bool) -> None:
        """Before a write: save the elements of tensors that existed before the run."""
        for place in {storage(t) for t in given} - {None}:
            assert place is not None
            for tensor in (ref() for ref in self._places.get(place, ())):
                if tensor is not None and id(tensor) not in self._saved and storage(tensor) == place:
                    elements = tensor.detach()
                    self._saved[id(tensor)] = (tensor, elements, elements if setter else elements.clone())

    def restore(self) -> None:
        with self.pause(), torch.no_grad():
            for tensor, elements, value in self._saved.values():
                if storage(tensor) != storage(elements):
                    tensor.data = elements
                if value is not elements and not torch.equal(tensor, value):
                    tensor.detach().copy_(value)

    def finish(self, out: Any) -> Trace:
        with self.pause():
            self.trace.outputs = [self.value_of(t).index for t in tensors_in(out)]
            for value, before in self._kept:
                if value.constant is not None and version(value.constant) != before:
                    value.constant = None
        return self.trace

    def norm_call(self, name: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        with self.pause():
            value = self.value_of(x)
            op = self.record("batch norm", None, (x,), {}, y)
        call = len(self.trace.norms)
        op.norm = call
        output = self.trace.values[op.outputs[0]]
        output.sources, output.fed, output.constant = 1 << call, True, None
        self.trace.norms.append(NormCall(name, module, value.index, output.index))

    def made_by(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Record a whole module or function as one operation, if no recorded operation made its outputs."""
        unseen = [t for t in tensors_in(out) if self.find(t) is None and not self._existed(t)]
        if unseen:
            self.record(name, None, args, kwargs, unseen)

    @contextmanager
    def watching(self, names: Mapping[int, str]) -> Iterator[None]:
        """Track which of the model's modules is running."""

        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in names:
                self.path.append(names[id(module)])

        def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if id(module) in names and self.path:
                with self.pause():
                    self.made_by(type(module).__name__, args, kwargs, out)
                self.path.pop()

        handles = [
            nn_module.register_module_forward_pre_hook(enter),
            nn_module.register_module_forward_hook(leave, with_kwargs=True, always_call=False),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
                nn_module._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch 2.10 does not remove this one

    @contextmanager
    def seeing_functions(self) -> Iterator[None]:
        """Record custom autograd functions and scripted functions as one operation each.

        The forward of a custom autograd function does not show its gradient, so all its inputs count as sources. The
        inside of a scripted function cannot be recorded.

        A re-entrant activation checkpoint is no operation. Its forward runs without gradients, but the gradients of its
        segment exist, because its backward runs the segment again. So the segment is run as if it were outside.
        """
        original, script = torch.autograd.Function.__dict__["apply"], torch.jit.ScriptFunction.__call__
        thread, recorder = threading.get_ident(), self

        def unseen() -> bool:
            return recorder.paused or threading.get_ident() != thread

        def opaque(name: str, function: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
            if unseen():
                return function(first, *args, **kwargs)
            with recorder.pause():
                given = [(t, recorder.value_of(t), version(t)) for t in tensors_in(args, kwargs)]
            out = function(first, *args, **kwargs)
            with recorder.pause():
                recorder.made_by(name, args, kwargs, out)
                for tensor in (t for t in tensors_in(out) if t.is_floating_point()):
                    value = recorder.value_of(tensor)
                    for _, before, _ in given:
                        value.sources |= before.sources
                for tensor, before, count in given:
                    if version(tensor) != count and recorder.value_of(tensor) is before:
                        recorder.record(f"a write of {name}", None, args, kwargs, tensor)
                        recorder._spread(tensor)
            return out

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction and not unseen():
                segment, _preserves_random_state, *given = args
                return segment(*given)
            return opaque(cls.__name__, original.__func__, cls, *args, **kwargs)

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return opaque(f"scripted {function.name}", script, function, *args, **kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]
            torch.jit.ScriptFunction.__call__ = script  # type: ignore[method-assign]

    @contextmanager
    def pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before
