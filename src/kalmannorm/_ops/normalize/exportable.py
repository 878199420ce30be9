"""The op in plain, differentiable operations that every exporter knows.

They are used for exported inference, for torch.func and for the full covariance. There is no custom op, so an exported
program does not need this library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kalmannorm import _filter as kalman
from kalmannorm._groups import cast, expand_groups, group_size, lone_last, merge_examples, statistics_dtype
from kalmannorm.moments import Moments
from kalmannorm.moments.core import full_precision


def observe_examples(x: Tensor) -> Moments:
    """Mean and biased variance of each single example, (N, C), in float32 or float64."""
    values = x.to(statistics_dtype(x)).flatten(2) if x.dim() > 2 else x.to(statistics_dtype(x)).unsqueeze(2)
    mean = values.mean(2)
    return Moments(mean, (values - mean.unsqueeze(2)).square().mean(2))


def observe_groups(x: Tensor, size: int) -> Moments:
    return merge_examples(observe_examples(x), size)


def observe_joined(x: Tensor, size: int, observe: Callable[[Tensor, int], Moments] = observe_groups) -> Moments:
    """`observe` without a prior: a last group of one value per channel joins the group before it.

    Both groups get the joint moments, so there is still one row per group.
    """
    if not lone_last(x, size):
        return observe(x, size)
    start = x.shape[0] - size - 1
    last = observe(x[start:], size + 1)
    rows = [last, last] if start == 0 else [observe(x[:start], size), last, last]
    mean, var = torch.cat([each.mean for each in rows]), torch.cat([each.var for each in rows])
    covs = [each.cov for each in rows if each.cov is not None]
    return Moments(mean, var, torch.cat(covs) if covs else None)


def apply(x: Tensor, moments: Moments, weight: Tensor | None, bias: Tensor | None, size: int, eps: float) -> Tensor:
    """y = γ (x - mean) / sqrt(var + eps) + β. `size` examples share a row of the moments. γ, β are (C,) or (G, C)."""
    dtype = moments.mean.dtype
    # A quotient: onnxruntime 1.23 breaks the graph of (1 / σ) γ if the legacy exporter joined equal γ of several norms.
    var = moments.var + eps
    scale = torch.rsqrt(var) if weight is None else cast(weight, dtype) / torch.sqrt(var)

    def spread(rows: Tensor) -> Tensor:
        rows_NC = expand_groups(rows, x.shape[0], size)
        return rows_NC.reshape(rows_NC.shape + (1,) * (x.dim() - 2))

    y = (cast(x, dtype) - spread(moments.mean)) * spread(scale)
    if bias is not None:
        y = y + spread(cast(bias, dtype).reshape(-1, x.shape[1]))
    return cast(y, x.dtype)


def finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y


def posterior_of(prior: Moments | None, observation: Moments, gain: Tensor | None) -> Moments:
    """The posterior, in the observation's dtype. Without a prior it is the observation."""
    if prior is None or gain is None:
        return observation
    dtype = observation.mean.dtype
    return kalman.update(prior.to(dtype), observation, cast(gain, dtype))


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
    """Output, posterior and observation, as the op returns them."""
    size = group_size(x.shape[0], statistics_batch_size)
    observation = observe_joined(x, size) if prior is None else observe_groups(x, size)
    posterior = posterior_of(prior, observation, gain)
    y = finish(apply(x, posterior, weight, bias, size, eps), residual, relu)
    return y, posterior, observation


def observe_covariances(x: Tensor, size: int) -> Moments:
    """Moments of each group with (G, C, C) covariances. Full groups are one product, a smaller last group a second."""
    N, C = x.shape[:2]
    full = N - N % size
    means, covs = [], []
    for part, groups in ((x[:full], full // size), (x[full:], 1)):
        if part.shape[0] == 0:
            continue
        values = part.to(statistics_dtype(x)).movedim(1, -1).reshape(groups, -1, C)
        mean = values.mean(1)
        centred = values - mean.unsqueeze(1)
        means.append(mean)
        covs.append(centred.transpose(1, 2) @ centred / values.shape[1])
    cov = torch.cat(covs)
    return Moments(torch.cat(means), cov.diagonal(dim1=-2, dim2=-1), cov)


def normalize_full(
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
    """Output, posterior and observation with covariances. Normalization uses their diagonal."""
    size = group_size(x.shape[0], statistics_batch_size)
    with full_precision(x.device):
        observe = observe_covariances if prior is not None else partial(observe_joined, observe=observe_covariances)
        observation = observe(x, size)
        if prior is not None and prior.cov is None:
            prior = Moments(prior.mean, prior.var, torch.diag_embed(prior.var))
        posterior = posterior_of(prior, observation, gain)
    y = finish(apply(x, posterior, weight, bias, size, eps), residual, relu)
    return y, posterior, observation
