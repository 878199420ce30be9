"""How a norm that `torch.compile` traces finds the traced forward of its model.

Compiled code checks in every call whatever the trace has read. Torch skips these checks for a module from which only
numbers, strings and tensors were read, as long as its attributes stay the same. So a norm is traced by its name, a
string, and not by its wire. It gets a new name when its wire or its process group changes.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from kalmannorm._names import Names

NORMS: Names[Any] = Names()
name_of_norm = NORMS.add

Site = tuple[str, int, bool, bool]
"""The model's name, the norm's only call, and whether it is the first or the last of the model."""


class Traced(threading.local):
    """What is traced now in this thread."""

    def __init__(self) -> None:
        self.forward: Any = None  # a `CompiledForward`, see `_running/compiled_way.py`
        self.model: str | None = None  # whose whole forward is traced, also after its last norm; parts need no hooks


TRACED = Traced()


def begin_traced(forward: Any) -> None:
    """The first norm of a model runs. None: the trace does not contain the whole forward."""
    TRACED.forward = forward
    TRACED.model = None if forward is None else forward.model


def current(model: str) -> Any:
    """The traced forward of a model, or None."""
    forward = TRACED.forward
    return None if forward is None or forward.model != model else forward


def end_traced(model: str, *, norms_only: bool = False) -> None:
    """All norms of a model have run, or its whole forward has."""
    if TRACED.forward is not None and TRACED.forward.model == model:
        TRACED.forward = None
    if not norms_only and TRACED.model == model:
        TRACED.model = None


def in_whole_model() -> bool:
    return TRACED.model is not None


def site_of(name: str) -> Site | None:
    """A constant of compiled code. None: the norm has to take the long way."""
    norm = NORMS.find(name)
    if norm.wire is not None:
        norm.wire.mark_compiled()
    site: Site | None = None if norm.wire is None or norm._ranks.choice is not None else norm.wire.site()
    return site


# `torch.compiler.assume_constant_result` sets the same attribute, but imports the compiler.
site_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def normalize_compiled(norm: Any, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor | None:
    """The result of a norm in compiled code, or None: it must take the long way."""
    site = site_of(norm._compiled_name)
    if site is None:
        return None
    model, call, first, last = site
    if first:
        norm.wire.relay.begin_compiled(True)
    forward = current(model)
    if forward is None:  # the trace did not begin at the first norm of this model
        return None
    y: Tensor | None = forward.normalize(call, norm, x, residual, relu)
    if y is not None:
        forward.ran[call] = len(forward.ran)
    if y is not None and last:
        forward.relay.end_compiled()
    return y
