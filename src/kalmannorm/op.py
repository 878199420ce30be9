"""The op as PyTorch sees it: `kalmannorm::batch_kalman_norm`, its fake, its backward and its double backward.

The op is functional: it returns the moments and mutates nothing, so autograd, `torch.compile(fullgraph=True)` and
`torch.export` see one node. Its backward is an op too, with the closed form of `docs/equations.md`; the backward of
that one differentiates the naive reference, so gradients of gradients are right though not fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kalmannorm.groups import group_count, group_size, statistics_dtype
from kalmannorm.kernels import aten, reference
from kalmannorm.moments import Moments

_FORWARD = (
    "(Tensor x, Tensor? prior_mean, Tensor? prior_var, Tensor? gain, Tensor? weight, Tensor? bias, "
    "SymInt statistics_batch_size, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor[] grads, Tensor x, Tensor? prior_mean, Tensor? prior_var, Tensor? gain, Tensor? weight, "
    "Tensor[] moments, SymInt statistics_batch_size, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("kalmannorm::batch_kalman_norm", mutates_args=(), schema=_FORWARD)
def batch_kalman_norm(
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics_batch_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return aten.forward(x, prior_mean, prior_var, gain, weight, bias, statistics_batch_size, eps)


@batch_kalman_norm.register_fake
def _(
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics_batch_size: int,
    eps: float,
) -> tuple[Tensor, ...]:
    groups = group_count(x.shape[0], group_size(x.shape[0], statistics_batch_size))
    moments = (x.new_empty((groups, x.shape[1]), dtype=statistics_dtype(x)) for _ in range(4))
    return torch.empty_like(x), *moments


@torch.library.custom_op("kalmannorm::batch_kalman_norm_backward", mutates_args=(), schema=_BACKWARD)
def batch_kalman_norm_backward(
    grads: Sequence[Tensor],
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    moments: Sequence[Tensor],
    statistics_batch_size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_y = grads[0].contiguous(memory_format=memory_format_of(x))
    return aten.backward(
        grad_y,
        Moments(*grads[1:3]),
        Moments(*grads[3:5]),
        x,
        prior_mean,
        prior_var,
        gain,
        weight,
        Moments(*moments[:2]),
        Moments(*moments[2:]),
        statistics_batch_size,
        eps,
    )


@batch_kalman_norm_backward.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    moments: Sequence[Tensor],
    statistics_batch_size: int,
    eps: float,
) -> tuple[Tensor, ...]:
    return torch.empty_like(x), *(torch.empty_like(moments[0]) for _ in range(5))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, bias, ctx.statistics_batch_size, ctx.eps = inputs
    ctx.present = [t is not None for t in tensors]
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)  # no gradient needs its values
    ctx.save_for_backward(*(t for t in tensors if t is not None), *output[1:])


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = list(ctx.saved_tensors)
    moments = saved[-4:]
    tensors = [saved.pop(0) if present else None for present in ctx.present]
    x, prior_mean, prior_var, gain, weight = tensors
    like = (x, *moments)
    given = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, like, strict=True)]
    dx, *per_group = batch_kalman_norm_backward(
        given, x, prior_mean, prior_var, gain, weight, moments, ctx.statistics_batch_size, ctx.eps
    )
    like_parameters = [None if t is None else (t.shape, t.dtype) for t in tensors[1:]]
    summed = (
        None if given is None else g.sum_to_size(_row_shape(given[0])).reshape(given[0]).to(given[1])
        for g, given in zip(per_group, (*like_parameters, ctx.bias), strict=True)
    )
    return dx, *summed, None, None


def _row_shape(shape: torch.Size) -> tuple[int, int]:
    """The (rows, channels) shape that () , (C,), (1, C) or (G, C) broadcasts from."""
    padded = (1, 1, *shape)
    return padded[-2], padded[-1]


torch.library.register_autograd(batch_kalman_norm, _differentiate, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grads, x, *tensors, moments, ctx.statistics_batch_size, ctx.eps = inputs
    ctx.present = [t is not None for t in tensors]
    ctx.save_for_backward(*grads, x, *(t for t in tensors if t is not None), moments[0])


def _differentiate_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Second derivatives: differentiate the reference's own gradient. The moments depend on x, which carries it all."""
    *saved, moments = ctx.saved_tensors
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that one tensor in two places counts in each; attached, so that third derivatives are right too.
        leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in saved]
        outer, x, rest = leaves[:5], leaves[5], leaves[6:]
        ones = torch.ones_like(moments)

        def next_rows(present: bool) -> Tensor | None:
            """Rows of its own for every group, because the op returns these gradients before they are summed."""
            if not present:
                return None
            t: Tensor = rest.pop(0)
            return t.to(ones.dtype).expand(_row_shape(t.shape)) * ones

        prior_mean, prior_var, gain, weight = (next_rows(present) for present in ctx.present)
        weight = ones.clone().requires_grad_() if weight is None else weight
        bias = torch.zeros_like(ones, requires_grad=True)
        inputs = (x, prior_mean, prior_var, gain, weight, bias)
        outputs = reference.batch_kalman_norm(*inputs, ctx.statistics_batch_size, ctx.eps)
        given = [(t, g) for t, g in zip(inputs, grads, strict=True) if t is not None]
        first = torch.autograd.grad(
            outputs, [t for t, _ in given], outer, create_graph=True, allow_unused=True, materialize_grads=True
        )
        pairs = [(a, g) for a, (_, g) in zip(first, given, strict=True) if g is not None and a.requires_grad]
        second = torch.autograd.grad(
            [a for a, _ in pairs], leaves, [g for _, g in pairs], create_graph=higher, allow_unused=True
        )
    at_rest = list(second[6:])
    optional = (at_rest.pop(0) if present else None for present in ctx.present)
    return list(second[:5]), second[5], *optional, [None] * 4, None, None


torch.library.register_autograd(batch_kalman_norm_backward, _differentiate_backward, setup_context=_save_backward)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """The format x lies in without gaps; `contiguous_format` where it lies in none."""
    if x.is_contiguous():
        return torch.contiguous_format
    for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and x.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format
