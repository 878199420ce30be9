"""The op with Triton kernels for a norm with a learned transition: `triton_rows.py` behind the launch of the prior.

γ, β and the gain are rows of a bundle. The prior comes from the posterior of the norm before, (2, G, P), by the kernels
of `predict/triton_predict.py`. It is stored behind the moments of the norm, so each norm has six times (G, C) there. A
norm without a prior has no transition. Its gain is 1, and it reads N(0, 1) from the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kalmannorm._ops.normalize.row_kernels import Memory, Predicted, Transition
from kalmannorm._ops.normalize.triton_rows import Step, TritonRows, aligned, direct, run
from kalmannorm._ops.predict.triton_predict import launches_of
from kalmannorm._ops.propagate.bundle import ROWS
from kalmannorm._ops.triton_launching import ALIGNED, Direct, Ready


class TritonLearned(TritonRows):
    """The launches of one norm. `inputs` is P, the number of channels before, or 0 for a norm without a prior."""

    most_noises = 1
    """The number of values that r may have."""

    def __init__(
        self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int, inputs: int
    ) -> None:
        super().__init__(
            x, size, eps, residual=residual, relu=relu, pitch=pitch, own_prior=inputs > 0, at_posterior=True
        )
        G, C = self.groups, self.channels
        self.posterior_form = (2, G, C), (G * C, C, 1)
        self.previous_shape, self.previous_step = (2, G, inputs), 4 * G * inputs
        self.predicting: tuple[Ready, ...] = ()
        self.predicting_direct: tuple[Direct, ...] = ()
        self.differentiating: dict[bool, tuple[Ready, ...]] = {}  # with and without a gradient of the matrix
        self.differentiating_direct: dict[bool, tuple[Direct, ...]] = {}
        if inputs:
            for to in (False, True):
                launches = launches_of(G, C, inputs, x.device, gain=None, to_matrix=to, to_gain=False)
                self.differentiating[to] = launches.backward, launches.summing
            self.predicting, self.blocks = (launches.forward,), launches.blocks
            values = 2 * self.blocks * G * inputs
            self.noise_share = -(-values // 4) * 4  # where the shares of the noise begin
            self.share_values = self.noise_share + self.blocks

    def filter(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, given: Transition | None, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor]:
        """y, and the posterior (2, G, C). Writes the moments and the prior from `start` on."""
        y, moments = torch.empty_like(x), memory.moments
        posterior = moments.as_strided(*self.posterior_form, start)
        launches = self.forward_direct
        x_at, y_at, rows_at = x.data_ptr(), y.data_ptr(), rows.data_ptr()
        residual_at = None if residual is None else residual.data_ptr()
        odd = x_at | y_at | (residual_at or 0)
        if given is not None:
            previous, matrix, noise = given
            previous_at, matrix_at, noise_at = previous.data_ptr(), matrix.data_ptr(), noise.data_ptr()
            odd |= previous_at | matrix_at | noise_at
        if not launches or odd % ALIGNED or rows_at % ALIGNED != self.rows_offset:
            self._filter(x, y, rows, residual, given, moments, start)
            return y, posterior
        step, pitch = self.step_bytes, self.pitch_bytes
        mean = moments.data_ptr() + 4 * start
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        prior_mean, prior_var = rows_at + 2 * pitch, rows_at + 3 * pitch
        if given is not None:
            prior_mean, prior_var = mean + 4 * step, mean + 5 * step
            self.predicting_direct[0](
                stream, previous_at, previous_at + self.previous_step, matrix_at, noise_at, None,
                prior_mean, prior_var, None,
            )  # fmt: skip
        addresses = (
            rows_at, rows_at + pitch, prior_mean, prior_var, rows_at + 4 * pitch,
            mean, mean + step, mean + 2 * step, mean + 3 * step,
        )  # fmt: skip
        if self.forward_scratch is None:
            launches[0](stream, x_at, y_at, residual_at, *addresses)
            return y, posterior
        sums = memory.scratch.of(moments, self.forward_scratch.values)
        count = sums + self.forward_scratch.sums
        launches[0](stream, x_at, sums, count)
        launches[1](stream, x_at, y_at, residual_at, sums, count, *addresses)
        return y, posterior

    def _filter(
        self,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        residual: Tensor | None,
        given: Transition | None,
        moments: Tensor,
        start: int,
    ) -> None:
        """The forward through checked launches, which build the kernels."""
        before = self.predicting_arguments(given, moments, start)
        after = self.forward_arguments(x, y, self.parts(rows, moments, start), residual, moments, start)
        run(self.predicting, before)
        run(self.forward_launches, after)
        if aligned(x, y, residual, *(given or ())):
            self.predicting_direct = direct(self.predicting, before)
            there = len(self.predicting_direct) == len(before)
            self.forward_direct = direct(self.forward_launches, after) if there else ()
            self.rows_offset = rows.data_ptr() % ALIGNED

    def predicting_arguments(
        self, given: Transition | None, moments: Tensor, start: int
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of the launch that computes the prior."""
        if given is None:
            return []
        previous, matrix, noise = given
        return [(*previous.unbind(0), matrix, noise, None, *self.prior(moments, start), None)]

    def parts(self, rows: Tensor, moments: Tensor, start: int) -> tuple[Tensor, ...]:
        """γ, β, the moments of the prior and the gain, each (G, C)."""
        weight, bias, *prior, gain = rows.unbind(0)
        return weight, bias, *(self.prior(moments, start) if self.predicting else prior), gain

    def prior(self, moments: Tensor, start: int) -> tuple[Tensor, ...]:
        """Mean and variance of the prior, each (G, C)."""
        return moments.as_strided(*self.posterior_form, start + 4 * self.step).unbind(0)

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
        """Gradients of x, of the rows (5, G, C) and of the residual. Then of the posterior before, matrix and noise."""
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        if not grad_posterior.is_contiguous():
            grad_posterior = grad_posterior.contiguous()
        moments = memory.moments
        dx, d_rows = torch.empty_like(x), moments.new_empty((ROWS, self.groups, self.channels))
        d_residual = torch.empty_like(x) if self.keeps_output else None
        to_residual = d_residual if self.keeps_output else grad_y if self.residual else None
        launches = self.backward_direct
        grad_at, x_at, dx_at, rows_at = grad_y.data_ptr(), x.data_ptr(), dx.data_ptr(), rows.data_ptr()
        y_at = None if y is None else y.data_ptr()
        d_residual_at = None if d_residual is None else d_residual.data_ptr()
        arrived_at = grad_posterior.data_ptr()
        odd = (grad_at | x_at | dx_at | (y_at or 0) | (d_residual_at or 0) | arrived_at) % ALIGNED
        if not launches or odd or rows_at % ALIGNED != self.rows_offset:
            parts, arrived = self.parts(rows, moments, start), (*grad_posterior.unbind(0), None, None)
            arguments = self.backward_arguments(grad_y, x, y, dx, d_rows, d_residual, parts, moments, start, arrived)
            run(self.backward_launches, arguments)
            if aligned(grad_y, x, y, dx, d_residual, grad_posterior):
                self.backward_direct = direct(self.backward_launches, arguments)
            return dx, d_rows, to_residual, self._differentiate_prior(d_rows, given, memory, to_matrix)
        step, pitch = self.step_bytes, self.pitch_bytes
        mean, d_weight = moments.data_ptr() + 4 * start, d_rows.data_ptr()
        bias = rows_at + pitch if self.masked else None
        prior_mean, prior_var = rows_at + 2 * pitch, rows_at + 3 * pitch
        if given is not None:
            prior_mean, prior_var = mean + 4 * step, mean + 5 * step
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        addresses = (
            rows_at, bias, prior_mean, prior_var, rows_at + 4 * pitch,
            mean, mean + step, mean + 2 * step, mean + 3 * step, arrived_at, arrived_at + step, None, None,
            d_weight, d_weight + step, d_weight + 2 * step, d_weight + 3 * step, d_weight + 4 * step,
        )  # fmt: skip
        if self.backward_scratch is None:
            launches[0](stream, grad_at, x_at, y_at, dx_at, d_residual_at, *addresses)
        else:
            sums = memory.scratch.of(moments, self.backward_scratch.values)
            launches[0](stream, grad_at, x_at, y_at, d_residual_at, sums, rows_at, bias, mean, mean + step)
            launches[1](stream, d_residual_at or grad_at, x_at, dx_at, sums, *addresses)
        return dx, d_rows, to_residual, self._differentiate_prior(d_rows, given, memory, to_matrix)

    def _differentiate_prior(
        self, d_rows: Tensor, given: Transition | None, memory: Memory, to_matrix: bool
    ) -> Predicted:
        """Gradients of the posterior before, of the matrix and of the noise."""
        if given is None:
            return None, None, None
        previous, matrix, noise = given
        d_previous, d_noise = torch.empty_like(previous), torch.empty_like(noise)
        d_matrix = torch.empty_like(matrix) if to_matrix else None
        launches = self.differentiating_direct.get(to_matrix)
        previous_at, matrix_at, noise_at = previous.data_ptr(), matrix.data_ptr(), noise.data_ptr()
        if not launches or (previous_at | matrix_at | noise_at) % ALIGNED:
            arguments = self.differentiating_arguments(d_rows, given, d_previous, d_matrix, d_noise)
            run(self.differentiating[to_matrix], arguments)
            if aligned(*given):
                self.differentiating_direct[to_matrix] = direct(self.differentiating[to_matrix], arguments)
            return d_previous, d_matrix, d_noise
        step, previous_step, d_previous_at = self.step_bytes, self.previous_step, d_previous.data_ptr()
        d_mean = d_rows.data_ptr() + 2 * step
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        shares = memory.scratch.of(memory.moments, self.share_values)
        noise_shares = shares + 4 * self.noise_share
        launches[0](
            stream, d_mean, d_mean + step, previous_at, previous_at + previous_step, matrix_at,
            None if d_matrix is None else d_matrix.data_ptr(), shares, noise_shares,
        )  # fmt: skip
        launches[1](
            stream, shares, noise_shares, noise_at, None, None,
            d_previous_at, d_previous_at + previous_step, d_noise.data_ptr(), None,
        )  # fmt: skip
        return d_previous, d_matrix, d_noise

    def differentiating_arguments(
        self, d_rows: Tensor, given: Transition, d_previous: Tensor, d_matrix: Tensor | None, d_noise: Tensor
    ) -> list[tuple[Tensor | None, ...]]:
        """The arguments of both launches."""
        previous, matrix, noise = given
        shares = torch.empty(self.share_values, device=matrix.device)
        parts = shares, shares[self.noise_share :]
        return [
            (*d_rows.unbind(0)[2:4], *previous.unbind(0), matrix, d_matrix, *parts),
            (*parts, noise, None, None, *d_previous.unbind(0), d_noise, None),
        ]

    def launches_of_step(self, like: Tensor, rows: Tensor, moments: Tensor, start: int) -> Iterator[Step]:
        residual, kept = like if self.residual else None, like if self.keeps_output else None
        parts, d_rows = self.parts(rows, moments, start), torch.empty(rows.shape, device=rows.device)
        arrived = *torch.empty(self.posterior_form[0], device=rows.device).unbind(0), None, None
        given = None
        if self.predicting:
            previous = torch.empty(self.previous_shape, device=rows.device)
            matrix = torch.empty(self.channels, self.previous_shape[2], device=rows.device)
            given = previous, matrix, torch.empty(1, device=rows.device)
        yield self.predicting, self.predicting_arguments(given, moments, start)
        yield self.forward_launches, self.forward_arguments(like, like, parts, residual, moments, start)
        yield (
            self.backward_launches,
            self.backward_arguments(like, like, kept, like, d_rows, kept, parts, moments, start, arrived),
        )
        if given is not None:
            previous, matrix, noise = given
            arguments = self.differentiating_arguments(d_rows, given, previous, matrix, noise)
            yield self.differentiating[True], arguments
