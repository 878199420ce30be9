"""The op in C for a norm with a learned transition, with the interface of `triton_learned.py`.

The prior is a product of small matrices, so PyTorch computes it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kalmannorm._ops.native_library import threads_for
from kalmannorm._ops.normalize.native import ROWS, Backward, Forward
from kalmannorm._ops.normalize.native_rows import NativeRows
from kalmannorm._ops.normalize.row_kernels import Memory, Predicted, Transition
from kalmannorm._ops.predict import aten_predict


class NativeLearned(NativeRows):
    """One norm on x of one shape, on a CPU. `inputs` is P, or 0 for a norm without a prior."""

    def __init__(
        self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int, inputs: int
    ) -> None:
        super().__init__(x, size, eps, residual=residual, relu=relu, pitch=pitch)
        G, C = self.groups, self.channels
        self.previous_shape, self.most_noises = (2, G, inputs), C
        self.form, self.step = ((2, G, C), (G * C, C, 1)), G * C
        if inputs:  # every group has a prior of its own
            for which in (2, 3):
                self.shape.strides[which][:] = C, 1

    def _addresses(self, rows: Tensor, given: Transition | None, moments: int) -> tuple[int, ...]:
        weight, bias, mean, var, gain = self._rows(rows)
        if given is not None:
            mean = moments + 4 * self.step * self.bytes
            var = mean + self.step * self.bytes
        return weight, bias, mean, var, gain

    def filter(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, given: Transition | None, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        if given is not None:
            # `.data`: other norms have saved the tensor for their backward, and nobody changes their part of it.
            aten_predict.forward(given, memory.moments.data.as_strided(*self.form, start + 4 * self.step))
        moments = memory.moments.data_ptr() + start * self.bytes
        addresses = self._addresses(rows, given, moments)
        arguments = Forward(
            x.data_ptr(), None if residual is None else residual.data_ptr(), addresses, y.data_ptr(), moments
        )
        self.run(ctypes.byref(self.shape), ctypes.byref(arguments), threads_for(self.elements))
        return y, memory.moments.as_strided(*self.form, start)

    def differentiate(
        self,
        grad_y: Tensor,
        grad_posterior: Tensor,
        x: Tensor,
        y: Tensor | None,
        rows: Tensor,
        given: Transition | None,
        memory: Memory,
        start: int,
        to_matrix: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Predicted]:
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        grad_posterior = grad_posterior.contiguous()
        dx = torch.empty_like(x)
        d_rows = torch.empty((ROWS, self.groups, self.channels), dtype=rows.dtype)
        d_residual = None if y is None or not self.residual else torch.empty_like(x)
        moments, arrived = memory.moments.data_ptr() + start * self.bytes, grad_posterior.data_ptr()
        arguments = Backward(
            grad_y.data_ptr(), x.data_ptr(), None if y is None else y.data_ptr(), moments,
            self._addresses(rows, given, moments), (arrived, arrived + self.step * self.bytes, None, None),
            dx.data_ptr(), None if d_residual is None else d_residual.data_ptr(), d_rows.data_ptr(),
        )  # fmt: skip
        self.run_back(ctypes.byref(self.shape), ctypes.byref(arguments), threads_for(self.elements))
        to_residual = None
        if self.residual:
            to_residual = grad_y if d_residual is None else d_residual
        return dx, d_rows, to_residual, aten_predict.backward(d_rows[2], d_rows[3], given, to_matrix)
