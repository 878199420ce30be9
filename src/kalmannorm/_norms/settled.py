"""A norm at the end of its closing phase, λ = 1: it normalizes with running statistics, in one pass per direction.

`closing.py` has the formulas. At λ = 1 neither direction depends on the group, so x is read once in each: the forward
reads x and writes y, the backward reads g and x and writes dx. Batch norm reads x twice in the forward, and g and x
twice in the backward. The moments of the groups are observed in the same pass, for the running statistics and the
priors of later layers. The sums of g and g z are collected in the same pass, for γ, β and the averages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmannorm._groups import cast, statistics_dtype
from kalmannorm._norms.closing import Affine, Target, given_affine
from kalmannorm._ops.normalize import registered, registered_settled
from kalmannorm._ops.normalize.arguments import SettledGrads, SettledInputs
from kalmannorm.moments import Moments


def normalize_settled(
    x: Tensor,
    prior: Moments | None,
    gain: Tensor | None,
    affine: Affine,
    target: Target,
    probe: Tensor,
    *,
    statistics_batch_size: int | None,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Moments, Moments]:
    """Output, posterior and observation, as `normalize_closing` returns them at λ = 1 without `present`."""
    dtype = statistics_dtype(x)
    filtered: list[Tensor | None] = [None, None, None] if prior is None else [prior.mean, prior.var, gain]
    x = registered.dense(x)
    y, *moments = _Settled.apply(  # type: ignore[no-untyped-call]
        x, *[None if each is None else cast(each, dtype) for each in filtered],
        *given_affine(affine, x.shape[1], x.device, dtype), residual, probe,
        *[cast(each, dtype) for each in (target.mean, target.var, target.averages)],
        statistics_batch_size or 0, eps, relu,
    )  # fmt: skip
    return y, Moments(*moments[:2]), Moments(*moments[2:])


class _Settled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, prior_mean: Tensor | None, prior_var: Tensor | None, gain: Tensor | None, weight: Tensor,
        bias: Tensor, residual: Tensor | None, probe: Tensor, run_mean: Tensor, run_var: Tensor, averages: Tensor,
        size: int, eps: float, relu: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        inputs = SettledInputs(
            x, prior_mean, prior_var, gain, weight, bias, run_mean, run_var, size, eps, residual, relu
        )
        results = registered_settled.forward(inputs)
        ctx.set_materialize_grads(False)
        # As in `registered.save`: with a residual, or on a CPU, the sign of y is the mask of the ReLU.
        masks = relu and (residual is not None or x.device.type == "cpu")
        ctx.save_for_backward(
            x, results.y if masks else None, prior_mean, prior_var, gain, weight, bias, results.centre, results.rho,
            results.observed_mean, results.observed_var, averages,
        )  # fmt: skip
        ctx.settings = size, relu, masks, None if residual is None else residual.dtype, probe.dtype
        return results[:5]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, *grad_moments: Tensor | None) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        size, relu, masks, adds, probe_dtype = ctx.settings
        grad_y = torch.zeros_like(x) if grad_y is None else grad_y
        asks = masks and adds is not None
        given = SettledGrads(*(grad_y, x, *saved, *grad_moments, size, relu, asks))
        dx, d_weight, d_bias, collected, *rest = registered_settled.backward(given)
        d_residual = rest.pop(0) if asks else None if adds is None else grad_y
        d_residual = None if d_residual is None else cast(d_residual, adds)
        of_prior: list[Tensor | None] = [*rest] if rest else [None] * 3
        return dx, *of_prior, d_weight, d_bias, d_residual, cast(collected, probe_dtype), *[None] * 6
