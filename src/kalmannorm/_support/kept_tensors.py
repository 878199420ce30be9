"""Counts the tensors that autograd keeps for the backward of a forward: their memory is most of a training step's peak.

Tensors that share memory count once. Parameters and other tensors that exist anyway can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class Kept:
    """One piece of memory. `tensor` is the first tensor in it that was saved."""

    tensor: Tensor
    bytes: int


def kept_tensors(forward: Callable[[], Any], without: Iterable[Tensor] = ()) -> tuple[Any, list[Kept]]:
    """The result of `forward`, and the memory that its backward keeps, as long as the result lives."""
    found: dict[int, Kept] = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in without}

    def pack(tensor: Tensor) -> Tensor:
        saved = tensor.detach()  # an operation may save its own result, which would then keep the operation
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.nbytes():
            found.setdefault(storage.data_ptr(), Kept(saved, storage.nbytes()))
        return saved

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, list(found.values())
