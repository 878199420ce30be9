"""The registered ops `kalmannorm::settled` and `kalmannorm::settled_backward`: norms that use running statistics.

They are called by an autograd function (`_norms/settled.py`), so they have no derivatives of their own. A compiler or a
tracer sees one node for each. Without one the functions here are called, because torch's dispatcher costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kalmannorm._ops.dispatch import on_device_of, settled_kernels_for
from kalmannorm._ops.library import ANY_LAYOUT, register
from kalmannorm._ops.normalize import aten_settled
from kalmannorm._ops.normalize.arguments import (
    SETTLED_BACKWARD,
    SETTLED_FORWARD,
    SettledGrads,
    SettledInputs,
    SettledResults,
)
from kalmannorm._ops.normalize.registered import dense, memory_format_of, watched

Given = TypeVar("Given", SettledInputs, SettledGrads)


def _dense(given: Given) -> Given:
    """Compiled code may give x another layout than it had when it was traced."""
    return given._replace(x=dense(given.x))


def _forward(*given: Any) -> list[Tensor]:
    inputs = _dense(SettledInputs(*given))
    x = inputs.x
    if inputs.residual is not None:
        inputs = inputs._replace(residual=inputs.residual.contiguous(memory_format=memory_format_of(x)))
    with on_device_of(x):
        return list(settled_kernels_for(x, inputs.statistics_batch_size).forward(inputs))


def _backward(*flat: Any) -> list[Tensor]:
    given = _dense(SettledGrads(*flat))
    x, y = given.x, given.y
    layout = memory_format_of(x)
    y = None if y is None else y.contiguous(memory_format=layout)
    given = given._replace(grad_y=given.grad_y.contiguous(memory_format=layout), y=y)
    with on_device_of(x):
        gradients: list[Tensor] = settled_kernels_for(x, given.statistics_batch_size).backward(given)
    return gradients


def _fake_forward(*given: Any) -> list[Tensor]:
    return list(aten_settled.forward_fake(_dense(SettledInputs(*given))))


def _fake_backward(*given: Any) -> list[Tensor]:
    return aten_settled.backward_fake(_dense(SettledGrads(*given)))


register("settled", SETTLED_FORWARD, _forward, _fake_forward, ANY_LAYOUT)
register("settled_backward", SETTLED_BACKWARD, _backward, _fake_backward, ANY_LAYOUT)


def forward(inputs: SettledInputs) -> SettledResults:
    """As `aten_settled.forward`."""
    run = torch.ops.kalmannorm.settled if watched(inputs.x) else _forward
    results: Sequence[Tensor] = run(*inputs)
    return SettledResults(*results)


def backward(given: SettledGrads) -> list[Tensor]:
    """As `aten_settled.backward`."""
    run = torch.ops.kalmannorm.settled_backward if watched(given.x) else _backward
    gradients: list[Tensor] = run(*given)
    return gradients
