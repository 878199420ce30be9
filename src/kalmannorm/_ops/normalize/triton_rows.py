"""The op with Triton kernels for one norm and one shape of x, if parameters and moments are rows of larger tensors.

Everything that does not change from step to step is prepared once: tiles, grids, launches and offsets. A forward then
allocates only y, and a backward only dx and the gradients of the rows. Rows hold γ, β, the prior's mean and variance,
and the gain: (5, G, C), see `propagate/bundle.py`. Moments are (4, G, C): the posterior, then the observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kalmannorm._ops.grid import processors_of
from kalmannorm._ops.normalize.row_kernels import Grouped, Memory
from kalmannorm._ops.normalize.tiling import launch_for, shape_of
from kalmannorm._ops.normalize.triton_run import RowStrides, backward_launches, forward_launches
from kalmannorm._ops.propagate.bundle import ROWS
from kalmannorm._ops.triton_launching import ALIGNED, At, Direct, Place, Ready

NOTHING = None, None, None, None


class TritonRows:
    """The launches of one norm. `pitch` is the number of values from one of the five rows to the next.

    `own_prior`: every group has a prior of its own. `at_posterior`: gradients arrive at the posterior. For both see
    `triton_learned.py`.
    """

    def __init__(
        self,
        x: Tensor,
        size: int,
        eps: float,
        *,
        residual: bool,
        relu: bool,
        pitch: int,
        own_prior: bool = False,
        at_posterior: bool = False,
    ) -> None:
        shape = shape_of(x, size)
        processors, wide = processors_of(x), x.dtype == torch.float32
        self.groups, self.channels = shape.groups, shape.C
        self.values = x.numel() // shape.C  # per channel
        self.index = x.device.index
        self.strides, self.size, self.eps = x.stride(), size, eps
        self.relu, self.residual, self.keeps_output = relu, residual, residual and relu
        mask = 0 if relu and not residual else None  # the backward reads β only for the mask of a ReLU
        step = shape.C if own_prior and shape.groups > 1 else 0
        strides = RowStrides(0, 0, step, step, 1)
        how = launch_for(shape, processors, residual=residual, wide=wide)
        self.forward_launches = forward_launches(shape, how, x.device, strides, eps, relu, residual)
        self.forward_scratch = Shares.of(shape.groups, how.splits, how.K, shape.C)
        how = launch_for(shape, processors, backward=True, residual=self.keeps_output, wide=wide)
        strides, arrived = strides._replace(bias=mask), (at_posterior, False)
        self.backward_launches = backward_launches(
            shape, how, x.device, strides, eps, relu, self.keeps_output, True, arrived
        )
        self.backward_scratch = Shares.of(shape.groups, how.splits, how.K, shape.C)
        self.masked = mask is not None
        self.step = shape.groups * shape.C
        self.pitch = pitch
        self.pitch_bytes, self.step_bytes = 4 * pitch, 4 * self.step  # from row to row: of parameters, of moments
        self.forward_direct: tuple[Direct, ...] = ()
        self.backward_direct: tuple[Direct, ...] = ()
        self.rows_offset = -1  # of the rows in 16 bytes; the launches were built for it
        self.shared = False  # whether `backward_direct` writes into `RowGradients`

    def forward(self, x: Tensor, rows: Tensor, residual: Tensor | None, memory: Memory, start: int) -> Tensor:
        """y. Writes the moments from `start` on."""
        y = torch.empty_like(x)
        launches = self.forward_direct
        x_at, y_at, rows_at = x.data_ptr(), y.data_ptr(), rows.data_ptr()
        residual_at = None if residual is None else residual.data_ptr()
        if not launches or (x_at | y_at | (residual_at or 0)) % ALIGNED or rows_at % ALIGNED != self.rows_offset:
            self._forward(x, y, rows, residual, memory.moments, start)
            return y
        moments, shares = memory.moments, self.forward_scratch
        scratch_at = None if shares is None else memory.scratch.of(moments, shares.values)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        for launch in launches:
            launch(stream, x_at, y_at, residual_at, rows_at, moments.data_ptr() + 4 * start, scratch_at)
        return y

    def _forward(
        self, x: Tensor, y: Tensor, rows: Tensor, residual: Tensor | None, moments: Tensor, start: int
    ) -> None:
        """The forward through checked launches, which build the kernels."""
        given = self.forward_arguments(x, y, rows.unbind(0), residual, moments, start)
        run(self.forward_launches, given)
        if aligned(x, y, residual):
            self.forward_direct = direct(self.forward_launches, given, self._forward_places())
            self.rows_offset = rows.data_ptr() % ALIGNED

    def _forward_places(self) -> Places:
        """The arguments as places in x, y, residual, rows, moments and scratch."""
        x, y, residual = At(0), At(1), At(2) if self.residual else None
        parts = *self._rows(3), *self._moments(4)
        if self.forward_scratch is None:
            return [(x, y, residual, *parts)]
        sums, count = At(5), At(5, self.forward_scratch.sums // 4)
        return [(x, sums, count), (x, y, residual, sums, count, *parts)]

    def _rows(self, memory: int) -> list[At]:
        return [At(memory, row * self.pitch) for row in range(ROWS)]

    def _moments(self, memory: int) -> list[At]:
        return [At(memory, part * self.step) for part in range(4)]

    def forward_arguments(
        self, x: Tensor, y: Tensor, rows: Sequence[Tensor], residual: Tensor | None, moments: Tensor, start: int
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of each launch of a forward. `rows` are five tensors, each (G, C)."""
        parts = *rows, *self.moments(moments, start)
        if self.forward_scratch is None:
            return [(x, y, residual, *parts)]
        sums, count = self.forward_scratch.split(torch.empty(self.forward_scratch.values, device=x.device))
        return [(x, sums, count), (x, y, residual, sums, count, *parts)]

    def backward(
        self, grad_y: Tensor, x: Tensor, y: Tensor | None, rows: Tensor, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of x, of the rows (5, G, C) and of the residual."""
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        dx = torch.empty_like(x)
        d_rows, shared = gradient_of_rows(self, memory, start)
        d_residual = torch.empty_like(x) if self.keeps_output else None
        launches = self.backward_direct
        grad_at, x_at, dx_at, rows_at = grad_y.data_ptr(), x.data_ptr(), dx.data_ptr(), rows.data_ptr()
        y_at = None if y is None else y.data_ptr()
        d_residual_at = None if d_residual is None else d_residual.data_ptr()
        odd = (grad_at | x_at | dx_at | (y_at or 0) | (d_residual_at or 0)) % ALIGNED
        if not launches or odd or rows_at % ALIGNED != self.rows_offset or shared is not self.shared:
            self._backward(grad_y, x, y, dx, d_rows, d_residual, rows, memory.moments, start)
            self.shared = shared
        else:
            shares = self.backward_scratch
            scratch_at = None if shares is None else memory.scratch.of(memory.moments, shares.values)
            mean, d_weight = memory.moments.data_ptr() + 4 * start, d_rows.data_ptr()
            stream = torch._C._cuda_getCurrentRawStream(self.index)
            for launch in launches:
                launch(
                    stream, grad_at, x_at, y_at, dx_at, d_residual_at, rows_at, mean, d_weight, scratch_at
                )  # fmt: skip
        return dx, d_rows, d_residual if self.keeps_output else grad_y if self.residual else None

    def _backward(
        self,
        grad_y: Tensor,
        x: Tensor,
        y: Tensor | None,
        dx: Tensor,
        d_rows: Tensor,
        d_residual: Tensor | None,
        rows: Tensor,
        moments: Tensor,
        start: int,
    ) -> None:
        """The backward through checked launches, which build the kernels."""
        given = self.backward_arguments(grad_y, x, y, dx, d_rows, d_residual, rows.unbind(0), moments, start)
        run(self.backward_launches, given)
        there = aligned(grad_y, x, y, dx, d_residual)
        places = self._backward_places(y is not None, d_rows.stride(0))
        self.backward_direct = direct(self.backward_launches, given, places) if there else ()

    def _backward_places(self, masks: bool, step: int) -> Places:
        """The arguments as places in grad_y, x, y, dx, d_residual, rows, moments, d_rows and scratch.

        `masks`: y has the mask of the ReLU. `step`: from one of the `d_rows` to the next.
        """
        grad_y, x, y, dx = At(0), At(1), At(2) if masks else None, At(3)
        d_residual = At(4) if self.keeps_output else None
        weight, bias, *prior = self._rows(5)
        kept, d_rows = self._moments(6), [At(7, row * step) for row in range(ROWS)]
        affine = weight, bias if self.masked else None
        parts = *affine, *prior, *kept, *NOTHING, *d_rows
        if self.backward_scratch is None:
            return [(grad_y, x, y, dx, d_residual, *parts)]
        sums = At(8)
        return [(grad_y, x, y, d_residual, sums, *affine, *kept[:2]), (d_residual or grad_y, x, dx, sums, *parts)]

    def backward_arguments(
        self,
        grad_y: Tensor,
        x: Tensor,
        y: Tensor | None,
        dx: Tensor,
        d_rows: Tensor,
        d_residual: Tensor | None,
        rows: Sequence[Tensor],
        moments: Tensor,
        start: int,
        arrived: Sequence[Tensor | None] = NOTHING,
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of each launch of a backward. `arrived` are the gradients of the four moments."""
        weight, bias, *prior = rows
        kept = self.moments(moments, start)
        affine = weight, bias if self.masked else None
        parts: tuple[Tensor | None, ...] = *affine, *prior, *kept, *arrived, *d_rows.unbind(0)
        if self.backward_scratch is None:
            return [(grad_y, x, y, dx, d_residual, *parts)]
        sums, _ = self.backward_scratch.split(torch.empty(self.backward_scratch.values, device=x.device))
        masked = grad_y if d_residual is None else d_residual
        return [(grad_y, x, y, d_residual, sums, *affine, *kept[:2]), (masked, x, dx, sums, *parts)]

    def launches_of_step(self, like: Tensor, rows: Tensor, moments: Tensor, start: int) -> Iterator[Step]:
        """The launches of a forward and of its backward, on tensors without memory. `like` has the form of x."""
        residual, kept = like if self.residual else None, like if self.keeps_output else None
        parts, d_rows = rows.unbind(0), torch.empty(rows.shape, device=rows.device)
        yield self.forward_launches, self.forward_arguments(like, like, parts, residual, moments, start)
        yield (
            self.backward_launches,
            self.backward_arguments(like, like, kept, like, d_rows, kept, parts, moments, start),
        )

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]:
        """Mean and variance of the posterior, then of the observation, each (G, C)."""
        return moments.view(-1)[start : start + 4 * self.step].view(4, self.groups, self.channels).unbind(0)


