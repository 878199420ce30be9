"""Find the activation-checkpoint segments that are running, in their first forward or in a recomputation.

torch has no API for this. Two traces can be found: the saved-tensor hooks of a non-reentrant checkpoint, and functions
of `torch.utils.checkpoint` on the stack. The hooks are checked first, because this usually saves the walk up the stack.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

_FRAME = getattr(checkpoint, "_CheckpointFrame", ())
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
# By identity: code that `torch.compile` generates may have constants without a hash, and then has none itself.
_REENTRANT = {
    id(checkpoint.CheckpointFunction.forward.__code__): False,
    id(checkpoint.CheckpointFunction.backward.__code__): True,
}


class Segment(NamedTuple):
    """`key` is the same object in a segment's forward and in its recomputation. It lives as long as the graph."""

    key: Any
    recomputed: bool

    def reentrant(self) -> bool:
        return not isinstance(self.key, _FRAME)

    def region(self) -> Any:
        """What stands for the segment where a tensor notes it. It does not hold the segment.

        A segment holds its inputs, in C++, where Python's garbage collector does not look. An input that held the
        segment would never be freed.
        """
        found = getattr(self.key, "_kalmannorm_region", None)
        if found is None:
            found = self.key._kalmannorm_region = _Region()
        return found


def saved_tensors_hooked() -> bool:
    """Whether hooks on saved tensors are active, as in an activation checkpoint."""
    return _top_hooks is None or _top_hooks(True) is not None


def saving() -> Any:
    """What stands for the active hooks on saved tensors: the same object as long as they are active. None: no hooks."""
    if _top_hooks is None:
        return object()  # unknown
    hooks = _top_hooks(True)
    return None if hooks is None else hooks[0]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def unseen() -> AbstractContextManager[Any]:
    """A context in which an activation checkpoint does not see what is saved.

    Use it for what its recomputation does not compute again.
    """
    return saved_tensors_hooks(_same, _same) if saved_tensors_hooked() else nullcontext()


def recompute_id() -> int:
    """The number of the backward inside which this forward runs, or -1 if there is none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def segments() -> list[Segment]:
    """The segments that are running, innermost first. The list is empty outside all segments."""
    if torch.compiler.is_compiling():
        return []
    top = None if _top_hooks is None else _of_hooks(_top_hooks(True))
    if top is None and _top_hooks is not None and torch.is_grad_enabled() and recompute_id() == -1:
        return []
    found = [segment for segment in map(_of_function, _running()) if segment is not None]
    # If a checkpoint was not entered through torch's function, only its hooks show it.
    known = {id(segment.key) for segment in found}
    return found if top is None or id(top.key) in known else [top, *found]


class _Region:
    """The same object in a segment's forward and in its recomputation."""


OUTSIDE = _Region()


def region() -> Any:
    """Stands for the innermost segment whose saved-tensor hooks are active: `Segment.region`, or OUTSIDE.

    A checkpoint counts the tensors that its segment saves. So only tensors of the same region may decide what is saved.
    """
    if not saved_tensors_hooked():
        return OUTSIDE
    running = segments()
    return running[0].region() if running else OUTSIDE


@dataclass
class _Seen:
    """The values that one owner's forwards read in a segment, in order. `again` counts reads in the recomputation."""

    readings: list[tuple[Tensor, ...]] = field(default_factory=list)
    recomputation: int = -1
    again: int = 0


def first_seen(owner: object, read: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return `read()`. In a recomputation, return the result of `read()` in the first forward instead.

    Use it for tensors that a forward of `owner` both reads and changes. The recomputation must see the old values.
    """
    return _first_seen(owner, read, segments())


def _first_seen(owner: object, read: Callable[[], tuple[Tensor, ...]], running: list[Segment]) -> tuple[Tensor, ...]:
    if not running:
        return read()
    key = running[0].key
    if not hasattr(key, "_kalmannorm_seen"):
        key._kalmannorm_seen = {}
    seen: _Seen = key._kalmannorm_seen.setdefault(owner, _Seen())
    if not running[0].recomputed:
        # If an outer segment is being recomputed, this inner one is new, and takes the values stored by the outer one.
        seen.readings.append(tuple(tensor.clone() for tensor in _first_seen(owner, read, running[1:])))
        return seen.readings[-1]
    if seen.recomputation != recompute_id():
        seen.recomputation, seen.again = recompute_id(), 0
    seen.again += 1
    return seen.readings[seen.again - 1] if seen.again <= len(seen.readings) else read()


def noted(owner: object) -> bool:
    """Whether this forward may call `first_seen`. False in a recomputation, if its first forward did not call it."""
    for segment in segments():
        if segment.recomputed:
            seen: _Seen = getattr(segment.key, "_kalmannorm_seen", {}).get(owner, _Seen())
            again = seen.again if seen.recomputation == recompute_id() else 0
            return again < len(seen.readings)
    return True


def _of_hooks(hooks: Any) -> Segment | None:
    """The segment of saved-tensor hooks. They hold its frame directly in the first forward, and by a weak reference
    in the recomputation."""
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        recomputed = isinstance(held, weakref.ref)
        held = held() if recomputed else held
        if isinstance(held, _FRAME):
            return Segment(held, recomputed)
    return None


def _of_function(running: FrameType) -> Segment | None:
    code = running.f_code
    if id(code) in _REENTRANT:
        return Segment(running.f_locals["ctx"], _REENTRANT[id(code)])
    if code.co_filename != checkpoint.__file__:
        return None
    if code.co_name == "unpack_hook" and isinstance(running.f_locals.get("frame"), _FRAME):
        return Segment(running.f_locals["frame"], True)
    generator = running.f_locals.get("gen") if code.co_name == "checkpoint" else None
    if generator is not None and generator.gi_frame is not None:
        held = generator.gi_frame.f_locals.get("new_frame")
        return Segment(held, False) if isinstance(held, _FRAME) else None
    return None


def _running() -> list[FrameType]:
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
