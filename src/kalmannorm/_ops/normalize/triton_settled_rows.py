"""A settled norm with Triton kernels on the short way, with the interface of `row_kernels.py`.

As in `triton_rows.py`, everything that does not change from step to step is prepared once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kalmannorm._ops.grid import processors_of
from kalmannorm._ops.normalize.row_kernels import Expected, Memory, Pair, SettledGradients, SettledSaved, kept_of
from kalmannorm._ops.normalize.tiling import settling, shape_of
from kalmannorm._ops.normalize.triton_rows import NOTHING, Places, Shares, Step, aligned, direct, gradient_of_rows, run
from kalmannorm._ops.normalize.triton_run import RowStrides
from kalmannorm._ops.normalize.triton_settled_run import backward_launch, forward_launches, sums_launch, total, whole
from kalmannorm._ops.propagate.bundle import ROWS
from kalmannorm._ops.triton_launching import ALIGNED, At, Direct, Ready

NOT_YET = None, None
"""Instead of the gradients of γ and β, if a second launch makes them."""


class TritonSettledRows:
    """The launches of one settled norm. `pitch` is the number of values from one of the five rows to the next."""

    def __init__(self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int) -> None:
        shape = shape_of(x, size)
        processors, wide = processors_of(x), x.dtype == torch.float32
        self.groups, self.channels = shape.groups, shape.C
        self.values = x.numel() // shape.C  # per channel
        self.index = x.device.index
        self.strides, self.size, self.eps = x.stride(), size, eps
        self.relu, self.residual, self.keeps_output = relu, residual, residual and relu
        self.masked = relu and not residual
        rows = RowStrides(0, 0, 0, 0, 1)  # all groups have the same
        how = settling(shape, processors, residual=residual, wide=wide)
        self.forward_launches = forward_launches(shape, how, x.device, rows, eps, relu, residual)
        self.forward_scratch = None if whole(how) else Shares(shape.groups, how.splits, how.K, shape.C)
        how = settling(shape, processors, backward=True, residual=self.keeps_output, wide=wide)
        self.backward_launches: tuple[Ready, ...] = (
            backward_launch(shape, how, x.device, rows, relu, self.keeps_output, (False, False)),
        )
        self.backward_scratch = None
        if not total(shape, how):
            self.backward_launches += (sums_launch(shape, how, x.device, 0, (True, True)),)
            self.backward_scratch = Shares(shape.groups, how.splits, how.K, shape.C)
        self.step = shape.groups * shape.C
        self.pitch = pitch
        self.forward_direct: tuple[Direct, ...] = ()
        self.backward_direct: tuple[Direct, ...] = ()
        self.rows_offset = -1  # of the rows in 16 bytes; the launches were built for it
        self.shared = False  # whether `backward_direct` writes into `RowGradients`

    def settle(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, running: Pair, memory: Memory, start: int
    ) -> Tensor:
        y = torch.empty_like(x)
        launches = self.forward_direct
        x_at, y_at, rows_at = x.data_ptr(), y.data_ptr(), rows.data_ptr()
        residual_at = None if residual is None else residual.data_ptr()
        mean_at, var_at = running[0].data_ptr(), running[1].data_ptr()
        odd = (x_at | y_at | mean_at | var_at | (residual_at or 0)) % ALIGNED
        if not launches or odd or rows_at % ALIGNED != self.rows_offset:
            given = self._forward_arguments(x, y, rows, residual, running, memory.moments, start)
            run(self.forward_launches, given)  # checked; they build the kernels
            if aligned(x, y, residual, *running):
                self.forward_direct = direct(self.forward_launches, given, self._forward_places())
                self.rows_offset = rows_at % ALIGNED
            return y
        moments, shares = memory.moments, self.forward_scratch
        scratch_at = None if shares is None else memory.scratch.of(moments, shares.values)
        moments_at, stream = moments.data_ptr() + 4 * start, torch._C._cuda_getCurrentRawStream(self.index)
        for launch in launches:
            launch(stream, x_at, y_at, residual_at, rows_at, mean_at, var_at, moments_at, scratch_at)
        return y

    def _forward_arguments(
        self,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        residual: Tensor | None,
        running: Pair,
        moments: Tensor,
        start: int,
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of each launch of a forward."""
        weight, bias, *filtered = rows.unbind(0)
        own, kept = self.moments(moments, start), kept_of(self, moments, start)
        partial = count = None
        if self.forward_scratch is not None:
            partial, count = self.forward_scratch.split(torch.empty(self.forward_scratch.values, device=x.device))
        given: list[tuple[Tensor | None, ...]] = [
            (x, y, residual, partial, count, weight, bias, *filtered, *running, *kept, *own)
        ]
        if self.forward_scratch is not None:
            given.append((partial, count, *filtered, *own))
        return given

    def _forward_places(self) -> Places:
        """The arguments as places in x, y, residual, rows, running mean and variance, moments and scratch."""
        x, y, residual, running = At(0), At(1), At(2) if self.residual else None, (At(4), At(5))
        rows, (own, kept), shares = self._rows(3), self._moments(6), self.forward_scratch
        if shares is None:
            return [(x, y, residual, None, None, *rows, *running, *kept, *own)]
        partial, count = At(7), At(7, shares.sums // 4)
        return [
            (x, y, residual, partial, count, *rows, *running, *kept, *own),
            (partial, count, *rows[2:], *own),
        ]

    def _rows(self, memory: int) -> list[At]:
        return [At(memory, row * self.pitch) for row in range(ROWS)]

    def _moments(self, memory: int) -> tuple[list[At], list[At]]:
        """The moments of posterior and observation, and what is kept behind them."""
        behind = 4 * self.step
        own = [At(memory, part * self.step) for part in range(4)]
        return own, [At(memory, behind), At(memory, behind + self.channels)]

    def differentiate(self, grad_y: Tensor, saved: SettledSaved, memory: Memory, start: int) -> SettledGradients:
        x, y, rows, expected = saved
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        dx = torch.empty_like(x)
        d_rows, shared = gradient_of_rows(self, memory, start)
        d_residual = torch.empty_like(x) if self.keeps_output else None
        launches = self.backward_direct
        grad_at, x_at, dx_at, rows_at = grad_y.data_ptr(), x.data_ptr(), dx.data_ptr(), rows.data_ptr()
        averages_at, y_at = expected.address(), None if y is None else y.data_ptr()
        d_residual_at = None if d_residual is None else d_residual.data_ptr()
        odd = (grad_at | x_at | dx_at | averages_at | (y_at or 0) | (d_residual_at or 0)) % ALIGNED
        if not launches or odd or rows_at % ALIGNED != self.rows_offset or shared is not self.shared:
            given = self._backward_arguments(grad_y, saved, (dx, d_rows, d_residual), memory.moments, start)
            run(self.backward_launches, given)  # checked; they build the kernels
            there = averages_at % ALIGNED == 0 and aligned(grad_y, x, y, dx, d_residual)
            places = self._backward_places(y is not None, d_rows.stride(0))
            self.backward_direct = direct(self.backward_launches, given, places) if there else ()
            self.shared = shared
        else:
            shares = self.backward_scratch
            scratch_at = None if shares is None else memory.scratch.of(memory.moments, shares.values)
            moments_at, d_rows_at = memory.moments.data_ptr() + 4 * start, d_rows.data_ptr()
            stream = torch._C._cuda_getCurrentRawStream(self.index)
            for launch in launches:
                launch(
                    stream, grad_at, x_at, y_at, dx_at, d_residual_at, rows_at, moments_at, averages_at, d_rows_at,
                    scratch_at,
                )  # fmt: skip
        if self.residual and not self.keeps_output:
            d_residual = grad_y
        return dx, d_rows, d_residual

    def _backward_arguments(
        self, grad_y: Tensor, saved: SettledSaved, made: SettledGradients, moments: Tensor, start: int
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of each launch of a backward. `made` is memory for the gradients."""
        x, y, rows, expected = saved
        dx, d_rows, d_residual = made
        d_weight, d_bias, *d_filtered = d_rows.unbind(0)
        kept, seen = kept_of(self, moments, start), self.moments(moments, start)[2:]
        filtered = *rows.unbind(0), *kept, expected.of(self.channels), *seen, *NOTHING, *d_filtered
        if self.backward_scratch is None:
            return [(grad_y, x, y, dx, d_residual, None, *filtered, d_weight, d_bias, None)]
        sums, _ = self.backward_scratch.split(torch.empty(self.backward_scratch.values, device=x.device))
        return [
            (grad_y, x, y, dx, d_residual, sums, *filtered, *NOT_YET, None),
            (sums, kept[1], d_weight, d_bias, None, *NOTHING, None, None),
        ]

    def _backward_places(self, masks: bool, step: int) -> Places:
        """The arguments as places in grad_y, x, y, dx, d_residual, rows, moments, averages, d_rows and scratch.

        `masks`: y has the mask of the ReLU. `step`: from one of the `d_rows` to the next.
        """
        grad_y, x, y, dx = At(0), At(1), At(2) if masks else None, At(3)
        d_residual, averages = At(4) if self.keeps_output else None, At(7)
        own, kept = self._moments(6)
        d_weight, d_bias, *d_filtered = (At(8, row * step) for row in range(ROWS))
        filtered = *self._rows(5), *kept, averages, *own[2:], *NOTHING, *d_filtered
        if self.backward_scratch is None:
            return [(grad_y, x, y, dx, d_residual, None, *filtered, d_weight, d_bias, None)]
        sums = At(9)
        return [
            (grad_y, x, y, dx, d_residual, sums, *filtered, *NOT_YET, None),
            (sums, kept[1], d_weight, d_bias, None, *NOTHING, None, None),
        ]

    def launches_of_step(self, like: Tensor, rows: Tensor, moments: Tensor, start: int) -> Iterator[Step]:
        """The launches of a forward and of its backward, on tensors without memory. `like` has the form of x."""
        residual, masks = like if self.residual else None, like if self.keeps_output else None
        d_rows = torch.empty(rows.shape, device=rows.device)
        expected, running = Expected(rows.new_empty((self.channels, 3))), (rows.new_empty(self.channels),) * 2
        yield self.forward_launches, self._forward_arguments(like, like, rows, residual, running, moments, start)
        saved = like, masks, rows, expected
        yield self.backward_launches, self._backward_arguments(like, saved, (like, d_rows, masks), moments, start)

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]:
        """Mean and variance of the posterior, then of the observation, each (G, C)."""
        return moments.view(-1)[start : start + 4 * self.step].view(4, self.groups, self.channels).unbind(0)