Given = Sequence[Sequence[Tensor | None]]
"""The arguments of several launches."""
Places = Sequence[Sequence[Place]]
"""The same as places in memory whose addresses are given at each call."""
Step = tuple[Sequence[Ready], Given]


def gradient_of_rows(kernels: Grouped, memory: Memory, start: int) -> tuple[Tensor, bool]:
    """Memory for the gradient of the rows of a norm, (5, G, C), and whether it is shared with other norms."""
    shared = memory.scratch.gradients
    if shared is None:
        return memory.moments.new_empty((ROWS, kernels.groups, kernels.channels)), False
    return shared.of(start, memory.moments), True


def run(launches: Sequence[Ready], given: Given) -> None:
    for launch, tensors in zip(launches, given, strict=True):
        launch(*tensors)


def direct(launches: Sequence[Ready], given: Given, places: Places | None = None) -> tuple[Direct, ...]:
    """The same launches on addresses, after `run`. Empty if one of them has none.

    Without `places`, a launch is called with the addresses of its own tensors.
    """
    listed: Sequence[Sequence[Place] | None] = places or [None] * len(launches)
    found = [launch.direct(tensors, each) for launch, tensors, each in zip(launches, given, listed, strict=True)]
    there = tuple(launch for launch in found if launch is not None)
    return there if len(there) == len(found) else ()


def aligned(*tensors: Tensor | None) -> bool:
    return not any(tensor is not None and tensor.data_ptr() % ALIGNED for tensor in tensors)


class Shares:
    """Memory between two launches: partial sums, then the number of values of each share."""

    def __init__(self, groups: int, splits: int, K: int, channels: int) -> None:
        self.shape, self.counts = (2, splits, groups, K, channels), (splits, groups)
        values = 2 * splits * groups * K * channels
        padded = -(-values // 4) * 4
        self.sums, self.values = 4 * padded, padded + splits * groups
        self.used = values

    @classmethod
    def of(cls, groups: int, splits: int, K: int, channels: int) -> Shares | None:
        """None if one launch is enough."""
        return cls(groups, splits, K, channels) if splits else None

    def split(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return memory[: self.used].view(self.shape), memory[self.sums // 4 :].view(self.counts)
