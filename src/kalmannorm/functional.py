"""`batch_kalman_norm`: normalize with the prior fused with what the batch shows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kalmannorm._groups import cast, group_size, statistics_dtype
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
) -> tuple[Tensor, Moments, Moments]:
    """The diagonal op on checked arguments: output, posterior, observation. γ, β are (C,), or (G, C) to differ."""
    size = statistics_batch_size
    if transformed():
        return exportable.normalize(
            x, prior, gain, weight, bias, statistics_batch_size=size, eps=eps, residual=residual, relu=relu
        )
    if prior is None:
        mean = var = gain = None
    else:
        dtype = statistics_dtype(x)
        mean, var = cast(prior.mean, dtype), cast(prior.var, dtype)
        gain = None if gain is None else cast(gain, dtype)
    x = x.contiguous(memory_format=registered.memory_format_of(x))
    y, *moments = registered.run(x, mean, var, gain, weight, bias, size or 0, eps, residual, relu)
    return y, Moments(*moments[:2]), Moments(*moments[2:])


def observe(x: Tensor, statistics_batch_size: int | None) -> Moments:
    """Mean and biased variance of each group, (G, C), in float32 or better."""
    if transformed():
        return exportable.observe_groups(x, group_size(x.shape[0], statistics_batch_size))
    return Moments(
        *registered.observe(x.contiguous(memory_format=registered.memory_format_of(x)), statistics_batch_size or 0)
    )


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
    """Normalize x (N, C, *) with the posterior of each group; return (y, posterior).

    Args:
        prior: predicted `Moments`, (G, C) or (1, C); None normalizes with the observation alone, as batch norm does.
        gain: q, trust in the observation: a number in (0, 1), or a tensor () or (C,), which is not inspected.
            Ignored where there is no prior.
        weight, bias: γ, β of shape (C,), or None.
        statistics_batch_size: m, examples per group; None takes the whole batch as one group. The last group is
            smaller where m does not divide N.
        covariance: "full" keeps (G, C, C) covariances in the moments and still normalizes by their diagonal.
        residual: of the shape and dtype of x, added to the result.
        relu: whether a ReLU follows, in the same pass. For the backward x is kept, and y with a residual or on a CPU.

    Gradients flow to x, to the prior, gain, weight and bias, and from the returned posterior.
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
