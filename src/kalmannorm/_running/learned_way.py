"""The short way of norms with a learned transition.

A norm computes its prior from posteriors of this forward, so no bundle has it. A bundle still has γ, β and the gain of
many norms. The norm gets them as rows, and one autograd node predicts, observes, updates and normalizes: see
`_ops/normalize/learned.py`. A posterior is one tensor here, (2, G, C). So a sum of posteriors is one operation.

Everything else is as in `short_way.py`: what is prepared, when it expires, and how statistics are updated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from kalmannorm._ops.dispatch import learned_kernels_for
from kalmannorm._ops.normalize.learned import filtered
from kalmannorm._ops.normalize.row_kernels import LearnedKernels, RowKernels, Transition
from kalmannorm._running.prior_bundles import PriorBundles
from kalmannorm._running.short_way import Block, Place, ShortForward, prepare
from kalmannorm._support.activation_checkpoints import OUTSIDE, segments, unseen
from kalmannorm._wiring.program import Context, Posterior, Program
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import Moments


class Posteriors(Protocol):
    """The relay, as far as it is needed here."""

    program: Program

    def arrived(self) -> dict[int, Moments | Tensor]:
        """The posteriors of this forward, by call."""

    def deliver(self, call: int, posterior: Moments | Tensor) -> None:
        """Give the posterior of a norm to the norms that read it."""

    def deliver_outside(self, call: int, posterior: Tensor) -> None:
        """`deliver` outside of all segments of checkpoints."""


class LearnedForward(ShortForward):
    """One forward of a model with learned transitions, or of a part of it, on the short way."""

    def __init__(
        self, bundles: PriorBundles, memo: dict[Any, Any], model: WeakModule | None, relay: Posteriors
    ) -> None:
        super().__init__(bundles, memo, model)
        self.relay, self.program, self.posteriors = relay, relay.program, relay.arrived()
        self.last: Transition | None = None  # what the last norm computed its prior from

    def _prepare(self, norm: Any, x: Tensor, residual: Tensor | None, relu: bool, block: Block) -> RowKernels | None:
        inputs = 0 if norm.transition is None else norm.prior_features
        return prepare(norm, x, residual, relu, block, partial(learned_kernels_for, inputs=inputs), inputs=inputs)

    def _run(
        self,
        place: Place,
        target: int | None,
        block: Block,
        kernels: LearnedKernels,
        norm: Any,
        x: Tensor,
        residual: Tensor | None,
        segment: Any,
    ) -> Tensor | None:
        if place.call.predicts is not (target is not None):
            return None
        if not block.gradients and segments():
            return None  # a re-entrant checkpoint: its recomputation needs the posteriors that entered it
        given = None
        if target is not None:
            if segment is OUTSIDE:
                given = self._given(place, target, block, kernels, norm)
            else:
                with unseen():
                    given = self._given(place, target, block, kernels, norm)
            if given is None:
                return None
        index, region = place.index, segment if norm.rebuilds else None
        start = block.layout.starts[index]
        y, posterior = filtered(x, block.rows[index], residual, given, kernels, block.memory, start, region)
        if segment is OUTSIDE:
            self.relay.deliver_outside(place.call.identity, posterior)
        else:
            self.relay.deliver(place.call.identity, posterior)
        self.last = given
        return y

    def _again(
        self, place: Place, block: Block, kernels: LearnedKernels
    ) -> Callable[[Tensor, Tensor | None, Any], Tensor]:
        rows, start, memory = block.rows[place.index], block.layout.starts[place.index], block.memory
        call, deliver, given = place.call.identity, self.relay.deliver, self.last
        if given is not None:
            # Without its graph: the graph holds the segment, and the segment would hold the graph.
            previous = given[0].detach().requires_grad_(given[0].requires_grad)
            given = previous, *given[1:]

        def again(x: Tensor, residual: Tensor | None, region: Any) -> Tensor:
            y, posterior = filtered(x, rows, residual, given, kernels, memory, start, region)
            deliver(call, posterior)
            return y

        return again

    def _given(self, place: Place, target: int, block: Block, kernels: LearnedKernels, norm: Any) -> Transition | None:
        """The posterior before, the matrix and the noise. None if something is missing or has another form."""
        step: Any = self.program.steps[target]
        previous: Any = self.posteriors.get(step.call) if step.__class__ is Posterior else None
        if previous.__class__ is not Tensor:
            previous = self._joined(target, block)
            if previous is not None and not previous.is_contiguous():
                previous = previous.contiguous()
        found = norm._modules["transition"].tensors()
        if previous is None or found is None or previous.shape != kernels.previous_shape:
            return None
        if previous.dtype is not block.moments.dtype or previous.device != block.device:
            return None
        matrix, noise = found
        addresses = matrix.data_ptr(), noise.data_ptr()
        fitting = place.fitting
        if fitting is None or matrix is not fitting[0] or noise is not fitting[1] or addresses != fitting[2]:
            shape = kernels.channels, kernels.previous_shape[2]
            one = noise.numel() == 1 or noise.shape == (kernels.most_noises,)
            if matrix.shape != shape or not one or not _fits(matrix, block) or not _fits(noise, block):
                return None
            if matrix.is_leaf and noise.is_leaf:  # others are new in every forward
                place.fitting = matrix, noise, addresses
        return previous, matrix, noise

    def _joined(self, target: int, block: Block) -> Tensor | None:
        """The moments that reach a norm from several posteriors, or from one that took the long way."""
        memo = self.memo.setdefault((block.device.index, block.gradients, "joined"), {})
        if target in memo:
            joined: Tensor = memo[target]
            return joined
        context = Context(block.device, block.moments.dtype, {}, block.examples)
        return self.program.join(target, context, self.posteriors, memo)


def _fits(tensor: Tensor, block: Block) -> bool:
    """Whether kernels can read a parameter. FSDP may have another kind of tensor, or none, in its place."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != block.moments.dtype:
        return False
    return tensor.device == block.device and tensor.is_contiguous() and tensor.data_ptr() != 0
