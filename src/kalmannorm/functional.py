"""`batch_kalman_norm`: combine prior and observation, and normalize with the posterior."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kalmannorm._groups import cast, group_size, lone_last, statistics_dtype
from kalmannorm._ops.dispatch import transformed
from kalmannorm._ops.normalize import exportable, registered
from kalmannorm._support.checks import (
    check_channels,
    check_enough_values,
    check_gain,
    check_input,
    check_prior,
    check_residual,
    positive_int,
)
from kalmannorm.moments import Moments


def normalize(
    x: Tensor,
    prior: Moments | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    statistics_batch_size: int | None,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
    region: Any = None,
) -> tuple[Tensor, Moments, Moments]:
    """Output, posterior and observation of the diagonal op. Arguments must be checked already.

    γ and β are (C,), or (G, C) with one row per group. With a `region` the output gets a recipe: see
    `_ops/normalize/recipes.py`.
    """
    size = statistics_batch_size
    # The op has no groups of m + 1 examples. Such an x has one value per example and channel, so it is small.
    if transformed() or (prior is None and lone_last(x, group_size(x.shape[0], size))):
        return exportable.normalize(
            x, prior, gain, weight, bias, statistics_batch_size=size, eps=eps, residual=residual, relu=relu
        )
    if prior is None:
        mean = var = gain = None
    else:
        dtype = statistics_dtype(x)
        mean, var = cast(prior.mean, dtype), cast(prior.var, dtype)
        gain = None if gain is None else cast(gain, dtype)
    x = registered.dense(x)
    y, *moments = registered.run(x, mean, var, gain, weight, bias, size or 0, eps, residual, relu, region=region)
    return y, Moments(*moments[:2]), Moments(*moments[2:])


def observe(x: Tensor, statistics_batch_size: int | None, *, join_last: bool) -> Moments:
    """Mean and biased variance of each group, (G, C), in float32 or float64.

    `join_last`: a last group of one value per channel joins the group before it, as without a prior.
    """
    size = group_size(x.shape[0], statistics_batch_size)
    if join_last and lone_last(x, size):
        return exportable.observe_joined(x, size)
    if transformed():
        return exportable.observe_groups(x, size)
    return Moments(*registered.observe(registered.dense(x), statistics_batch_size or 0))


def batch_kalman_norm(
    x: Tensor,
    prior: Moments | None,
    gain: Tensor | float | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    statistics_batch_size: int | None = None,
    eps: float = 1e-5,
    covariance: Literal["diagonal", "full"] = "diagonal",
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Moments]:
    """Normalize x (N, C, *) with the posterior of each group. Return (y, posterior).

    Args:
        prior: predicted `Moments`, (G, C) or (1, C). None: normalize with the observation alone, as batch norm does.
        gain: q, the weight of the observation. A number in (0, 1), or a tensor of shape () or (C,). The values of a
            tensor are not checked. The gain is ignored if there is no prior.
        weight, bias: γ, β of shape (C,), or None.
        statistics_batch_size: m, examples per group. None: the whole batch is one group. The last group is smaller
            if m does not divide N. Without a prior, a last group of one value per channel joins the group before it.
            Then the last two rows of the posterior are equal.
        covariance: "full" keeps (G, C, C) covariances in the moments. Normalization still uses their diagonal.
        residual: a tensor with the shape and dtype of x. It is added to the result.
        relu: whether a ReLU is applied in the same pass. x is kept for the backward. y is also kept if there is a
            residual, or on a CPU.

    Gradients flow to x, prior, gain, weight and bias. They also flow back from the returned posterior.
    """
    check_input(x)
    if statistics_batch_size is not None and not isinstance(statistics_batch_size, torch.SymInt):
        statistics_batch_size = positive_int("statistics_batch_size", statistics_batch_size)
    check_channels("weight", weight, x)
    check_channels("bias", bias, x)
    if residual is not None:
        check_residual(residual, x)
    if covariance not in ("diagonal", "full"):
        raise ValueError(f"covariance must be 'diagonal' or 'full', got {covariance!r}")
    if prior is None:
        check_enough_values(x, statistics_batch_size)
        q = None
    else:
        check_prior(prior, x, statistics_batch_size)
        q = check_gain(gain, x)
        if covariance == "full" and q.numel() > 1:
            raise ValueError(f"gain must be one number with covariance='full', got shape {tuple(q.shape)}")
    run = normalize if covariance == "diagonal" else exportable.normalize_full
    y, posterior, _ = run(
        x, prior, q, weight, bias, statistics_batch_size=statistics_batch_size, eps=eps, residual=residual, relu=relu
    )
    return y, posterior
