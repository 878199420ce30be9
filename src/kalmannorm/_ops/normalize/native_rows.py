"""The op in C for a norm on the short way, with the interface of `row_kernels.py`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kalmannorm._groups import group_count, group_size
from kalmannorm._ops.native_library import library, threads_for
from kalmannorm._ops.normalize.native import ROWS, Backward, Forward, shape_of
from kalmannorm._ops.normalize.row_kernels import Memory


class NativeRows:
    """One norm on x of one shape, on a CPU. The output is kept for the mask of a ReLU."""

    masked = False

    def __init__(self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int) -> None:
        self.size, self.eps, self.residual, self.relu, self.keeps_output = size, eps, residual, relu, relu
        self.channels = x.shape[1]
        self.groups = group_count(x.shape[0], group_size(x.shape[0], size))
        self.values, self.elements = x.numel() // self.channels, x.numel()
        self.strides, self.bytes = x.stride(), x.element_size()
        self.shape = shape_of(x, size, eps, relu)
        for strides in self.shape.strides:  # all groups have the same rows
            strides[:] = 0, 1
        found = library(x.dtype)
        assert found is not None
        self.run, self.run_back = found.forward, found.backward

    def _rows(self, rows: Tensor) -> tuple[int, ...]:
        """The addresses of γ, β, prior and gain."""
        start, step = rows.data_ptr(), rows.stride(0) * self.bytes
        return start, start + step, start + 2 * step, start + 3 * step, start + 4 * step

    def forward(self, x: Tensor, rows: Tensor, residual: Tensor | None, memory: Memory, start: int) -> Tensor:
        y = torch.empty_like(x)
        given = Forward(
            x.data_ptr(), None if residual is None else residual.data_ptr(), self._rows(rows), y.data_ptr(),
            memory.moments.data_ptr() + start * self.bytes,
        )  # fmt: skip
        self.run(ctypes.byref(self.shape), ctypes.byref(given), threads_for(self.elements))
        return y

    def backward(
        self, grad_y: Tensor, x: Tensor, y: Tensor | None, rows: Tensor, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        dx = torch.empty_like(x)
        d_rows = rows.new_empty((ROWS, self.groups, self.channels))
        d_residual = None if y is None or not self.residual else torch.empty_like(x)
        given = Backward(
            grad_y.data_ptr(), x.data_ptr(), None if y is None else y.data_ptr(),
            memory.moments.data_ptr() + start * self.bytes, self._rows(rows), (None,) * 4, dx.data_ptr(),
            None if d_residual is None else d_residual.data_ptr(), d_rows.data_ptr(),
        )  # fmt: skip
        self.run_back(ctypes.byref(self.shape), ctypes.byref(given), threads_for(self.elements))
        if not self.residual:
            return dx, d_rows, None
        return dx, d_rows, grad_y if d_residual is None else d_residual

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]:
        step = self.groups * self.channels
        return moments[start : start + 4 * step].view(4, self.groups, self.channels).unbind(0)
