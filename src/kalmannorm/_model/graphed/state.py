"""What of a model a graph depends on: its modules, the addresses of its tensors, and its settings.

A graph contains addresses and the numbers that Python computed while it was captured. So a graph serves only the
modules, tensors and settings that it was captured with. They are compared in every call, mostly by identity. A step
waits for this, so the loops over thousands of attributes run inside functions of the standard library.

Settings are all attributes of all modules, other than tensors that torch registers: flags of training, momentum, eps,
frozen statistics and so on. A model that switches between training and evaluation has two versions of its settings.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress, count
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, distributed, nn

from kalmannorm._norms.computed_weights import ComputeFilters, ForgetFilters
from kalmannorm._ops.track.averages import Pending
from kalmannorm._running.hooks import Begin, End

VERSIONS = 16
"""Versions of the settings that are known at a time, the most recently used."""
_hooks_of = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = ("_modules", "_parameters", "_buffers")
_registries_of = itemgetter(*_REGISTRIES)
_values_of = methodcaller("values")
_TORCHS_OWN = frozenset(vars(nn.Module()))
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, dict, set)
_OUR_HOOKS = (Begin, End, ComputeFilters, ForgetFilters)
_numbers = count()


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether both have the same objects. Their addresses are compared: for thousands of objects `is` takes long."""
    return len(one) == len(other) and _addresses(one) == _addresses(other)


def _addresses(objects: tuple[Any, ...]) -> bytes:
    """The memory of a tuple in CPython: the addresses of its objects, after a head."""
    return ctypes.string_at(id(objects) + tuple.__basicsize__, ctypes.sizeof(ctypes.c_void_p) * len(objects))


def _contents(container: Any) -> tuple[Any, ...]:
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Pending):
        yield from (value.values, *value.rows())
    elif depth and isinstance(value, (tuple, *_CONTAINERS)):
        for each in _contents(value):
            yield from _tensors_in(each, depth - 1)


class Layout:
    """The names of all settings of all modules."""

    def __init__(self, dicts: list[dict[str, Any]]) -> None:
        self.lengths = list(map(len, dicts))
        names = ([name for name in own if name == "training" or name not in _TORCHS_OWN] for own in dicts)
        self.getters = [itemgetter("_modules", "_modules", *own) for own in names]  # of two or more it makes a tuple

    def read(self, dicts: list[dict[str, Any]]) -> tuple[Any, ...] | None:
        """The settings. None if modules have other attributes: one more, one less, or one by another name."""
        if list(map(len, dicts)) != self.lengths:
            return None
        try:
            return tuple(chain.from_iterable([get(own) for get, own in zip(self.getters, dicts, strict=True)]))
        except KeyError:
            return None


class Version:
    """Settings, and the tensors among them. `problem`: why a graph cannot serve, None if it can."""

    def __init__(self, state: ModelState, layout: Layout, values: tuple[Any, ...]) -> None:
        self.number, self.layout, self.values = next(_numbers), layout, values
        self.classes = tuple(map(type, state.modules))
        self.trained = [parameter.requires_grad for parameter in state.parameters]
        programs = map(_program, (own.get("wire") for own in state.dicts))
        self.programs = list({id(each): each for each in programs if each is not None}.values())
        self.steps = self._steps()
        self.containers, self.tensors = list[tuple[Any, tuple[Any, ...]]](), list[Tensor]()
        for own in state.dicts:
            for name, value in own.items():
                if name not in _TORCHS_OWN:
                    self.tensors += _tensors_in(value)
                    if isinstance(value, _CONTAINERS):
                        self.containers.append((value, _contents(value)))
        self.addresses = list(map(Tensor.data_ptr, self.tensors)) if all(map(_plain, self.tensors)) else []
        self.problem = state.problem() or self._problem(state)

    def _problem(self, state: ModelState) -> str | None:
        tensors = [*state.parameters, *state.buffers, *self.tensors]
        if not all(map(_plain, tensors)):
            return "the model has tensors of special classes"
        if len({tensor.device for tensor in tensors}) > 1:
            return "the model is on several devices"
        return None

    def _steps(self) -> tuple[Any, ...]:
        """`freeze_priors` replaces some of them."""
        return tuple(chain.from_iterable([program.steps for program in self.programs]))

    def holds(self, state: ModelState, values: tuple[Any, ...]) -> bool:
        if not same(values, self.values):
            if len(values) != len(self.values) or not all(map(_equal, values, self.values)):
                return False
            self.values = values  # equal, but other objects: the next comparison is fast again
        if [parameter.requires_grad for parameter in state.parameters] != self.trained:
            return False
        if not same(tuple(map(type, state.modules)), self.classes) or not same(self._steps(), self.steps):
            return False
        return self.unchanged()

    def unchanged(self) -> bool:
        """Whether containers have the same contents, and tensors among the settings the same addresses."""
        if not all(same(_contents(container), kept) for container, kept in self.containers):
            return False
        return not self.addresses or list(map(Tensor.data_ptr, self.tensors)) == self.addresses


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_inference()


def _equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _SIMPLE) and bool(one == other))


