"""Tensors that share memory: a write through one changes what the others hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor


def storage(tensor: Tensor) -> int | None:
    """What tensors that share memory have in common; None for those without a storage of their own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # sparse, batched or uninitialized tensors, and what subclasses refuse
        return None


def version(tensor: Tensor) -> int | None:
    """How often it was written, by itself or a view."""
    try:
        return tensor._version
    except Exception:  # an inference tensor
        return None


class Aliases:
    """Live tensors by their storage."""

    def __init__(self) -> None:
        self._at: dict[int, list[weakref.ref[Tensor]]] = {}

    def add(self, tensor: Tensor) -> None:
        key = storage(tensor)
        if key is not None:
            held = self._at.get(key, [])
            self._at[key] = [ref for ref in held if ref() is not None and ref() is not tensor]
            self._at[key].append(weakref.ref(tensor))

    def of(self, tensor: Tensor) -> list[Tensor]:
        """The others that a write into this one may have changed."""
        key = storage(tensor)
        if key is None:
            return []
        # Storages freed in the run lend their address to others.
        found = [ref() for ref in self._at.get(key, ())]
        return [t for t in found if t is not None and t is not tensor and storage(t) == key and not apart(t, tensor)]


def same_place(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and _place(a) == _place(b)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage surely have no element in common, as chunks of a tensor have none."""
    if a.numel() == 0 or b.numel() == 0:
        return True
    if a.dtype != b.dtype or a.stride() != b.stride():
        return False
    steps = a.stride()
    axes = sorted(range(a.dim()), key=lambda axis: -steps[axis])
    strides = [steps[axis] for axis in axes]
    if 0 in strides:
        return False
    boxes = [_box(t, [t.shape[axis] for axis in axes], strides) for t in (a, b)]
    if not all(_unique(box, strides) for box in boxes):
        return False
    return any(first[1] <= second[0] or second[1] <= first[0] for first, second in zip(*boxes, strict=True))


def _box(tensor: Tensor, sizes: Iterable[int], strides: list[int]) -> list[tuple[int, int]]:
    """Where it begins and ends along every axis of the grid that the strides span."""
    rest, box = int(tensor.storage_offset()), []
    for size, stride in zip(sizes, strides, strict=True):
        start, rest = divmod(rest, stride)
        box.append((start, start + size))
    return box if rest == 0 else []


def _unique(box: list[tuple[int, int]], strides: list[int]) -> bool:
    """Whether no two places of the grid, as far as the box reaches, are the same in memory."""
    reach = 0
    for (_, end), stride in zip(reversed(box), reversed(strides), strict=False):
        if reach >= stride:
            return False
        reach += (end - 1) * stride
    return len(box) == len(strides)
