"""Layers that keep the recipe of their input instead of the input: convolution, linear layer, max pool.

They call the same operations of torch as the layers do, in the forward and in the backward, so their results have the
same bits. The max pool also finds its indices again, so it keeps nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmannorm._ops.normalize.recipes import Plan, Recipe

_ops: Any = torch.ops.aten


class _Reader(torch.autograd.Function):
    """A layer with input y, weight and bias. Subclasses define its forward `run` and its backward `gradients`."""

    run: Callable[..., Tensor]
    gradients: Callable[..., tuple[Tensor | None, ...]]

    @classmethod
    def read(cls, y: Tensor, weight: Tensor | None, bias: Tensor | None, recipe: Recipe, *how: Any) -> Tensor:
        assert recipe.plan is not None
        recipe.plan.readers += 1
        result: Tensor = cls.apply(y, weight, bias, (recipe.plan, recipe.tensors, how))  # type: ignore[no-untyped-call]
        return result

    @classmethod
    def forward(cls, ctx: Any, y: Tensor, weight: Tensor | None, bias: Tensor | None, given: Any) -> Tensor:
        ctx.plan, tensors, ctx.how = given
        # Bias is saved only for a double backward. It is a parameter, so it exists anyway.
        ctx.save_for_backward(weight, bias, *tensors)
        return cls.run(y, weight, bias, *ctx.how)

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, *tensors = ctx.saved_tensors
        plan: Plan = ctx.plan
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *_differentiable(cls.run, plan.attached(tensors), weight, bias, ctx.how, grad, needed), None
        return *cls.gradients(grad, plan.take(tensors), weight, bias, needed, *ctx.how), None


def _differentiable(
    run: Callable[..., Tensor],
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    how: tuple[Any, ...],
    grad: Tensor,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients with a graph: torch differentiates the layer itself."""
    inputs = [None if t is None else t.view_as(t) for t in (y, weight, bias)]  # views: a parameter may be in y's graph
    result = run(*inputs, *how)
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True, allow_unused=True))  # type: ignore[arg-type]
    return [next(found) if need else None for need in needed]


Numbers = tuple[int, ...]


class Convolution(_Reader):
    """As `F.conv1d`, `F.conv2d` and `F.conv3d`."""

    @staticmethod
    def run(
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Numbers,
        padding: Numbers,
        dilation: Numbers,
        groups: int,
    ) -> Tensor:
        return torch.convolution(y, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    @staticmethod
    def gradients(
        grad: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: tuple[bool, ...],
        stride: Numbers,
        padding: Numbers,
        dilation: Numbers,
        groups: int,
    ) -> tuple[Tensor | None, ...]:
        sizes, flipped = None if bias is None else list(bias.shape), [0] * len(stride)
        found: tuple[Tensor | None, ...] = _ops.convolution_backward(
            grad, y, weight, sizes, stride, padding, dilation, False, flipped, groups, list(needed)
        )
        return found


class Linear(_Reader):
    """As `F.linear` on a matrix."""

    @staticmethod
    def run(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(y, weight, bias)

    @staticmethod
    def gradients(
        grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        to_y, to_weight, to_bias = needed
        return (
            grad.mm(weight) if to_y else None,
            grad.t().mm(y) if to_weight else None,
            grad.sum(0) if to_bias else None,
        )


class MaxPool(_Reader):
    """As `F.max_pool2d`."""

    @staticmethod
    def run(y: Tensor, _: None, __: None, *how: Any) -> Tensor:
        pooled: Tensor = _ops.max_pool2d_with_indices(y, *how)[0]
        return pooled

    @staticmethod
    def gradients(
        grad: Tensor, y: Tensor, _: None, __: None, needed: tuple[bool, ...], *how: Any
    ) -> tuple[Tensor | None, ...]:
        _, indices = _ops.max_pool2d_with_indices(y, *how)
        return _ops.max_pool2d_with_indices_backward(grad, y, *how, indices), None, None
