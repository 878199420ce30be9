"""Which activation-checkpoint segment is running, in its first forward or when it is recomputed."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

_FRAME = getattr(checkpoint, "_CheckpointFrame", ())
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_REENTRANT = {checkpoint.CheckpointFunction.forward.__code__, checkpoint.CheckpointFunction.backward.__code__}


def recompute_id() -> int:
    """Which backward this forward runs inside; -1 for none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def segment() -> Any:
    """An object that is the same in a segment's forward and in its recomputation, or None outside any segment."""
    if torch.compiler.is_compiling():
        return None
    found = _non_reentrant()
    if found is None and (not torch.is_grad_enabled() or recompute_id() != -1):
        return _reentrant()
    return found


def reentrant(found: Any) -> bool:
    return not isinstance(found, _FRAME)


def _non_reentrant() -> Any:
    """The frame object of a non-reentrant checkpoint, which its saved-tensor hooks hold."""
    if _top_hooks is None:
        return _from_stack()
    hooks = _top_hooks(True)
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if isinstance(held, _FRAME):
            return held
    return None


def _from_stack() -> Any:
    """The same for torch before 2.7, which does not tell the hooks: from the functions that are running."""
    for frame in _running():
        if frame.f_code.co_filename == checkpoint.__file__:
            found = frame.f_locals.get("frame")
            if frame.f_code.co_name == "checkpoint" and frame.f_locals.get("gen") is not None:
                found = frame.f_locals["gen"].gi_frame.f_locals.get("new_frame")
            if isinstance(found, _FRAME):
                return found
    return None


def _reentrant() -> Any:
    """The autograd context of a re-entrant checkpoint, found on the stack: torch hands it to nobody else."""
    return next((frame.f_locals["ctx"] for frame in _running() if frame.f_code in _REENTRANT), None)


def _running() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
