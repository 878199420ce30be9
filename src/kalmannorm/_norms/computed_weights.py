"""Convolutions that compute their filter from a parameter W, for norms that need it: centred, standardized or scaled
per output channel. `_ops/filters/definition.py` has the equations.

Names and parameters stay those of the convolution: `weight` is W, and `filter` is computed. At the beginning of the
model's forward two hooks compute the filters of all its convolutions together, and keep them until its end. Everything
else computes a filter where it is read: a convolution that is called by itself, one in a unit of FSDP, and compiled
code. Numbers do not depend on that.

`plain_weights` makes it a convolution of torch again, whose weight is the filter.

The weights alone do not tell that filters are computed from them. So the first such convolution of a state dict adds a
key with the name of the option of `convert`. A model without this option does not know the key, and refuses it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from kalmannorm._ops.dispatch import functions_watched, transformed
from kalmannorm._ops.filters import aten
from kalmannorm._ops.filters.definition import Computation as Computation
from kalmannorm._ops.filters.together import filters_of
from kalmannorm._support.activation_checkpoints import recompute_id, saving, segments
from kalmannorm._support.compiling import leave_to_python, set_callback
from kalmannorm._support.sharded_modules import kinds_of_units
from kalmannorm._support.tracing import jit_traces, leaf


class Known(NamedTuple):
    """A filter that was computed at the beginning of a forward, and how."""

    weight: Tensor  # kept, so that no other tensor gets its identity
    version: int
    address: int | None  # None under `torch.func`, whose tensors do not tell
    filter: Tensor
    saving: Any  # the hooks on saved tensors
    backward: int  # the backward inside which the forward runs, or -1
    gradients: bool  # whether it has them
    inference: bool  # whether it was made in inference mode

    def holds(self, weight: Tensor) -> bool:
        """Whether it is the filter of its weight as it is now, and has the gradient that is needed now."""
        if self.version != weight._version or self.backward != recompute_id():
            return False
        if self.address is not None and self.address != weight.data_ptr():
            return False
        if self.inference and not torch.is_inference_mode_enabled():
            return False
        return self.gradients or not (weight.requires_grad and torch.is_grad_enabled())


Filters = dict[tuple[int, Computation], Known]
"""By the identity of the weight, and what is computed."""


class _Running(threading.local):
    """The filters of the forwards that run in this thread."""

    def __init__(self) -> None:
        self.known: Filters = {}
        self.models: list[tuple[nn.Module, Filters]] = []  # each with what was known before


RUNNING = _Running()


def _kept(weight: Tensor, computation: Computation) -> Tensor | None:
    """The filter that was computed at the beginning of the forward, or None.

    An activation checkpoint counts the tensors that its segment saves. So its recomputation has to take the same filter
    again, and the segment keeps it. Inside other hooks on saved tensors it is computed where it is read.
    """
    now, key = saving(), (id(weight), computation)
    known = RUNNING.known.get(key)
    usable = known is not None and known.holds(weight)
    if known is not None and usable and known.saving is now:
        return known.filter
    running = [] if now is None else segments()
    if not running or running[0].reentrant():
        return None
    segment = running[0]
    kept: Filters = vars(segment.key).setdefault("_kalmannorm_filters", {})
    if known is not None and usable and not segment.recomputed:
        kept[key] = known
    found = kept.get(key)
    return None if found is None else found.filter


class ComputedWeight(_ConvNd):
    """A convolution with a computed filter."""

    computation: Computation
    option: str
    """The option of `convert` that makes such convolutions. It is also an attribute, because it is a key of state
    dicts: distributed checkpoints look for the attribute of each key."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not any(key.rpartition(".")[2] == self.option for key in destination):
            destination[prefix + self.option] = torch.ones((), dtype=torch.long, device=self.weight.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        unexpected: list[str] = rest[3]
        if prefix + self.option in unexpected:
            unexpected.remove(prefix + self.option)

    @property
    def filter(self) -> Tensor:
        """The computed weight, with its gradient."""
        return self.filter_of(self.weight)

    def computed(self, weight: Tensor) -> Tensor:
        """The filter of this weight, computed now."""
        return filters_of([weight], self.computation)[0]

    def filter_of(self, weight: Tensor) -> Tensor:
        """The filter of this weight: the one that this forward has computed, if it has."""
        if torch.compiler.is_compiling():
            return aten.computed(weight, self.computation)
        known = _kept(weight, self.computation)
        return self.computed(weight) if known is None else known

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return leaf(self, input)  # type: ignore[no-any-return]
        return super().forward(input)  # type: ignore[no-any-return]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = super()._conv_forward(input, self.filter_of(weight), bias)
        return result


class _Centred(ComputedWeight):
    computation, option = "centred", "centre_weights"
    centre_weights = True


class _Standardized(ComputedWeight):
    computation, option = "standardized", "weight_standardization"
    weight_standardization = True


class _Scaled(ComputedWeight):
    computation, option = "scaled", "weight_standardization"
    weight_standardization = True


class CentredConv1d(_Centred, nn.Conv1d):
    """`nn.Conv1d` whose weight has a mean of 0 per output channel."""


class CentredConv2d(_Centred, nn.Conv2d):
    """`nn.Conv2d` whose weight has a mean of 0 per output channel."""


class CentredConv3d(_Centred, nn.Conv3d):
    """`nn.Conv3d` whose weight has a mean of 0 per output channel."""


class StandardizedConv1d(_Standardized, nn.Conv1d):
    """`nn.Conv1d` whose weight has a mean of 0 and a variance of 1 per output channel."""


class StandardizedConv2d(_Standardized, nn.Conv2d):
    """`nn.Conv2d` whose weight has a mean of 0 and a variance of 1 per output channel."""


class StandardizedConv3d(_Standardized, nn.Conv3d):
    """`nn.Conv3d` whose weight has a mean of 0 and a variance of 1 per output channel."""


class ScaledConv1d(_Scaled, nn.Conv1d):
    """`nn.Conv1d` whose weight has a mean of 0 and a norm of 1 per output channel."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """`nn.Conv2d` whose weight has a mean of 0 and a norm of 1 per output channel."""


class ScaledConv3d(_Scaled, nn.Conv3d):
    """`nn.Conv3d` whose weight has a mean of 0 and a norm of 1 per output channel."""


PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CLASSES: dict[Computation, tuple[Any, ...]] = {
    "centred": (CentredConv1d, CentredConv2d, CentredConv3d),
    "standardized": (StandardizedConv1d, StandardizedConv2d, StandardizedConv3d),
    "scaled": (ScaledConv1d, ScaledConv2d, ScaledConv3d),
}


def check_convolutions(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> None:
    """Raise an error for a convolution whose weight cannot be computed. `modules`: only these. None: all."""
    chosen = _chosen(modules)
    for name, module in model.named_modules():
        if not isinstance(module, _ConvNd) or isinstance(module, _ConvTransposeNd):
            continue
        if chosen is not None and id(module) not in chosen:
            continue
        if type(module) not in PLAIN or module._parameters.get("weight") is None or "forward" in vars(module):
            raise TypeError(
                f"{name!r} is a {type(module).__name__} with a weight or forward of its own. Only the weights of plain "
                "nn.Conv1d, 2d and 3d can be centred or standardized; replace it by one of these first"
            )


def compute_weights(model: nn.Module, computation: Computation, modules: Iterable[nn.Module] | None = None) -> None:
    """Change the class of convolutions in place. Transposed ones stay as they are. `modules`: only these. None: all."""
    chosen = _chosen(modules)
    for module in model.modules():
        if type(module) in PLAIN and (chosen is None or id(module) in chosen):
            module.__class__ = CLASSES[computation][PLAIN.index(type(module))]
    _remove_hooks(model)
    model.register_forward_pre_hook(ComputeFilters())
    model.register_forward_hook(ForgetFilters(), always_call=True)


def _chosen(modules: Iterable[nn.Module] | None) -> set[int] | None:
    return None if modules is None else {id(module) for module in modules}


@torch.no_grad()
def plain_weights(model: nn.Module) -> bool:
    """Turn such convolutions into plain ones with the same outputs, in place. Returns whether there were any."""
    found = [module for module in model.modules() if isinstance(module, ComputedWeight)]
    for module in found:
        module.weight.copy_(module.computed(module.weight))
        module.__class__ = next(kind for kind in PLAIN if isinstance(module, kind))  # type: ignore[assignment]
    for each in model.modules():
        _remove_hooks(each)
    return bool(found)


@contextmanager
def without_computation(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Such convolutions as plain ones that use their weight as it is, to trace them. Yields them."""
    found = [module for module in model.modules() if isinstance(module, ComputedWeight)]
    kinds = [type(module) for module in found]
    try:
        for module in found:
            module.__class__ = next(kind for kind in PLAIN if isinstance(module, kind))  # type: ignore[assignment]
        yield [*found]
    finally:
        for module, kind in zip(found, kinds, strict=True):
            module.__class__ = kind


class ComputeFilters:
    """A forward pre-hook. It is an object, not a closure, so that the model can be pickled."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        compiler = set_callback(None)
        try:
            if compiler is None:  # compiled code computes filters where it reads them
                _begin(module)
        finally:
            set_callback(compiler)


class ForgetFilters:
    """A forward hook. It is also called if the forward fails."""

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        compiler = set_callback(None)
        try:
            _end(module)
        finally:
            set_callback(compiler)


# Around a compiled model they are work for Python, and not worth a compilation of their own.
leave_to_python(ComputeFilters.__call__)
leave_to_python(ForgetFilters.__call__)


def _remove_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, (ComputeFilters, ForgetFilters))]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def _begin(model: nn.Module) -> None:
    computed = _computed_in(model)
    RUNNING.models.append((model, RUNNING.known))
    RUNNING.known = RUNNING.known | computed


def _end(model: nn.Module) -> None:
    """Forget its filters, also those of forwards that were interrupted. If a forward calls itself, both forget them."""
    for place, (running, before) in enumerate(RUNNING.models):
        if running is model:
            RUNNING.known = before
            del RUNNING.models[place:]
            return


def _computed_in(model: nn.Module) -> Filters:
    """The filters of a model, as many as can be computed together."""
    if jit_traces() or functions_watched():
        return {}
    weights: dict[Computation, dict[int, Tensor]] = {computation: {} for computation in CLASSES}
    for module in _convolutions(model):
        weight = _tensor_of(module)
        usable = type(weight) in (Tensor, nn.Parameter) and not weight.is_inference()
        if usable and weight.numel() > 0:  # a sharded weight may get its memory later
            weights[module.computation][id(weight)] = weight
    found: Filters = {}
    hooks, backward, inference = saving(), recompute_id(), torch.is_inference_mode_enabled()
    without_address = transformed()
    for computation, each in weights.items():
        if each:
            for weight, filter in zip(each.values(), filters_of(list(each.values()), computation), strict=True):
                way = hooks, backward, filter.requires_grad, inference
                address = None if without_address else weight.data_ptr()
                found[id(weight), computation] = Known(weight, weight._version, address, filter, *way)
    return found


def _convolutions(model: nn.Module) -> Iterator[ComputedWeight]:
    """Those of a model, in the order of its modules. Not those in units that FSDP shards by themselves."""
    units = kinds_of_units()
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        if isinstance(module, ComputedWeight):
            yield module
        for child in reversed(module._modules.values()):
            if child is not None and id(child) not in seen and not isinstance(child, units):
                seen.add(id(child))
                waiting.append(child)


def _tensor_of(module: ComputedWeight) -> Any:
    """Its weight, if it is the same tensor at every access. A parametrized weight is not."""
    weight = module._parameters.get("weight")
    return module.__dict__.get("weight") if weight is None else weight
