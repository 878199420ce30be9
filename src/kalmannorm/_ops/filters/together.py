"""The filters of many convolutions: with Triton kernels in one launch for each device and dtype, else one by one.

With several ranks a launch computes at most as much as DDP sends at once. DDP sends a gradient as soon as it is there,
while the backward goes on. So gradients of later layers must not wait for those of earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from kalmannorm._ops.dispatch import filters_for, on_device_of
from kalmannorm._ops.filters import aten
from kalmannorm._ops.filters.definition import Computation
from kalmannorm.moments import closed

RANKS_AT_ONCE = 25 * 2**20
"""Bytes of weights, with several ranks. A bucket of DDP has as many."""
SOON = 2**62
"""Autograd runs nodes that are ready in the order of these numbers, the largest first. Others count from 0."""


def filters_of(weights: Sequence[Tensor], computation: Computation) -> list[Tensor]:
    """The filter of each weight, with its gradient. Each has the same bits as if it were computed alone."""
    found: list[Tensor | None] = [None] * len(weights)
    alike: dict[Any, list[int]] = {}
    several, begun = _several_ranks(), dict[Any, int]()
    for place, weight in enumerate(weights):
        kind = weight.device, weight.dtype
        before = begun.get(kind, 0)
        begun[kind] = before + weight.nbytes
        alike.setdefault((*kind, before // RANKS_AT_ONCE if several else 0), []).append(place)
    for places in alike.values():
        made = _computed([weights[place] for place in places], computation)
        if several:
            _run_soon(made)
        for place, filter in zip(places, made, strict=True):
            found[place] = filter
    return [filter for filter in found if filter is not None]


def _several_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _run_soon(filters: Sequence[Tensor]) -> None:
    """Let autograd run their node as soon as it has their gradients, not at the end of the backward."""
    node = next((filter.grad_fn for filter in filters if filter.grad_fn is not None), None)
    if isinstance(node, torch.autograd.function.BackwardCFunction) and hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(SOON)


def _computed(weights: Sequence[Tensor], computation: Computation) -> Sequence[Tensor]:
    """Of weights with one device and dtype."""
    run = filters_for(*weights)
    if run is not None:
        with on_device_of(weights[0]):
            layers = run.layers_of(weights)
            if layers is not None and torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
                made: tuple[Tensor, ...] = _Node.apply(run, layers, computation, *weights)  # type: ignore[no-untyped-call]
                return made
            if layers is not None:
                filters: list[Tensor] = run.forward(weights, layers, computation)[0]
                return filters
    return [aten.computed(weight, computation) for weight in weights]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, layers: Any, computation: Computation, *weights: Tensor) -> tuple[Tensor, ...]:
        filters, statistics = run.forward(weights, layers, computation)
        ctx.run, ctx.layers, ctx.computation = run, layers, computation
        if computation != "centred":
            ctx.save_for_backward(statistics, *weights)
        ctx.set_materialize_grads(False)
        frozen = [filter for filter, needed in zip(filters, ctx.needs_input_grad[3:], strict=True) if not needed]
        ctx.mark_non_differentiable(*frozen)
        return tuple(filters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        none: tuple[None, None, None] = None, None, None
        if all(grad is None for grad in grads):
            return *none, *grads
        if torch.is_grad_enabled():  # gradients that will be differentiated again
            return *none, *_differentiated(ctx, grads)
        first = next(grad for grad in grads if grad is not None)
        with on_device_of(first):
            if ctx.computation == "centred":
                return *none, *ctx.run.backward(grads, ctx.layers, ctx.computation)
            statistics, *weights = ctx.saved_tensors
            return *none, *ctx.run.backward(grads, ctx.layers, ctx.computation, weights, statistics)


def _differentiated(ctx: Any, grads: Sequence[Tensor | None]) -> list[Any]:
    if ctx.computation == "centred":  # the function is linear and its own adjoint
        return [None if grad is None else aten.computed(grad, "centred") for grad in grads]
    computation: Computation = ctx.computation
    return closed.again(
        lambda *weights: [aten.computed(weight, computation) for weight in weights], ctx.saved_tensors[1:], grads
    )
