"""`fuse(…, save_memory=True)`: outputs of norms that convolutions, linear layers and max pools do not keep.

A norm gives its output a recipe: see `_ops/normalize/recipes.py`. Every layer that can keep the recipe gets a subclass
of its class, as fused modules do. Its forward looks for a recipe. Without one it is the layer's own forward. A max pool
without one keeps a byte per output.

If another operation keeps the output of a norm anyway, nothing would be saved. One training forward on the example
shows this, and the norm is left out.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.utils._pytree import tree_map_only

from kalmannorm._model.fusion.agreement import differs, subject_of
from kalmannorm._model.settings import norms
from kalmannorm._norms.computed_weights import CLASSES, ComputedWeight
from kalmannorm._ops.dispatch import transformed
from kalmannorm._ops.normalize.pooling import Window, fits_bytes, max_pool
from kalmannorm._ops.normalize.readers import Convolution, Linear, MaxPool
from kalmannorm._ops.normalize.recipes import DEEPEST, Recipe, keep, recipe_of
from kalmannorm._support.activation_checkpoints import OUTSIDE, region
from kalmannorm._support.fused_modules import Argument, Code, FusedForward, fuse_module, is_fused
from kalmannorm._support.kept_tensors import kept_tensors
from kalmannorm._wiring.recording.untouched import untouched

KEPT_ANYWAY = "another operation keeps its output"
KEPT_SUM = f"its residual is not kept, or {DEEPEST} sums before it are computed again"
KEPT_AS_BEFORE = "its output is kept"

_Read = Callable[[Any, Tensor, Recipe], "Tensor | None"]


def read(layer: nn.Module, y: Tensor, how: str) -> Tensor | None:
    """The result of a layer that keeps the recipe of its input, or None: it has to run its own forward."""
    if torch.compiler.is_compiling():
        if layer.training and torch.is_grad_enabled():
            say_compiled()
        return None
    if not torch.is_grad_enabled() or type(y) is not Tensor or _watched():
        return None
    here = region()
    recipe = recipe_of(y, here)
    if recipe is not None and recipe.plan is not None:
        return _READS[how](layer, y, recipe)
    if how == "max pool":
        return _pool_alone(layer, y)
    if _keeps(layer):
        keep(y, here)
    return None


def _watched() -> bool:
    return transformed() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def _keeps(layer: nn.Module) -> bool:
    """Whether the layer's own forward lets autograd keep the input itself."""
    weight = getattr(layer, "weight", None)
    padded = getattr(layer, "padding_mode", "zeros") != "zeros"
    return isinstance(weight, Tensor) and weight.requires_grad and not padded


@functools.cache
def _say_compiled() -> None:
    warnings.warn(
        "kalmannorm: in compiled code outputs of norms are kept for the backward; fuse(…, save_memory=True) saves "
        "memory in eager mode and in CUDA graphs (kalmannorm.graphed)",
        UserWarning,
        stacklevel=2,
    )


def say_compiled() -> None:
    _say_compiled()


