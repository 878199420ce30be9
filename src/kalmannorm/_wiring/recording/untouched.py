"""Runs a model and restores its buffers, attributes, training flags and random state afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MACHINERY = set(vars(nn.Module()))


@contextmanager
def untouched(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the training flag of every module, without calling `train()`, and restore everything afterwards.

    Attributes that the forward assigns get their old values, also inside lists, dicts and sets. Submodules that it adds
    are removed. For a scripted module only the buffers are restored.
    """
    modules = list({id(module): module for module in model.modules()}.values())
    flags = [(module, module.training) for module in modules]
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [(module, dict(module.__dict__)) for module in plain]
    registered = [
        (table, dict(table)) for module in plain for table in (module._parameters, module._buffers, module._modules)
    ]
    containers = list(_containers(plain))
    tensors = {id(t): t for module in modules for t in module._buffers.values() if t is not None}
    values = [(t, t.detach().clone()) for t in tensors.values()]
    devices = {t.device for t in (*model.parameters(), *tensors.values()) if t.device.type == "cuda"}
    numpy = sys.modules.get("numpy")
    states: tuple[Any, Any] = (random.getstate(), None if numpy is None else numpy.random.get_state())
    try:
        with torch.random.fork_rng(devices=sorted({d.index or 0 for d in devices})):
            for module in modules:
                module.training = training
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)
        for table, held in registered:
            _refill(table, held)
        for container, copied in containers:
            _put_back(container, copied)
        for module, flag in flags:
            module.training = flag
        with torch.no_grad():
            for tensor, value in values:
                if not _same(tensor, value):
                    tensor.copy_(value)


def _containers(modules: list[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Lists, dicts and sets in attributes of modules, each with a copy. Not the tables of torch."""
    pending = [value for module in modules for name, value in vars(module).items() if name not in _MACHINERY]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if type(value) in (list, dict, set, tuple) and id(value) not in seen:
            seen.add(id(value))
            if type(value) is not tuple:
                yield value, value.copy()
            pending += value.values() if type(value) is dict else value


def _put_back(container: Any, before: Any) -> None:
    if type(container) is list:
        if len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
            container[:] = before
    elif type(container) is dict:
        if list(container) != list(before) or any(container[key] is not before[key] for key in before):
            _refill(container, before)
    elif container != before:
        _refill(container, before)


def _refill(table: Any, before: Any) -> None:
    table.clear()
    table.update(before)


def _same(tensor: Tensor, value: Tensor) -> bool:
    # Writing an equal value would still increase the version of a tensor that an autograd graph has saved.
    return tensor.is_meta or torch.equal(tensor, value)
