"""Copies of models that hold tensors with an autograd graph, which `copy.deepcopy` refuses.

A model may keep a tensor of its last forward, as MONAI's DynUNet does. Pruning and `weight_norm` store a computed
weight, which a hook computes again before every forward. Such a tensor is detached in the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

Detached = dict[int, tuple[Tensor, str]]
"""Tensors that were detached in a copy, by their identity, each with its name."""


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, with detached copies of tensors that have a graph."""
    return copied_with(model)[0]


def copied_with(model: nn.Module) -> tuple[nn.Module, Detached]:
    """A deep copy, and the tensors in it that were detached."""
    memo: dict[int, Any] = {}
    detached: Detached = {}
    for name, tensor in _with_graph(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = fresh = tensor.detach().clone()
            detached[id(fresh)] = fresh, name
    return copy.deepcopy(model, memo), detached


def _with_graph(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors with a graph in the attributes of all modules, also inside lists, tuples, dicts and sets."""
    for prefix, module in model.named_modules():
        pending = [(f"{prefix}.{name}".lstrip("."), value) for name, value in vars(module).items()]
        seen: set[int] = set()
        while pending:
            name, value = pending.pop()
            if isinstance(value, Tensor):
                if not value.is_leaf:
                    yield name, value
            elif isinstance(value, (list, tuple, dict, set)) and id(value) not in seen:
                seen.add(id(value))
                pending += [(name, part) for part in (value.values() if isinstance(value, dict) else value)]
