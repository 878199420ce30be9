"""A norm that `torch.compile` traces: one registered op on the rows of its bundle.

The compiler traces this for every norm, so it consists of few operations. What follows from the settings of the norm
is one constant of the trace (`known_of`). The compiled code checks the name of the norm, which contains the settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmannorm._groups import lone_last
from kalmannorm._ops.normalize.registered_rows import normalize_rows
from kalmannorm._support.checks import check_enough_values
from kalmannorm._support.compiling import NORMS, TRACED, current

Known = tuple[str, int, tuple[Any, ...], int, bool, bool, bool, int, int, float, bool, bool, bool]
"""Name of the model, call, key of the block, place among its rows; whether the norm is the first or the last of the
model, and whether its run is noted; channels, m or 0, eps; whether it has no prior, tracks, or has children to apply.
"""


def name_with_settings(norm: Any, number: str) -> str:
    """The name by which compiled code knows a norm. It says everything that `known_of` reads from the norm."""
    settings = (
        norm.training, norm.frozen, norm.closes, norm._pending is None, norm.track_running_stats, norm.eps,
        norm.statistics_batch_size, norm.num_features, norm.covariance, norm.transition is None,
        norm.gain_logit is None, norm.then, norm.input_dims, norm.has_usual_steps(), norm._ranks.choice is None,
    )  # fmt: skip
    return f"{number} {settings}"


def known_of(name: str, device: torch.device, dtype: torch.dtype, dimensions: int) -> Known | None:
    """What a trace has to know of a norm. None: the norm must take the long way."""
    norm = NORMS.find(name.split(" ", 1)[0]) if name else None
    if norm is None:
        return None
    norm.wire.mark_compiled()
    waits = norm.track_running_stats and norm._pending is not None
    usual = norm.takes_short_way() and norm.has_usual_steps() and norm._ranks.choice is None
    if not usual or waits or dimensions not in norm.input_dims:
        return None
    place = norm.wire.place(device, dtype)
    own = norm.num_features, norm.statistics_batch_size or 0, norm.eps
    also = norm.gain_logit is None, norm.track_running_stats, bool(norm.then)
    return None if place is None else (*place, *own, *also)


# `torch.compiler.assume_constant_result` sets the same attribute, but imports the compiler.
known_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def normalize_compiled(norm: Any, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor | None:
    """The result of a norm in compiled code, or None: it must take the long way."""
    known = known_of(norm._compiled_name, x.device, x.dtype, x.ndim)
    if known is None:
        return None
    model, call, key, index, first, last, noted, channels, size, eps, alone, tracks, then = known
    if first:
        norm.wire.relay.begin_compiled(True)
    shape = x.shape
    if shape[1] != channels or 0 in shape or (residual is not None and not _fits(residual, x)):
        return None
    if alone and not _trains_alone(norm, x, size):
        return None
    block = TRACED.blocks.get(key)
    if block is None:
        forward = current(model)
        if forward is None:  # the trace did not begin at the first norm of this model
            return None
        block = forward.fill(key, x)
    examples, rows, moments, shapes = block
    if shape[0] != examples:
        return None
    y, found = normalize_rows(x, rows[index], residual, size, eps, relu)
    if tracks:
        if call in moments:  # the norm runs again
            current(model).track()
        moments[call] = found
        shapes[call] = (size, *shape)
    if noted:
        current(model).note(call)
    if last:
        norm.wire.relay.end_compiled()
    return norm._finish(y, residual is not None or relu) if then else y


def _fits(residual: Tensor, x: Tensor) -> bool:
    """Whether a residual can be added in the op: it has the shape, dtype and device of x."""
    if residual.ndim != x.ndim or residual.dtype != x.dtype or residual.device != x.device:
        return False
    a, b, dimensions = residual.shape, x.shape, x.ndim
    # `a == b`, for which a tracer needs three times as long.
    same = a[0] == b[0] and a[1] == b[1] and a[-1] == b[-1]
    return same and (dimensions < 4 or a[2] == b[2]) and (dimensions < 5 or a[3] == b[3])


def _trains_alone(norm: Any, x: Tensor, size: int) -> bool:
    """Whether a norm without a prior can take this way. Its groups need enough values, and DDP needs all parameters."""
    check_enough_values(x, size, norm)
    more = len(norm._modules) > len(norm.then) or len(norm._parameters) > 2  # than γ and β
    return not lone_last(x, size) and not (more and norm._unused())
