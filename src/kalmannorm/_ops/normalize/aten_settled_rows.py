"""A settled norm in PyTorch operations on the short way, with the interface of `row_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kalmannorm._ops.normalize import aten_settled
from kalmannorm._ops.normalize.arguments import SettledGrads, SettledInputs
from kalmannorm._ops.normalize.aten_rows import AtenRows
from kalmannorm._ops.normalize.row_kernels import (
    AloneSaved,
    AloneSums,
    Memory,
    Pair,
    Read,
    SettledAloneKernels,
    SettledGradients,
    SettledRowKernels,
    SettledSaved,
    kept_of,
)
from kalmannorm._ops.propagate.bundle import ROWS


class AtenSettledRows(AtenRows):
    """One settled norm on x of one shape, on a CPU. The output is kept for the mask of a ReLU."""

    def settle(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, running: Pair, memory: Memory, start: int
    ) -> Tensor:
        weight, bias, mean, var, gain = rows[:, 0]
        y, *moments, centre, rho = aten_settled.forward(
            SettledInputs(
                x, mean.unsqueeze(0), var.unsqueeze(0), gain, weight, bias, *running, self.size, self.eps, residual,
                self.relu,
            )
        )  # fmt: skip
        step = self.groups * self.channels
        # `.data`: as in `AtenRows.forward`.
        own = memory.moments.data[start : start + 4 * step].view(4, self.groups, self.channels)
        torch.stack(moments, out=own)
        torch.stack([centre, rho], out=kept_of(self, memory.moments.data, start))
        return y

    def differentiate(self, grad_y: Tensor, saved: SettledSaved, memory: Memory, start: int) -> SettledGradients:
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(saved[0]).copy_(grad_y)
        return through_the_op(self, grad_y, saved, memory.moments, start, aten_settled.backward)


class AtenSettledAlone(AtenRows):
    """One settled norm without a prior, with the interface of `SettledAloneKernels`."""

    def settle(self, x: Tensor, read: Read, residual: Tensor | None, memory: Memory, start: int) -> Tensor:
        given = SettledInputs(x, None, None, None, *read[:4], self.size, self.eps, residual, self.relu)
        y, *moments, centre, rho = aten_settled.forward(given)
        step = self.groups * self.channels
        own = memory.moments.data[start : start + 4 * step].view(4, self.groups, self.channels)
        torch.stack(moments, out=own)
        torch.stack([centre, rho], out=kept_of(self, memory.moments.data, start))
        return y

    def differentiate(
        self, grad_y: Tensor, saved: AloneSaved, sums: AloneSums, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor | None]:
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(saved[0]).copy_(grad_y)
        given = op_inputs(self, grad_y, saved, memory.moments, start)
        dx, d_weight, d_bias, collected, *rest = aten_settled.backward(given)
        sums[0].copy_(d_weight)
        sums[1].copy_(d_bias)
        sums[2].add_(collected)
        return dx, rest[0] if rest else grad_y if self.residual else None


def through_the_op(
    kernels: SettledRowKernels,
    grad_y: Tensor,
    saved: SettledSaved,
    moments: Tensor,
    start: int,
    backward: Callable[[SettledGrads], list[Tensor]],
) -> SettledGradients:
    """The backward with the interface of `aten_settled.backward`. All groups have the same rows."""
    x, y, rows, expected = saved
    kept, observation = kept_of(kernels, moments, start), kernels.moments(moments, start)[2:]
    weight, bias, mean, var, gain = rows[:, 0]
    asks = y is not None and kernels.residual
    given = SettledGrads(  # type: ignore[call-arg]
        grad_y, x, y, mean.unsqueeze(0), var.unsqueeze(0), gain, weight, bias, *kept, *observation,
        expected.of(kernels.channels), None, None, None, None, kernels.size, kernels.relu, asks,
    )  # fmt: skip
    dx, d_weight, d_bias, _, *rest = backward(given)
    d_residual = rest.pop(0) if asks else grad_y if kernels.residual else None
    d_rows = rows.new_zeros((ROWS, *rows.shape[1:]))
    d_rows[:, 0] = torch.stack([d_weight, d_bias, rest[0][0], rest[1][0], rest[2]])
    return dx, d_rows, d_residual


def op_inputs(
    kernels: SettledAloneKernels, grad_y: Tensor, saved: AloneSaved, moments: Tensor, start: int
) -> SettledGrads:
    x, y, weight, bias, expected = saved
    kept, observation = kept_of(kernels, moments, start), kernels.moments(moments, start)[2:]
    return SettledGrads(  # type: ignore[call-arg]
        grad_y, x, y, None, None, None, weight, bias, *kept, *observation, expected.of(kernels.channels),
        None, None, None, None, kernels.size, kernels.relu, y is not None and kernels.residual,
    )  # fmt: skip
