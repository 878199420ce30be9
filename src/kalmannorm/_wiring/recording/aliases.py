"""Tensors that share memory: a write into one changes the others."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor


def storage(tensor: Tensor) -> int | None:
    """A key that tensors with shared memory have in common. None for a tensor without a storage of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # sparse, batched or uninitialized tensors, and subclasses that refuse
        return None


def version(tensor: Tensor) -> int | None:
    """How often the tensor was written, directly or through a view."""
    try:
        return tensor._version
    except Exception:  # an inference tensor
        return None


class Aliases:
    """Tensors that are still alive, by their storage."""

    def __init__(self) -> None:
        self._at: dict[int, list[weakref.ref[Tensor]]] = {}

    def add(self, tensor: Tensor) -> None:
        key = storage(tensor)
        if key is not None:
            held = self._at.get(key, [])
            self._at[key] = [ref for ref in held if ref() is not None and ref() is not tensor]
            self._at[key].append(weakref.ref(tensor))

    def of(self, tensor: Tensor) -> list[Tensor]:
        """The other tensors that a write into this one may have changed."""
        key = storage(tensor)
        if key is None:
            return []
        # If a storage is freed during the run, its address may be used again.
        found = [ref() for ref in self._at.get(key, ())]
        return [t for t in found if t is not None and t is not tensor and storage(t) == key and not apart(t, tensor)]


def same_place(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and _place(a) == _place(b)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage certainly have no element in common, such as two chunks of a tensor."""
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
    """First and last index along each axis of the grid that the strides define."""
    rest, box = int(tensor.storage_offset()), []
    for size, stride in zip(sizes, strides, strict=True):
        start, rest = divmod(rest, stride)
        box.append((start, start + size))
    return box if rest == 0 else []


def _unique(box: list[tuple[int, int]], strides: list[int]) -> bool:
    """Whether all grid points inside the box have different memory addresses."""
    reach = 0
    for (_, end), stride in zip(reversed(box), reversed(strides), strict=False):
        if reach >= stride:
            return False
        reach += (end - 1) * stride
    return len(box) == len(strides)
