"""Records one concrete run of a model: every operation in order, and the tensors between the operations.

The run happens under a `TorchFunctionMode`. The mode sees modules, functions, methods and in-place operations, and the
control flow is that of the given input. Tensors are identified by weak references, so the run needs no more memory than
a forward without gradients. Norms run as stubs that do not change statistics, so the run leaves the model unchanged.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map_only

from kalmannorm._support.copying import Detached
from kalmannorm._support.fused_modules import unfused
from kalmannorm._wiring.recording import frozen
from kalmannorm._wiring.recording.recorder import Recorder
from kalmannorm._wiring.recording.records import NormCall, Op, Ref, Trace, Value, function_name
from kalmannorm._wiring.recording.untouched import untouched

__all__ = ["NoInputError", "NormCall", "Op", "Ref", "Trace", "Value", "arguments", "function_name", "trace"]

_MOST_OBJECTS = 1 << 16  # the most objects of an example input that are searched for tensors


class NoInputError(ValueError):
    """No tensor was found in the example input."""


class LostGradientError(RuntimeError):
    """The forward reads a tensor that lost its graph when the model was copied."""


def _standardized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The output of a norm, from this batch alone. Works for any number of values."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    statistics = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    var, mean = torch.var_mean(statistics, axes, correction=0)
    mean, var = mean.to(x.dtype), var.to(x.dtype)
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def _stub(recorder: Recorder, name: str, norm: nn.Module, then: Sequence[str]) -> Callable[..., Any]:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with recorder.pause(), torch.no_grad():
            y = _standardized(x, norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
        recorder.norm_call(name, norm, x, y)
        for child in then:
            y = getattr(norm, child)(y)
        return y

    return forward


def arguments(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple is taken as positional arguments, a dict as keyword arguments, anything else as one argument."""
    if isinstance(example_input, dict):
        return (), example_input
    if type(example_input) is tuple:
        return example_input, {}
    return (example_input,), {}


def _held(example_input: Any) -> Iterator[Any]:
    """All objects inside an example input, in containers of any kind."""
    skipped = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, nn.Module)
    pending, seen = [example_input], {id(example_input)}
    while pending and len(seen) < _MOST_OBJECTS:
        found = pending.pop()
        yield found
        if not isinstance(found, (Tensor, str, bytes, int, float, complex, type(None))):
            inner = [o for o in gc.get_referents(found) if id(o) not in seen and not isinstance(o, skipped)]
            seen.update(id(o) for o in inner)
            pending.extend(inner)


def _feed(recorder: Recorder, example_input: Any, given: Any) -> None:
    """Register all tensors of the input as data."""
    own = {id(t): t for t in tree_flatten(given)[0] if isinstance(t, Tensor)}
    objects = False
    for found in _held((example_input, given)):
        if isinstance(found, Tensor):
            own[id(found)] = found
        elif type(found).__module__.split(".")[0] == "numpy":
            recorder.escaped = objects = True
        elif not isinstance(found, (str, bytes, int, float, complex, tuple, list, dict, type(None))):
            objects = True
    if not own and objects:
        raise NoInputError(
            f"example_input: no tensor found in a {type(example_input).__name__}; pass the tensors themselves, or an "
            "object that contains them"
        )
    for tensor in own.values():
        recorder.add_input(tensor)


def _copied(model: nn.Module, given: Any) -> Any:
    """Copies of the inputs, because the model may write into them. Containers unknown to pytree are not copied."""
    copies = {id(t): t for t in (*model.parameters(), *model.buffers())}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    return tree_map_only(Tensor, copy, given)


@contextmanager
def _no_graph(model: nn.Module) -> Iterator[None]:
    """Keep no activation for a backward. Gradients stay enabled, so that `no_grad` in the model's code is recorded."""
    learning = [p for p in model.parameters() if p.is_leaf and p.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _check_read(model: nn.Module, read: set[int], detached: Detached) -> None:
    for key in read & detached.keys():
        raise LostGradientError(
            f"{type(model).__name__} cannot be copied: its forward reads {detached[key][1]!r}, which was computed "
            "outside of the forward and would lose its gradient in the copy; pass inplace=True, or compute it in the "
            "forward"
        )


def trace(
    model: nn.Module,
    example_input: Any,
    norms: Mapping[str, tuple[nn.Module, Sequence[str]]],
    *,
    training: bool,
    detached: Detached | None = None,
) -> Trace:
    """Run the model once in the given mode and record it. The model and the input stay unchanged.

    `norms` are the norms to recognise, by name: the module, and the children that it applies to its result, in order.
    """
    args, kwargs = _copied(model, arguments(example_input))
    recorder = Recorder(model)
    _feed(recorder, example_input, (args, kwargs))
    names = {id(module): name for name, module in model.named_modules()}
    with unfused(model), untouched(model, training=training), _no_graph(model), recorder.watching(names):
        for name, (norm, then) in norms.items():
            norm.__dict__["forward"] = _stub(recorder, name, norm, then)
        for module in model.modules():
            if frozen.is_frozen(module):
                module.__dict__["forward"] = frozen.stub(module)
        try:
            with recorder, recorder.seeing_functions():
                out = model(*args, **kwargs)
            _check_read(model, recorder.outside, detached or {})
            return recorder.finish(out)
        finally:
            recorder.restore()
