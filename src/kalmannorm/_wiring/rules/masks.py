"""Masks: tensors of true and false. Padded positions of sequences are the usual case.

A mask over positions says which positions exist. The share of positions that exist differs from batch to batch, and the
constant at the others carries no information about the channels. So the belief about a masked tensor is the belief
about the values that are not masked. A mask that differs between channels has no such rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm._wiring.recording.trace import Op, Trace, Value
from kalmannorm._wiring.rules import names

_SAME = names.SAME | {"bitwise_not", "logical_not", "invert", "bool", "int", "long"}
_REPEATS = {"expand", "expand_as", "repeat", "broadcast_to"}


def _before(trace: Trace, value: Value) -> tuple[Op, Value] | None:
    op = None if value.op is None else trace.ops[value.op]
    return None if op is None or not op.inputs else (op, trace.values[op.inputs[0]])


def differs(trace: Trace, value: Value) -> list[bool]:
    """Whether a tensor may differ along each of its axes. A tensor that was expanded does not, along the new size."""
    found = [size > 1 for size in value.shape]
    step = _before(trace, value)
    if step is not None and (step[0].name in _REPEATS or (step[0].name in _SAME and step[1].shape == value.shape)):
        inner = differs(trace, step[1])
        inner = [False] * (len(found) - len(inner)) + inner
        return [a and b for a, b in zip(found, inner, strict=True)]
    return found


def over_positions(trace: Trace, value: Value, labels: Tensor, *, leading: bool = False) -> bool:
    """Whether a mask differs only along axes along which the labels of the masked tensor do not.

    A mask broadcasts from its last axis, as usual. With `leading`, as an index, it counts from the first axis.
    """
    along, rest = differs(trace, value), [False] * (labels.dim() - len(value.shape))
    along = along + rest if leading else rest + along
    return len(along) == labels.dim() and not any(
        own and size > 1 for own, size in zip(along, labels.shape, strict=True)
    )


def is_mask(trace: Trace, value: Value) -> bool:
    """Whether a tensor is made of true and false, perhaps as the numbers 1 and 0."""
    while value.dtype != torch.bool:
        step = _before(trace, value)
        if step is None or step[0].name not in names.SAME | names.REARRANGEMENTS or len(step[0].inputs) > 1:
            return False
        value = step[1]
    return True