class ModelState:
    """The modules and tensors of a model, and the versions of its settings. `generation` counts other tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.generation = model, -1
        self.lock = threading.RLock()
        """Held while the model has other parameters, and while its state is compared."""
        self._survey()

    def _survey(self) -> None:
        self.generation += 1
        self.modules = list(self.model.modules())
        self.dicts = [vars(module) for module in self.modules]
        self.registries = tuple(chain.from_iterable(map(_registries_of, self.dicts)))
        self.lengths = list(map(len, self.registries))
        self.filled = list(compress(self.registries, self.lengths))
        plain = all(isinstance(each, dict) for each in self.filled)  # those of a ScriptModule are no dicts
        self.values_of: Callable[[Any], Iterable[Any]] = dict.values if plain else _values_of
        self.registered = self._registered()
        tensors = [each for each in self.registered if isinstance(each, Tensor)]
        self.buffers = [each for own in self.dicts for each in own["_buffers"].values() if each is not None]
        self.parameters: list[Tensor] = list(
            {id(each): each for own in self.dicts for each in own["_parameters"].values() if each is not None}.values()
        )
        self.located = [each for each in tensors if _plain(each)]  # others have no memory that could be compared
        self.addresses, self.sizes = self._memory()
        self.first = self._first()
        self.versions: list[Version] = []

    def _first(self) -> tuple[dict[str, Any], str, str] | None:
        """Where the first tensor is: the attributes of its module, the registry, and its name."""
        for kind in ("_parameters", "_buffers"):
            for own in self.dicts:
                for name, tensor in own[kind].items():
                    if tensor is not None:
                        return own, kind, name
        return None

    def device(self) -> torch.device:
        """The device of the first tensor. It may be wrong if modules were replaced since the last `version`."""
        own, kind, name = self.first or ({}, "", "")
        tensor = own.get(kind, {}).get(name)
        return device_of(self.model) if tensor is None else tensor.device

    def _registered(self) -> tuple[Any, ...]:
        """Children, parameters and buffers of all modules."""
        return tuple(chain.from_iterable(map(self.values_of, self.filled)))

    def _memory(self) -> tuple[list[int], list[int]]:
        """Where tensors lie, and how large parameters are: `weight.data = weight.data[:8]` keeps the address."""
        return list(map(Tensor.data_ptr, self.located)), list(map(Tensor.numel, self.parameters))

    def _surveyed(self) -> bool:
        """Whether the model still has these modules and tensors."""
        if not same(tuple(chain.from_iterable(map(_registries_of, self.dicts))), self.registries):
            return False
        if list(map(len, self.registries)) != self.lengths or not same(self._registered(), self.registered):
            return False
        return self._memory() == (self.addresses, self.sizes)

    def version(self) -> Version:
        """The settings of now. If the model has other modules or tensors, `generation` increases first."""
        if not self._surveyed():
            self._survey()
        layout, values = None, None
        for place in range(len(self.versions) - 1, -1, -1):
            version = self.versions[place]
            if version.layout is not layout:
                layout, values = version.layout, version.layout.read(self.dicts)
            if values is not None and version.holds(self, values):
                self.versions.append(self.versions.pop(place))
                return version
        return self._made(layout, values)

    def _made(self, layout: Layout | None, values: tuple[Any, ...] | None) -> Version:
        if layout is None or values is None:
            layout = Layout(self.dicts)
            values = layout.read(self.dicts)
        assert values is not None
        made = Version(self, layout, values)
        if all(tensor.grad_fn is None for tensor in made.tensors):  # otherwise it would keep the graph of a forward
            self.versions.append(made)
            del self.versions[:-VERSIONS]
        return made

    def hooked(self) -> bool:
        """Whether a module has hooks that are not of this library. A replay would not call them."""
        kept = filter(None, chain.from_iterable(map(_hooks_of, self.dicts)))
        return any(not isinstance(hook, _OUR_HOOKS) for hooks in kept for hook in hooks.values())

    def problem(self) -> str | None:
        for module, own in zip(self.modules, self.dicts, strict=True):
            ranks = own.get("_ranks")
            if ranks is not None and getattr(ranks, "choice", None) is not None:
                return "norms join the statistics of several ranks"
            if isinstance(module, nn.SyncBatchNorm) and distributed.is_available() and distributed.is_initialized():
                return "SyncBatchNorm joins the statistics of several ranks"
            for name in own.keys() - _TORCHS_OWN - {"forward"}:
                if callable(own[name]) and callable(getattr(type(module), name, None)):
                    return f"{name!r} of a {type(module).__name__} was replaced"
        return None

    def tensors(self, version: Version) -> list[Tensor]:
        """All tensors that a forward may change: buffers, and tensors among the settings."""
        known = {id(parameter) for parameter in self.parameters}
        found: Iterable[Tensor] = (*self.buffers, *version.tensors)
        return list({id(tensor): tensor for tensor in found if id(tensor) not in known}.values())


def device_of(model: nn.Module) -> torch.device:
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _program(wire: Any) -> Any:
    return getattr(getattr(wire, "relay", None), "program", None)
