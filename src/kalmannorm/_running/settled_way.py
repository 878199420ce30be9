"""The short way of settled norms without priors: at the end of a closing phase, if they have none or it has faded.

Such a norm reads nothing of other norms. So nothing is computed before the first norm, as bundles are. The norms still
share memory: for their moments, from which the statistics of all are updated together, and for the gradients of γ and
β. Everything else is as in `short_way.py`: what is prepared, when it expires, and how statistics are updated.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from kalmannorm._groups import statistics_dtype
from kalmannorm._ops.dispatch import row_kernels_for, settled_alone_kernels_for
from kalmannorm._ops.normalize.row_kernels import Read, RowKernels, SettledAloneKernels
from kalmannorm._ops.normalize.settled_alone import OwnGradients, settle_alone
from kalmannorm._running import first_step
from kalmannorm._running.bundling import Part
from kalmannorm._running.closing_sums import States, settled_states
from kalmannorm._running.prior_bundles import groups_in
from kalmannorm._running.short_way import Block, Place, ShortForward, ShortPart, collects, prepare, stream_of
from kalmannorm._support.activation_checkpoints import OUTSIDE, unseen
from kalmannorm._wiring.program import Context
from kalmannorm.moments import closed

PLAIN_TENSORS = Tensor, nn.Parameter


class SettledBlock(Block):
    """What the settled norms of one part share in one forward."""

    def __init__(self, part: ShortPart, groups: list[int], x: Tensor, states: States) -> None:
        super().__init__(part, statistics_dtype(x), groups, x, settled=states)
        self.own = OwnGradients(part.channels) if self.gradients else None


def idle_gain(norm: Any) -> Tensor | None:
    """The gain of a norm whose prior has faded. It is not read any more, and gets a gradient of zero."""
    gain: Tensor | None = norm._parameters.get("gain_logit")
    return gain if gain is not None and gain.requires_grad else None


class SettledForward(ShortForward):
    """One forward of a model whose norms are settled and have no priors, or of a part of it, on the short way."""

    def _prepare(self, norm: Any, x: Tensor, residual: Tensor | None, relu: bool, block: Block) -> RowKernels | None:
        return prepare(norm, x, residual, relu, block, settled_alone_kernels_for)

    def _block(self, call: int, target: int | None, norm: Any, x: Tensor) -> Block | None:
        if row_kernels_for(x, 0) is None or not closed.applicable() or not norm.runs_settled():
            return None
        context = Context(x.device, statistics_dtype(x), {}, x.shape[0])
        with unseen():
            if True not in self.bundles.kernels_built:
                first_step.build(self.bundles, None if self.model is None else self.model.module(), call, x, context)
            self.bundles.update(context)
        number = self.bundles.of_call.get(call)
        if number is None or stream_of(x.get_device()) < 0:
            return None
        part: Part = self.bundles.parts[number]
        return SettledBlock(ShortPart.of(part, False), groups_in(part, context), x, settled_states(part))

    def _run(
        self,
        place: Place,
        target: int | None,
        block: Block,
        kernels: Any,
        norm: Any,
        x: Tensor,
        residual: Tensor | None,
        segment: Any,
    ) -> Tensor | None:
        assert isinstance(block, SettledBlock)
        index = place.index
        state = block.settled.get(index)
        if state is None or not place.settled or norm.rebuilds or segment is not OUTSIDE:
            return None
        read = _read(place, norm, kernels, block)
        if read is None or not collects(state, block):
            return None
        memory, start = block.memory, block.layout.starts[index]
        if block.own is None:
            return kernels.settle(x, read, residual, memory, start)  # type: ignore[no-any-return]
        gain, averages = idle_gain(norm), block.averages(index)
        return settle_alone(x, read, state.probe, gain, residual, kernels, memory, start, averages, block.own, index)


def _read(place: Place, norm: Any, kernels: SettledAloneKernels, block: SettledBlock) -> Read | None:
    """What the norm reads. None if kernels cannot read it. The same tensors fit again, if they have the same memory."""
    parameters, buffers = norm._parameters, norm._buffers
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or bias is None:
        weight, bias = _completed(norm, weight, bias, block)
    tensors, known = (weight, bias, buffers["running_mean"], buffers["running_var"]), place.fitting
    if known is not None and known[0] is block.moments.dtype and all(map(operator.is_, tensors, known[1])):
        read: Read = known[1]
        if (*map(Tensor.data_ptr, tensors),) == read.addresses:
            return read
    for tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS or tensor.dtype is not block.moments.dtype:
            return None
        if tensor.shape != (kernels.channels,) or tensor.get_device() != block.index or not tensor.is_contiguous():
            return None
        if tensor.is_meta or tensor.data_ptr() == 0:
            return None
    read = Read(*tensors, tuple(tensor.data_ptr() for tensor in tensors))
    place.fitting = block.moments.dtype, read
    return read


def _completed(norm: Any, weight: Any, bias: Any, block: SettledBlock) -> tuple[Any, Any]:
    """γ and β, with ones and zeros for those that the norm does not have. None for a tensor that something computes,
    as a parametrization does: it needs the long way.
    """
    found = []
    for name, tensor, value in (("weight", weight, 1.0), ("bias", bias, 0.0)):
        if tensor is None and name in norm._parameters:
            tensor = block.part.constant(value, norm.num_features, block.moments)
        found.append(tensor)
    return found[0], found[1]