# `torch.compiler.assume_constant_result` sets the same attribute, but imports the compiler.
say_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _cast(layer: Any, y: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias as autocast would cast them. None if it would also cast y, which then is another tensor."""
    device = y.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if dtype is not None and y.dtype != dtype:
        return None
    weight, bias = layer.filter if isinstance(layer, ComputedWeight) else layer.weight, layer.bias
    return (weight, bias) if dtype is None else (weight.to(dtype), None if bias is None else bias.to(dtype))


def _convolve(layer: Any, y: Tensor, recipe: Recipe) -> Tensor | None:
    if not layer.weight.requires_grad or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    if y.dim() != len(layer.stride) + 2 or (cast := _cast(layer, y)) is None:
        return None
    return Convolution.read(y, *cast, recipe, layer.stride, layer.padding, layer.dilation, layer.groups)


def _map(layer: Any, y: Tensor, recipe: Recipe) -> Tensor | None:
    if not layer.weight.requires_grad or y.dim() != 2 or (cast := _cast(layer, y)) is None:
        return None
    return Linear.read(y, *cast, recipe)


def _pool(layer: Any, y: Tensor, recipe: Recipe) -> Tensor | None:
    window = _window(layer, y)
    return None if window is None else MaxPool.read(y, None, None, recipe, *window)


def _pool_alone(layer: Any, y: Tensor) -> Tensor | None:
    window = _window(layer, y) if y.requires_grad else None
    return None if window is None or not fits_bytes(y, *window) else max_pool(y, *window)


def _window(layer: Any, y: Tensor) -> Window | None:
    if layer.return_indices or y.dim() != 4:
        return None
    size, stride, padding, dilation = (
        _pair(each) for each in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    return size, stride, padding, dilation, layer.ceil_mode


_READS: dict[str, _Read] = {"convolution": _convolve, "linear layer": _map, "max pool": _pool}
_LAYERS: dict[type[nn.Module], str] = {
    nn.Conv1d: "convolution",
    nn.Conv2d: "convolution",
    nn.Conv3d: "convolution",
    nn.Linear: "linear layer",
    nn.MaxPool2d: "max pool",
    **{kind: "convolution" for kinds in CLASSES.values() for kind in kinds},
}


def _program(kind: type[nn.Module], how: str) -> FusedForward:
    source = (
        "def forward(self, input):\n"
        f"    found = read(self, input, {how!r})\n"
        "    return own(self, input) if found is None else found\n"
    )
    code = Code(source, {"read": read, "own": kind.forward})
    return FusedForward((Argument("input", "tensor"),), code, code)


@dataclass(frozen=True)
class Saving:
    """Of each norm, by name: the layers that keep the recipe of its output, or why the output itself is kept."""

    saved: dict[str, str]
    kept: dict[str, str]


def save_where_possible(model: nn.Module, example_input: Any) -> Saving:
    """Let a model save memory. A copy shows where, and that outputs, gradients and buffers stay the same."""
    subject, given, limit, own = subject_of(model, example_input)
    keeping: dict[str, str] = {}
    try:
        while True:
            save_memory(subject, keeping)
            found = _seen(subject, given)
            anyway = {name: reason for name, reason in found.kept.items() if reason == KEPT_ANYWAY}
            if not anyway:
                break
            keeping |= anyway
        place = differs(subject, given, limit, own)
        failure = None if place is None else f"its {place} would differ"
    except Exception as error:  # any error: this is the user's model, and a batch may be too small for training
        failure = next(iter(str(error).splitlines()), type(error).__name__)
    if failure is not None:
        keeping = {name: f"if it were computed again: {failure}" for name, _ in norms(model)}
        found = Saving({}, keeping)
    save_memory(model, keeping)
    return Saving(found.saved, {name: keeping.get(name, reason) for name, reason in found.kept.items()})


def save_memory(model: nn.Module, keeping: Mapping[str, str]) -> None:
    """Let norms give recipes, all but those in `keeping`. Let all layers that can keep recipes look for them."""
    for name, norm in norms(model):
        norm.rebuilds = name not in keeping
    for module in model.modules():
        if (how := _LAYERS.get(type(module))) is not None and "forward" not in vars(module):
            fuse_module(module, _program(type(module), how))


def _seen(model: nn.Module, given: Any) -> Saving:
    """Which outputs are kept, in a training forward on the example."""
    names = {id(module): name for name, module in model.named_modules()}
    outputs: list[tuple[str, Tensor, bool]] = []
    readers: dict[int, list[str]] = {}

    def made(norm: nn.Module, _: Any, given: dict[str, Any], y: Any) -> None:
        if isinstance(y, Tensor):
            outputs.append((names[id(norm)], y, given.get("residual") is not None))

    def reads(layer: nn.Module, given: tuple[Any, ...]) -> None:
        readers.setdefault(id(given[0]), []).append(names[id(layer)])

    handles = [norm.register_forward_hook(made, with_kwargs=True) for _, norm in norms(model)]
    layers = [module for module in model.modules() if is_fused(module) and module._fused_from in _LAYERS]
    handles += [layer.register_forward_pre_hook(reads) for layer in layers]
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), given)
    try:
        with untouched(model, training=True), torch.enable_grad():
            _, kept = kept_tensors(lambda: model(*args, **kwargs))
            storages = {each.tensor.untyped_storage().data_ptr() for each in kept}
            return _sorted(outputs, readers, storages)
    finally:
        for handle in handles:
            handle.remove()


def _sorted(outputs: list[tuple[str, Tensor, bool]], readers: dict[int, list[str]], storages: set[int]) -> Saving:
    saved: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, y, adds in outputs:
        recipe, there = recipe_of(y, OUTSIDE), y.untyped_storage().data_ptr() in storages
        if recipe is not None and recipe.plan is not None:
            if there:
                kept[name] = KEPT_ANYWAY
            else:
                saved[name] = ", ".join(readers.get(id(y), [])) or "itself"
        elif there:
            kept[name] = KEPT_SUM if adds else KEPT_AS_BEFORE
    return Saving({name: by for name, by in saved.items() if name not in kept}, kept)
