"""A norm with running statistics on a CPU, its backward in C: see `native.c`. The formulas are those of `aten_settled`.

The forward is that of population inference in PyTorch operations, so its bits are the same. C observes the groups.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from kalmannorm._groups import cast
from kalmannorm._ops.native_library import library, threads_for
from kalmannorm._ops.normalize import aten, aten_settled, native
from kalmannorm._ops.normalize.arguments import SettledGrads
from kalmannorm._ops.normalize.aten_settled import forward as forward
from kalmannorm._ops.normalize.native import ROWS, Backward, Forward
from kalmannorm._ops.normalize.native_rows import NativeRows
from kalmannorm._ops.normalize.row_kernels import (
    AloneSaved,
    AloneSums,
    Memory,
    Pair,
    Read,
    SettledGradients,
    SettledSaved,
    kept_of,
)


def backward(given: SettledGrads) -> list[Tensor]:
    """As `aten_settled.backward`."""
    x, y = given.x, given.y
    if not native.readable(each for each in given if isinstance(each, Tensor)):
        return aten_settled.backward(given)
    shape = native.shape_of(x, given.statistics_batch_size, 0.0, given.relu)
    rows = native.rows_of(shape, given, x.dtype)
    seen = torch.stack([given.observed_mean, given.observed_var])
    moments = torch.cat([seen, seen])  # only the observation is read
    grad_y = cast(given.grad_y, x.dtype)
    further = [given.grad_mean, given.grad_var, given.grad_observed_mean, given.grad_observed_var]
    further = [None if each is None else cast(each, x.dtype).contiguous() for each in further]
    known = [cast(each, x.dtype).contiguous() for each in (given.centre, given.rho, given.averages)]
    dx, d_rows = torch.empty_like(x), moments.new_empty((ROWS, *seen.shape[1:]))
    d_residual, collected = torch.empty_like(x) if given.residual else None, torch.empty_like(known[2])
    work = Backward(
        grad_y.data_ptr(), x.data_ptr(), native.address(y), moments.data_ptr(), native.addresses(rows),
        native.addresses(further), dx.data_ptr(), native.address(d_residual), d_rows.data_ptr(),
        *map(native.address, (*known, collected)),
    )  # fmt: skip
    found = library(x.dtype)
    assert found is not None, "see `native.fits`"
    found.settle_backward(ctypes.byref(shape), ctypes.byref(work), threads_for(x.numel()))
    d_weight, d_bias, *of_prior = d_rows.unbind(0)
    gradients = [dx, aten.summed(d_weight, given.weight), aten.summed(d_bias, given.bias), collected]
    if d_residual is not None:
        gradients.append(d_residual)
    pairs = zip(of_prior, (given.prior_mean, given.prior_var, given.gain), strict=True)
    gradients += [aten.summed(grad, like) for grad, like in pairs if like is not None]
    return [each if each._base is None else each.clone() for each in gradients]  # not views of one tensor


class NativeSettledRows(NativeRows):
    """One settled norm on x of one shape, on a CPU. The output is kept for the mask of a ReLU."""

    def __init__(self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int) -> None:
        super().__init__(x, size, eps, residual=residual, relu=relu, pitch=pitch)
        found = library(x.dtype)
        assert found is not None
        self.run_settled = found.settle_backward

    def settle(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, running: Pair, memory: Memory, start: int
    ) -> Tensor:
        return self._settle(x, (rows[0, 0], rows[1, 0]), self._rows(rows), residual, running, memory, start)

    def _settle(
        self,
        x: Tensor,
        affine: Pair,
        rows: tuple[int | None, ...],
        residual: Tensor | None,
        running: Pair,
        memory: Memory,
        start: int,
    ) -> Tensor:
        mean, var = running
        y = F.batch_norm(x, mean, var, *affine, False, 0.0, self.eps)
        if residual is not None:
            y.add_(residual)
        if self.relu:
            y.relu_()
        moments = memory.moments.data_ptr() + start * self.bytes
        given = Forward(x.data_ptr(), None, rows, None, moments)
        self.run(ctypes.byref(self.shape), ctypes.byref(given), threads_for(self.elements))
        torch.stack([mean, (var + self.eps).rsqrt_()], out=kept_of(self, memory.moments.data, start))
        return y

    def differentiate(self, grad_y: Tensor, saved: SettledSaved, memory: Memory, start: int) -> SettledGradients:
        x, y, rows, expected = saved
        given = self._rows(rows), expected.address(), None
        dx, d_rows, d_residual = self._differentiate(grad_y, x, y, memory, start, *given)
        return dx, d_rows, d_residual

    def _differentiate(
        self,
        grad_y: Tensor,
        x: Tensor,
        y: Tensor | None,
        memory: Memory,
        start: int,
        rows: tuple[int | None, ...],
        averages: int,
        collected: int | None,
    ) -> SettledGradients:
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        dx = torch.empty_like(x)
        d_rows = memory.moments.new_empty((ROWS, self.groups, self.channels))
        d_residual = None if y is None or not self.residual else torch.empty_like(x)
        moments = memory.moments.data_ptr() + start * self.bytes
        centre = moments + 4 * self.groups * self.channels * self.bytes
        given = Backward(
            grad_y.data_ptr(), x.data_ptr(), native.address(y), moments,
            rows, (None,) * 4, dx.data_ptr(), native.address(d_residual), d_rows.data_ptr(), centre,
            centre + self.channels * self.bytes, averages, collected,
        )  # fmt: skip
        self.run_settled(ctypes.byref(self.shape), ctypes.byref(given), threads_for(self.elements))
        if self.residual and d_residual is None:
            d_residual = grad_y
        return dx, d_rows, d_residual


class NativeSettledAlone(NativeSettledRows):
    """One settled norm without a prior, with the interface of `SettledAloneKernels`."""

    def settle(  # type: ignore[override]
        self, x: Tensor, read: Read, residual: Tensor | None, memory: Memory, start: int
    ) -> Tensor:
        weight, bias, mean, var, _ = read
        return self._settle(x, (weight, bias), self._given(weight, bias), residual, (mean, var), memory, start)

    def _given(self, weight: Tensor, bias: Tensor) -> tuple[int | None, ...]:
        return weight.data_ptr(), bias.data_ptr(), None, None, None

    def differentiate(  # type: ignore[override]
        self, grad_y: Tensor, saved: AloneSaved, sums: AloneSums, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor | None]:
        x, y, weight, bias, expected = saved
        collected = torch.empty_like(sums[2])
        given = self._given(weight, bias), expected.address(), collected.data_ptr()
        dx, d_rows, d_residual = self._differentiate(grad_y, x, y, memory, start, *given)
        torch.sum(d_rows[0], 0, out=sums[0])
        torch.sum(d_rows[1], 0, out=sums[1])
        sums[2].add_(collected)
        return dx, d_residual
