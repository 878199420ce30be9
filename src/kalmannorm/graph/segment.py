"""Which activation-checkpoint segments are running, each in its first forward or being recomputed.

torch tells nobody; what it leaves to find are the saved-tensor hooks of a non-reentrant checkpoint and the functions of
`torch.utils.checkpoint` on the stack. The hooks are looked at first: without them there is nothing to walk for.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils import checkpoint

_FRAME = getattr(checkpoint, "_CheckpointFrame", ())
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_REENTRANT = {
    checkpoint.CheckpointFunction.forward.__code__: False,
    checkpoint.CheckpointFunction.backward.__code__: True,
}


class Segment(NamedTuple):
    """`key` is the same object in a segment's forward and in its recomputation, and lives as long as its graph."""

    key: Any
    recomputed: bool

    def reentrant(self) -> bool:
        return not isinstance(self.key, _FRAME)


def recompute_id() -> int:
    """Which backward this forward runs inside; -1 for none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def segments() -> list[Segment]:
    """The segments that are running, the innermost first; none outside any."""
    if torch.compiler.is_compiling():
        return []
    top = None if _top_hooks is None else _of_hooks(_top_hooks(True))
    if top is None and _top_hooks is not None and torch.is_grad_enabled() and recompute_id() == -1:
        return []
    found = [segment for segment in map(_of_function, _running()) if segment is not None]
    # A checkpoint that is entered by other means than torch's function shows in its hooks alone.
    known = {id(segment.key) for segment in found}
    return found if top is None or id(top.key) in known else [top, *found]


def _of_hooks(hooks: Any) -> Segment | None:
    """Saved-tensor hooks hold a checkpoint's frame: as it is in the first forward, weakly in the recomputation."""
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
    if code in _REENTRANT:
        return Segment(running.f_locals["ctx"], _REENTRANT[code])
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
