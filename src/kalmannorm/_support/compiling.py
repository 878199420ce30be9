"""What is traced by `torch.compile` now, and what the compiler must leave alone.

Compiled code checks in every call whatever the trace has read. Torch skips these checks for a module from which only
numbers, strings and tensors were read, as long as its attributes stay the same. So a norm is traced by its name, a
string. The name stands for the norm and for all its settings that matter, and changes with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from kalmannorm._names import Names

NORMS: Names[Any] = Names()
name_of_norm = NORMS.add


class Traced(threading.local):
    """What is traced now in this thread."""

    def __init__(self) -> None:
        self.forward: Any = None  # a `CompiledForward`, see `_running/compiled_way.py`
        self.blocks: dict[Any, Any] = {}  # of this forward: rows of bundles, see `_running/compiled_way.py`
        self.model: str | None = None  # whose whole forward is traced, also after its last norm; parts need no hooks


TRACED = Traced()


def begin_traced(forward: Any) -> None:
    """The first norm of a model runs. None: the trace does not contain the whole forward."""
    TRACED.forward = forward
    TRACED.blocks = {}
    TRACED.model = None if forward is None else forward.model


def current(model: str) -> Any:
    """The traced forward of a model, or None."""
    forward = TRACED.forward
    return None if forward is None or forward.model != model else forward


def end_traced(model: str, *, norms_only: bool = False) -> None:
    """All norms of a model have run, or its whole forward has."""
    if TRACED.forward is not None and TRACED.forward.model == model:
        TRACED.forward = None
        TRACED.blocks = {}
    if not norms_only and TRACED.model == model:
        TRACED.model = None


def in_whole_model() -> bool:
    return TRACED.model is not None


_FRAMES: Any = torch._C._dynamo.eval_frame  # exists without the compiler
set_callback: Callable[[Any], Any] = _FRAMES.set_eval_frame
"""Sets what compiles functions when they are called, in this thread, and returns what did so before. None: nothing."""


def leave_to_python(function: Callable[..., Any]) -> None:
    """The compiler does not compile this function by itself. It traces it inside of a function that it compiles."""
    code = function.__code__
    if hasattr(_FRAMES, "skip_code"):
        _FRAMES.skip_code(code)
    elif hasattr(_FRAMES, "set_code_exec_strategy"):  # later versions of torch
        action = _FRAMES._FrameAction
        _FRAMES.set_code_exec_strategy(code, _FRAMES._FrameExecStrategy(action.SKIP, action.DEFAULT))
