"""One call of a captured model: an autograd node that replays the graphs of forward and backward.

The memory of a graph is written again by the next replay. So nothing that leaves a graph shares memory with it: outputs
and gradients are copies. Between the forward and the backward of a call nobody else may use the memory of its graphs.
The ticket of the call says whether this is still so.

A backward that the captured one cannot serve runs the forward again, eagerly, with the random numbers and statistics
of the first one, and differentiates it. These are backwards with `create_graph` or `retain_graph`, and backwards from
other outputs than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from kalmannorm._model.graphed.capture import Captured

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)
CHANGED = (
    "kalmannorm.graphed: a parameter or buffer was changed in place between the forward and its backward, and the "
    "backward needs the old values. Call backward before the optimizer's step."
)
TWICE = (
    "kalmannorm.graphed: the second backward through one forward. Call the model itself instead of the graphed one, or "
    "join the losses."
)
OTHER_SETTINGS = (
    "kalmannorm.graphed: a setting of the model was changed between the forward and its backward. This backward needs "
    "the old one, because it runs the forward again."
)


class Ticket:
    """Belongs to one call. It lives as long as the call's autograd node. `done`: its graphs are free again."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


class Replay(torch.autograd.Function):
    """Inputs: the captured model, the ticket, then all tensors of the call and all trained parameters that it uses."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, ticket: Ticket, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.captured, ctx.ticket, ctx.again = captured, ticket, None
        ctx.random = captured.random_state()
        inputs = tensors[: captured.inputs]
        outputs = captured.forward(inputs)
        ctx.versions = captured.versions()
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(
            *(output for output, wanted in zip(outputs, captured.differentiable, strict=True) if not wanted)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        captured, ticket = ctx.captured, ctx.ticket
        inputs = ctx.saved_tensors
        if captured.versions() != ctx.versions:
            raise RuntimeError(CHANGED)
        if ctx.again is None and ticket.done:
            raise RuntimeError(TWICE)
        pattern = [grad is not None for grad in grads]
        fits = pattern == captured.pattern
        if ctx.again is None and fits and not torch.is_grad_enabled() and not _keeps_graph():
            found = captured.backward([grad for grad in grads if grad is not None])
        else:
            if not fits:
                captured.other_pattern = pattern
            found = _again(ctx, inputs, grads)
        ticket.done = True
        return None, None, *found


def replayed(captured: Captured, ticket: Ticket, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`Replay.apply` without a Python loop over all parameters, which looks for remains of `torch.func` among them.

    It runs outside of `torch.func` only.
    """
    base: Any = super(torch.autograd.Function, Replay)
    own = unwrap_dead_wrappers(tuple(inputs))
    outputs: tuple[Tensor, ...] = base.apply(captured, ticket, *own, *captured.reached)
    return outputs


def _again(ctx: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients from an eager forward, which later backwards of this call use too."""
    captured, differentiated, keeps = ctx.captured, torch.is_grad_enabled(), bool(_keeps_graph())
    if ctx.again is None:
        with captured.state.lock:  # another thread may capture now, and give the model other parameters
            if not captured.current():
                raise RuntimeError(OTHER_SETTINGS)
            ctx.again = captured.again(inputs, ctx.random)
    outputs, wanted = ctx.again
    if not keeps:
        ctx.again = None
    asked = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    if not asked:
        return [None] * len(wanted)
    found = iter(
        torch.autograd.grad(
            [output for output, _ in asked],
            [tensor for tensor in wanted if tensor is not None],
            [grad for _, grad in asked],
            retain_graph=keeps or differentiated,
            create_graph=differentiated,
            allow_unused=True,
        )
    )
    return [None if tensor is None else next(found) for tensor in wanted]
