"""Convolutions and linear layers of a bundle in C: see `native.c`. The functions are those of `aten_layers.py`.

The weight is read once in each direction, in the layout that it has.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from kalmannorm._ops.native_library import library, threads_for, usable


class CLayer(ctypes.Structure):
    """A layer as the kernels read it."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("outputs", "channels", "taps", "last", "kinds")),
        *((name, ctypes.c_void_p) for name in ("inside", "of_kinds", "of_taps")),
    ]

    @classmethod
    def of(cls, weight: Tensor, last: bool, seen: Geometry) -> CLayer:
        """`weight` has no gaps. `last`: its layout is channels_last. The caller keeps the tensors of `seen`."""
        inside, of_kinds, of_taps = seen
        taps = of_taps.numel()
        channels = weight.numel() // (weight.shape[0] * taps)
        places = inside.data_ptr(), of_kinds.data_ptr(), of_taps.data_ptr()
        return cls(weight.shape[0], channels, taps, last or taps == 1, of_kinds.numel(), *places)


LARGE = 2**15
"""Weights. The memory of larger gradients is used again: the system would clear it anew in every step."""
Room = dict[int, Tensor]
"""Memory for gradients of weights, by the position of the weight in its bundle."""
Geometry = tuple[Tensor, Tensor, Tensor]
"""Which taps are inside for each kind of position (kinds, taps), the shares of kinds, and the shares of taps."""


def fits(weight: Tensor) -> bool:
    """Whether the kernels can read the weight of a layer. It is dense, with as many outputs as its first dimension."""
    return usable(weight) and weight.numel() > 0


def laid_out(weight: Tensor) -> tuple[Tensor, bool]:
    """The weight without gaps, and whether its layout is channels_last."""
    if not weight.is_contiguous():
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if weight.dim() in formats and weight.is_contiguous(memory_format=formats[weight.dim()]):
            return weight, True
        weight = weight.contiguous()
    return weight, False


def _rows(pair: Tensor) -> tuple[int, int]:
    """The addresses of means and variances, (2, C). Channels are adjacent."""
    start = pair.data_ptr()
    return start, start + pair.stride(0) * pair.element_size()


def forward(given: Tensor, weight: Tensor, seen: Geometry, out: Tensor) -> Tensor | None:
    """As `aten_layers.forward`."""
    weight, last = laid_out(weight)
    layer, kinds = CLayer.of(weight, last, seen), seen[1].numel()
    away = weight.new_empty((weight.shape[0], kinds)) if kinds > 1 else None
    _call(
        "layer_forward", weight, ctypes.byref(layer), weight.data_ptr(), *_rows(given), *_rows(out),
        None if away is None else away.data_ptr(),
    )  # fmt: skip
    return away


def backward(
    grad: Tensor,
    given: Tensor,
    weight: Tensor,
    away: Tensor | None,
    seen: Geometry,
    asked: bool,
    room: Room,
    place: int,
) -> tuple[Tensor, Tensor | None]:
    """As `aten_layers.backward`. The gradient of the weight may be memory that `room` keeps for later steps."""
    weight, last = laid_out(weight)
    layer = CLayer.of(weight, last, seen)
    moments = grad.new_empty((2, layer.channels))
    d_weight = gradient_like(weight, room, place) if asked else None
    _call(
        "layer_backward", weight, ctypes.byref(layer), weight.data_ptr(), *_rows(given), *_rows(grad),
        None if away is None else away.data_ptr(), *_rows(moments), None if d_weight is None else d_weight.data_ptr(),
    )  # fmt: skip
    return moments, d_weight


def gradient_like(weight: Tensor, room: Room, place: int) -> Tensor:
    """Memory for the gradient of a weight: that of an earlier step, if nobody has kept it."""
    if weight.numel() < LARGE or _users is None:
        return torch.empty_like(weight)
    kept = room.pop(place, None)  # another thread then makes its own
    if kept is None or kept.stride() != weight.stride() or kept.shape != weight.shape or kept.dtype != weight.dtype:
        kept = torch.empty_like(weight)
    elif _used(kept):
        kept = torch.empty_like(weight)  # autograd gave it away as `.grad`
    given = kept.data  # not a view for autograd, which refuses to detach views in place
    room[place] = kept  # after `given` exists: another thread sees that the memory is used
    return given


def _used(kept: Tensor) -> bool:
    """Whether anyone else has the memory of a tensor, or has freed it."""
    if _references(kept) > REFERENCES or _users(kept.untyped_storage()._cdata) > ALONE:
        return True
    storage = kept.untyped_storage()
    # Another process may have it. `resize_` frees it.
    return storage.is_shared() or storage.nbytes() != kept.nbytes


def _references(kept: Tensor) -> int:
    """References to the storage of a tensor. Everyone who has the storage in Python has the same object."""
    return sys.getrefcount(kept.untyped_storage())


_users: Any = getattr(torch._C, "_storage_Use_Count", None)
ALONE = 2
"""The tensor, and the storage object that asks."""
REFERENCES = _references(torch.empty(1, device="cpu"))
"""If nobody else has it. Versions of torch differ."""


def _call(name: str, weight: Tensor, *given: object) -> None:
    found = library(weight.dtype)
    assert found is not None, "see `fits`"
    if getattr(found, name)(*given, threads_for(weight.numel())) != 0:
        raise MemoryError(f"kalmannorm: no memory for the prior of a layer with {weight.numel()} weights")
