"""The op in PyTorch operations for a norm on the short way, with the interface of `row_kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm._groups import group_count, group_size
from kalmannorm._ops.normalize import aten
from kalmannorm._ops.normalize.arguments import Inputs, Results
from kalmannorm._ops.normalize.row_kernels import Memory


class AtenRows:
    """One norm on x of one shape, on a CPU. The output is kept for the mask of a ReLU."""

    masked = False

    def __init__(self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int) -> None:
        self.size, self.eps, self.residual, self.relu, self.keeps_output = size, eps, residual, relu, relu
        self.channels = x.shape[1]
        self.groups = group_count(x.shape[0], group_size(x.shape[0], size))
        self.values = x.numel() // self.channels
        self.strides = x.stride()

    def forward(self, x: Tensor, rows: Tensor, residual: Tensor | None, memory: Memory, start: int) -> Tensor:
        weight, bias, mean, var, gain = rows.unbind(0)
        inputs = Inputs(x, mean, var, gain, weight, bias, self.size, self.eps, residual, self.keeps_output)
        y, *moments = aten.forward(inputs)
        assert y is not None
        step = self.groups * self.channels
        # `.data`: other norms have saved the tensor for their backward, and nobody changes their part of it.
        own = memory.moments.data[start : start + 4 * step].view(4, self.groups, self.channels)
        torch.stack(moments, out=own)  # type: ignore[arg-type]
        return y

    def backward(
        self, grad_y: Tensor, x: Tensor, y: Tensor | None, rows: Tensor, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        if y is not None:
            grad_y = torch.ops.aten.threshold_backward(grad_y, y, 0)
        weight, _, mean, var, gain = rows.unbind(0)
        inputs = Inputs(x, mean, var, gain, weight, None, self.size, self.eps, None, False)
        kept = Results(None, *self.moments(memory.moments, start))
        grads = Results(grad_y, None, None, None, None)
        dx, d_mean, d_var, d_gain, d_weight, d_bias = aten.backward(grads, inputs, kept, self.groups)
        d_rows = torch.stack([d_weight, d_bias, d_mean, d_var, d_gain])
        return dx, d_rows, grad_y if self.residual else None

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]:
        step = self.groups * self.channels
        return moments[start : start + 4 * step].view(4, self.groups, self.channels).unbind(0)
