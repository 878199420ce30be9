"""Runs a model and restores its buffers, attributes, training flags and random state afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the training flag of every module, without calling `train()`, and restore everything afterwards.

    Attributes that the forward assigns get their old values, and submodules that it adds are removed. Changes inside a
    list or dict are not undone. For a scripted module only the buffers are restored.
    """
    modules = list({id(module): module for module in model.modules()}.values())
    flags = [(module, module.training) for module in modules]
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [(module, dict(module.__dict__)) for module in plain]
    registered = [
        (table, dict(table)) for module in plain for table in (module._parameters, module._buffers, module._modules)
    ]
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
        for module, flag in flags:
            module.training = flag
        with torch.no_grad():
            for tensor, value in values:
                if not _same(tensor, value):
                    tensor.copy_(value)


def _refill(table: Any, before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)


def _same(tensor: Tensor, value: Tensor) -> bool:
    # Writing an equal value would still increase the version of a tensor that an autograd graph has saved.
    return tensor.is_meta or torch.equal(tensor, value)
