"""The filter of one convolution in few PyTorch operations, for any device and for every kind of differentiation.

A standardized filter is a layer norm of each output channel. So it takes one operation in each direction. The layer
norm of a scaled filter has a constant weight, which is as small as one output channel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kalmannorm._ops.filters import definition
from kalmannorm._ops.filters.definition import EPS, Computation


def computed(weight: Tensor, computation: Computation) -> Tensor:
    """The filter. It has the dtype, the shape and the memory format of the weight."""
    if computation == "centred":
        return definition.centred(weight)
    by_definition = definition.standardized if computation == "standardized" else definition.scaled
    rounded = computation == "scaled" and weight.dtype in (torch.bfloat16, torch.float16)  # the constant would be
    if rounded or not weight.is_floating_point() or _sizes_are_traced() or weight.numel() == 0:
        return by_definition(weight)
    # A dimension of size 1 may have any stride. The filter gets the strides of the weight, by which torch chooses.
    taps = math.prod(weight.shape[2:])
    if weight.is_contiguous() and weight.stride(1) == taps and weight.stride(-1) == 1:
        return _layer_norm(weight, computation)
    last = weight.movedim(1, -1)  # channels_last
    if last.is_contiguous():
        return _layer_norm(last, computation).movedim(-1, 1)
    return by_definition(weight)


def _layer_norm(weight: Tensor, computation: Computation) -> Tensor:
    inputs = weight.shape[1:]
    if computation == "standardized":
        return F.layer_norm(weight, inputs, eps=EPS)
    return F.layer_norm(weight, inputs, weight.new_full(inputs, math.prod(inputs) ** -0.5), eps=EPS)


def _sizes_are_traced() -> bool:
    """`torch.jit.trace` makes tensors of sizes, with which nothing can be decided."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None
