"""What of a model a graph depends on: its modules, the addresses of its tensors, and its settings.

A graph contains addresses and the numbers that Python computed while it was captured. So a graph serves only the
modules, tensors and settings that it was captured with. They are compared in every call, mostly by identity.

Settings are all attributes of all modules, other than tensors that torch registers: flags of training, momentum, eps,
frozen statistics and so on. A model that switches between training and evaluation has two versions of its settings.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, distributed, nn

from kalmannorm._ops.track.averages import Pending
from kalmannorm._running.relay import Begin, End

VERSIONS = 16
"""Versions of the settings that are known at a time, the most recently used."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCHS_OWN = frozenset(vars(nn.Module()))
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, dict, set)
_numbers = count()


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether both have the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _contents(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Pending):
        yield from (value.values, *value.rows())
    elif depth and isinstance(value, (tuple, *_CONTAINERS)):
        for each in _contents(value):
            yield from _tensors_in(each, depth - 1)


class Version:
    """Settings, and the tensors among them. `problem`: why a graph cannot serve, None if it can."""

    def __init__(self, state: ModelState, keys: list[Any], values: list[Any]) -> None:
        self.number, self.keys, self.values = next(_numbers), keys, values
        self.trained = [parameter.requires_grad for parameter in state.parameters]
        self.containers, self.tensors = list[tuple[Any, list[Any]]](), list[Tensor]()
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

    def holds(self, state: ModelState, keys: list[Any], values: list[Any]) -> bool:
        if not same(keys, self.keys):
            return False
        if not same(values, self.values):
            if len(values) != len(self.values) or not all(map(_equal, values, self.values)):
                return False
            self.values = values  # equal, but other objects: the next comparison is fast again
        if [parameter.requires_grad for parameter in state.parameters] != self.trained:
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


def _registered(dicts: list[dict[str, Any]], kind: str) -> list[Any]:
    return [value for own in dicts for value in own[kind].values() if value is not None]


class ModelState:
    """The modules and tensors of a model, and the versions of its settings. `generation` counts other tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.generation = model, -1
        self._survey()

    def _survey(self) -> None:
        self.generation += 1
        self.modules = list(self.model.modules())
        self.dicts = [vars(module) for module in self.modules]
        self.children = _registered(self.dicts, "_modules")
        self.all_parameters, self.buffers = _registered(self.dicts, "_parameters"), _registered(self.dicts, "_buffers")
        self.parameters: list[Tensor] = list({id(each): each for each in self.all_parameters}.values())
        self.addresses = self._addresses()
        self.hooks = [own[kind] for own in self.dicts for kind in _HOOKS]
        self.versions: list[Version] = []

    def _addresses(self) -> list[int]:
        """0 for tensors without memory."""
        return [_address(tensor) for tensor in (*self.all_parameters, *self.buffers)]

    def _surveyed(self) -> bool:
        """Whether the model still has these modules and tensors."""
        dicts = self.dicts
        return (
            same(_registered(dicts, "_modules"), self.children)
            and same(_registered(dicts, "_parameters"), self.all_parameters)
            and same(_registered(dicts, "_buffers"), self.buffers)
            and self._addresses() == self.addresses
        )

    def version(self) -> Version:
        """The settings of now. If the model has other modules or tensors, `generation` increases first."""
        if not self._surveyed():
            self._survey()
        keys, values = self._settings()
        for place in range(len(self.versions) - 1, -1, -1):
            if self.versions[place].holds(self, keys, values):
                self.versions.append(self.versions.pop(place))
                return self.versions[-1]
        made = Version(self, keys, values)
        if all(tensor.grad_fn is None for tensor in made.tensors):  # otherwise it would keep the graph of a forward
            self.versions.append(made)
            del self.versions[:-VERSIONS]
        return made

    def _settings(self) -> tuple[list[Any], list[Any]]:
        keys, values = list[Any](), list[Any]()
        for own in self.dicts:
            keys += own
            values += own.values()
        values += map(type, self.modules)
        wires = (own.get("wire") for own in self.dicts)
        programs = {id(program): program for wire in wires if (program := _program(wire)) is not None}
        for program in programs.values():
            values += program.steps  # `freeze_priors` replaces some
        return keys, values

    def hooked(self) -> bool:
        """Whether a module has hooks that are not of this library. A replay would not call them."""
        return any(not isinstance(hook, (Begin, End)) for hooks in filter(None, self.hooks) for hook in hooks.values())

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


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def _program(wire: Any) -> Any:
    return getattr(getattr(wire, "relay", None), "program", None)
