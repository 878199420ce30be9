"""Copies of tensors that the backward of compiled code does not read again.

A compiler may compute a value again in the backward instead of storing it, from the inputs of the graph. If the forward
changes such an input, torch 2.10 uses its new value. The compiler does not repeat registered ops, so it stores their
results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm._ops.library import register


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


register("snapshot", "(Tensor[] tensors) -> Tensor[]", _clones, _clones)


def snapshot(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors as they are now. Without a compiler they are not copied."""
    if not torch.compiler.is_compiling():
        return tensors
    return tuple(torch.ops.kalmannorm.snapshot([tensor.detach() for tensor in tensors]))
