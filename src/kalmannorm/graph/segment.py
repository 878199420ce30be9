"""Which activation-checkpoint segment is running, in its first forward or when it is recomputed."""

from __future__ import annotations

import sys
import weakref
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
    """The frame that the saved-tensor hooks of a non-reentrant checkpoint belong to."""
    hooks = None if _top_hooks is None else _top_hooks(True)
    for cell in () if hooks is None else (getattr(hooks[0], "__closure__", None) or ()):
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if isinstance(held, _FRAME):
            return held
    return None


def _reentrant() -> Any:
    """The autograd context of a re-entrant checkpoint, found on the stack: torch hands it to nobody else."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]
    return None
