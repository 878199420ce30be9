"""A settled norm without a prior with Triton kernels on the short way: see `settled_alone.py`.

As in `triton_rows.py`, everything that does not change from step to step is prepared once. γ and β are read where the
norm has them. The kernels add what the closing phase collects to the sums of earlier backwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kalmannorm._ops.grid import processors_of
from kalmannorm._ops.normalize.row_kernels import AloneSaved, AloneSums, Expected, Memory, Read, kept_of
from kalmannorm._ops.normalize.tiling import settling, shape_of
from kalmannorm._ops.normalize.triton_rows import NOTHING, Places, Shares, Step, aligned, direct, run
from kalmannorm._ops.normalize.triton_run import RowStrides
from kalmannorm._ops.normalize.triton_settled_run import backward_launch, forward_launches, sums_launch, total, whole
from kalmannorm._ops.triton_launching import ALIGNED, At, Direct, Ready

OWN_ROWS = RowStrides(0, 0, None, None, None)
NO_PRIOR = None, None, None
"""Prior mean and variance, and the gain, or their gradients."""


class TritonSettledAlone:
    """The launches of one settled norm without a prior."""

    def __init__(self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int = 0) -> None:
        shape = shape_of(x, size)
        processors, wide = processors_of(x), x.dtype == torch.float32
        self.groups, self.channels = shape.groups, shape.C
        self.values = x.numel() // shape.C  # per channel
        self.index = x.device.index
        self.strides, self.size = x.stride(), size
        self.relu, self.residual, self.keeps_output = relu, residual, residual and relu
        how = settling(shape, processors, residual=residual, wide=wide)
        self.forward_launches = forward_launches(shape, how, x.device, OWN_ROWS, eps, relu, residual)
        self.forward_scratch = None if whole(how) else Shares(shape.groups, how.splits, how.K, shape.C)
        how = settling(shape, processors, backward=True, residual=self.keeps_output, wide=wide)
        self.backward_launches: tuple[Ready, ...] = (
            backward_launch(shape, how, x.device, OWN_ROWS, relu, self.keeps_output, (False, False), True),
        )
        self.backward_scratch = None
        if not total(shape, how):
            self.backward_launches += (sums_launch(shape, how, x.device, 0, (False, False), True),)
            self.backward_scratch = Shares(shape.groups, how.splits, how.K, shape.C)
        self.step = shape.groups * shape.C
        self.forward_direct: tuple[Direct, ...] = ()
        self.backward_direct: tuple[Direct, ...] = ()

    def settle(self, x: Tensor, read: Read, residual: Tensor | None, memory: Memory, start: int) -> Tensor:
        y = torch.empty_like(x)
        launches = self.forward_direct
        x_at, y_at, (weight_at, bias_at, mean_at, var_at) = x.data_ptr(), y.data_ptr(), read.addresses
        residual_at = None if residual is None else residual.data_ptr()
        if not launches or (x_at | y_at | weight_at | bias_at | mean_at | var_at | (residual_at or 0)) % ALIGNED:
            given = self._forward_arguments(x, y, read, residual, memory.moments, start)
            run(self.forward_launches, given)  # checked; they build the kernels
            if aligned(x, y, residual, *read[:4]):
                self.forward_direct = direct(self.forward_launches, given, self._forward_places())
            return y
        moments, shares = memory.moments, self.forward_scratch
        scratch_at = None if shares is None else memory.scratch.of(moments, shares.values)
        moments_at, stream = moments.data_ptr() + 4 * start, torch._C._cuda_getCurrentRawStream(self.index)
        for launch in launches:
            launch(stream, x_at, y_at, residual_at, weight_at, bias_at, mean_at, var_at, moments_at, scratch_at)
        return y

    def _forward_arguments(
        self, x: Tensor, y: Tensor, read: Read, residual: Tensor | None, moments: Tensor, start: int
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of each launch of a forward."""
        weight, bias, mean, var, _ = read
        own, kept = self.moments(moments, start), kept_of(self, moments, start)
        partial = count = None
        if self.forward_scratch is not None:
            partial, count = self.forward_scratch.split(torch.empty(self.forward_scratch.values, device=x.device))
        given: list[tuple[Tensor | None, ...]] = [
            (x, y, residual, partial, count, weight, bias, *NO_PRIOR, mean, var, *kept, *own)
        ]
        if self.forward_scratch is not None:
            given.append((partial, count, *NO_PRIOR, *own))
        return given

    def _forward_places(self) -> Places:
        """The arguments as places in x, y, residual, γ, β, running mean and variance, moments and scratch."""
        x, y, residual, given = At(0), At(1), At(2) if self.residual else None, (At(3), At(4), *NO_PRIOR, At(5), At(6))
        (own, kept), shares = self._moments(7), self.forward_scratch
        if shares is None:
            return [(x, y, residual, None, None, *given, *kept, *own)]
        partial, count = At(8), At(8, shares.sums // 4)
        return [(x, y, residual, partial, count, *given, *kept, *own), (partial, count, *NO_PRIOR, *own)]

    def _moments(self, memory: int) -> tuple[list[At], list[At]]:
        """The moments of posterior and observation, and what is kept behind them."""
        behind = 4 * self.step
        own = [At(memory, part * self.step) for part in range(4)]
        return own, [At(memory, behind), At(memory, behind + self.channels)]

    def differentiate(
        self, grad_y: Tensor, saved: AloneSaved, sums: AloneSums, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor | None]:
        x, y, weight, bias, expected = saved
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        dx = torch.empty_like(x)
        d_residual = torch.empty_like(x) if self.keeps_output else None
        launches = self.backward_direct
        grad_at, x_at, dx_at, weight_at, bias_at = map(Tensor.data_ptr, (grad_y, x, dx, weight, bias))
        d_weight_at, d_bias_at, sums_at = map(Tensor.data_ptr, sums)
        averages_at, y_at = expected.address(), None if y is None else y.data_ptr()
        d_residual_at = None if d_residual is None else d_residual.data_ptr()
        odd = grad_at | x_at | dx_at | weight_at | bias_at | d_weight_at | d_bias_at | sums_at | averages_at
        if not launches or (odd | (y_at or 0) | (d_residual_at or 0)) % ALIGNED:
            given = self._backward_arguments(grad_y, saved, (dx, d_residual), sums, memory.moments, start)
            run(self.backward_launches, given)  # checked; they build the kernels
            there = averages_at % ALIGNED == 0 and aligned(grad_y, x, y, dx, d_residual, weight, bias, *sums)
            places = self._backward_places(y is not None)
            self.backward_direct = direct(self.backward_launches, given, places) if there else ()
        else:
            shares = self.backward_scratch
            scratch_at = None if shares is None else memory.scratch.of(memory.moments, shares.values)
            moments_at = memory.moments.data_ptr() + 4 * start
            stream = torch._C._cuda_getCurrentRawStream(self.index)
            for launch in launches:
                launch(
                    stream, grad_at, x_at, y_at, dx_at, d_residual_at, weight_at, bias_at, moments_at, averages_at,
                    d_weight_at, d_bias_at, sums_at, scratch_at,
                )  # fmt: skip
        return dx, grad_y if self.residual and not self.keeps_output else d_residual

    def _backward_arguments(
        self,
        grad_y: Tensor,
        saved: AloneSaved,
        made: tuple[Tensor, Tensor | None],
        sums: AloneSums,
        moments: Tensor,
        start: int,
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of each launch of a backward. `made` is memory for the gradients of x and of the residual."""
        x, y, weight, bias, expected = saved
        kept, seen = kept_of(self, moments, start), self.moments(moments, start)[2:]
        read = weight, bias, *NO_PRIOR, *kept, expected.of(self.channels), *seen, *NOTHING, *NO_PRIOR
        if self.backward_scratch is None:
            return [(grad_y, x, y, *made, None, *read, *sums)]
        shares, _ = self.backward_scratch.split(torch.empty(self.backward_scratch.values, device=x.device))
        return [(grad_y, x, y, *made, shares, *read, None, None, None), (shares, kept[1], *sums, *NO_PRIOR, *NO_PRIOR)]

    def _backward_places(self, masks: bool) -> Places:
        """The arguments as places in grad_y, x, y, dx, d_residual, γ, β, moments, averages, gradients, sums, scratch.

        `masks`: y has the mask of the ReLU.
        """
        given = At(0), At(1), At(2) if masks else None, At(3), At(4) if self.keeps_output else None
        own, kept = self._moments(7)
        read = At(5), At(6), *NO_PRIOR, *kept, At(8), *own[2:], *NOTHING, *NO_PRIOR
        sums = At(9), At(10), At(11)
        if self.backward_scratch is None:
            return [(*given, None, *read, *sums)]
        return [(*given, At(12), *read, None, None, None), (At(12), kept[1], *sums, *NO_PRIOR, *NO_PRIOR)]

    def launches_of_step(self, like: Tensor, rows: Tensor, moments: Tensor, start: int) -> Iterator[Step]:
        """The launches of a forward and of its backward, on tensors without memory. `like` has the form of x."""
        residual, masks = like if self.residual else None, like if self.keeps_output else None
        one, sums = rows.new_empty(self.channels), rows.new_empty((self.channels, 3))
        given = self._forward_arguments(like, like, Read(one, one, one, one, ()), residual, moments, start)
        yield self.forward_launches, given
        saved = like, masks, one, one, Expected(sums)
        given = self._backward_arguments(like, saved, (like, masks), (one, one, sums), moments, start)
        yield self.backward_launches, given

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]:
        """Mean and variance of the posterior, then of the observation, each (G, C)."""
        return moments.view(-1)[start : start + 4 * self.step].view(4, self.groups, self.channels).unbind(0)
