"""The expected results of a norm: the naive reference of `_ops/normalize/naive.py` in float64, output and all
gradients.

If a value before a ReLU is within rounding of 0, its gradient may be either of two values. A sum over thousands of
values shows the difference, so the upstream gradient is set to zero there. For half precision the margin is wide,
because torch's GroupNorm rounds its statistics to the dtype of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.normalize import naive
from kalmannorm.lab.errors import LabError

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Tolerance, relative to the largest value of each result."""
MARGIN = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Margin around 0 before a ReLU, where the standard deviation is 1."""
PARTS = ("output", "gradient of x", "of weight", "of bias", "of prior mean", "of prior var", "of gain")


class Truth(NamedTuple):
    results: list[Tensor]
    """In the order of `PARTS`. Without a prior there are three gradients."""
    upstream: Tensor
    """The gradient of the output that they belong to."""


def of_groups(leaves: Sequence[Tensor], upstream: Tensor, size: int, *, relu: bool, strided: bool = False) -> Truth:
    """Groups of `size` neighbours, or with `strided` groups of every (N / size)-th example.

    The leaves are x, γ, β and, if there is a prior, its mean and variance and the gain.
    """
    doubled = _doubled(leaves)
    x, weight, bias, *filtered = doubled
    mean, var, gain = filtered or (None, None, None)
    order = torch.arange(x.shape[0], device=x.device)
    if strided:
        order = order.view(size, -1).t().reshape(-1)
    together = x.index_select(0, order)
    y = naive.batch_kalman_norm(together, mean, var, gain, weight, bias, size, EPS)[0]
    return _finished(y.index_select(0, order.argsort()), doubled, upstream, relu)


def of_channels(leaves: Sequence[Tensor], upstream: Tensor, groups: int, *, relu: bool) -> Truth:
    """GroupNorm: every group of channels of every example is treated as one channel of one example."""
    doubled = _doubled(leaves)
    x, weight, bias = doubled
    one = x.reshape(1, x.shape[0] * groups, -1)
    y = naive.batch_kalman_norm(one, None, None, None, None, None, 1, EPS)[0].reshape(x.shape)
    return _finished(y * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1), doubled, upstream, relu)


def of_settled(
    leaves: Sequence[Tensor],
    upstream: Tensor,
    running: tuple[Tensor, Tensor],
    averages: Tensor,
    size: int,
    *,
    relu: bool,
) -> Truth:
    """Population inference, with gradients of the posterior that follow from averages of Σ g and Σ g z.

    Leaves as in `of_groups`, with a prior. The posterior has no part in the output, but in the gradient.
    """
    doubled = _doubled(leaves)
    x, weight, bias, prior_mean, prior_var, gain = doubled
    shape, examples = (1, -1, 1, 1), x.shape[0]
    mean, rho = running[0].double(), (running[1].double() + EPS).rsqrt()
    y = (x - mean.view(shape)) * (rho * weight).view(shape) + bias.view(shape)
    posterior = naive.batch_kalman_norm(x, prior_mean, prior_var, gain, None, None, size, EPS)[1:3]
    sizes = torch.tensor([min(size, examples - start) for start in range(0, examples, size)], device=x.device)
    sum_g, sum_gz, _ = averages.double().unbind(1)
    share = (sizes / examples).double().unsqueeze(1)
    scale = rho * weight.detach()
    if relu:
        upstream = torch.where(y.detach().abs() > MARGIN[upstream.dtype], upstream, 0)
        y = torch.relu(y)
    grads = upstream.double(), -share * scale * sum_g, -0.5 * share * scale * rho * sum_gz
    return Truth([y.detach(), *torch.autograd.grad((y, *posterior), doubled, grads)], upstream)


def of_population(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, relu: bool) -> Tensor:
    """Normalization with running statistics: they take the place of the prior, and a gain of 0 uses the prior alone."""
    gain = torch.zeros((), dtype=torch.float64, device=x.device)
    prior_mean, prior_var = mean.double().unsqueeze(0), var.double().unsqueeze(0)
    affine = weight.double(), bias.double()
    return naive.batch_kalman_norm(x.double(), prior_mean, prior_var, gain, *affine, 0, EPS, None, relu)[0]


def of_example(leaves: Sequence[Tensor], mean: Tensor, var: Tensor, size: int, *, relu: bool) -> Tensor:
    """Every example with size - 1 average examples, whose moments are given. Leaves as in `of_groups`, with a prior."""
    x, weight, bias, prior_mean, prior_var, q = (leaf.detach().double() for leaf in leaves)
    mean, var, shape = mean.double(), var.double(), (-1, x.shape[1], 1, 1)
    first = (x.mean((2, 3)) + (size - 1) * mean) / size
    second = (x.square().mean((2, 3)) + (size - 1) * (var + mean.square())) / size
    mean_post = (1 - q) * prior_mean + q * first
    second_post = (1 - q) * (prior_var + prior_mean.square()) + q * second
    deviation = torch.sqrt(second_post - mean_post.square() + EPS)
    y = (x - mean_post.view(shape)) / deviation.view(shape) * weight.view(shape) + bias.view(shape)
    return torch.relu(y) if relu else y


def _doubled(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def _finished(y: Tensor, doubled: list[Tensor], upstream: Tensor, relu: bool) -> Truth:
    if relu:
        upstream = torch.where(y.detach().abs() > MARGIN[upstream.dtype], upstream, 0)
        y = torch.relu(y)
    return Truth([y.detach(), *torch.autograd.grad(y, doubled, upstream.double())], upstream)


def check(what: str, results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error. Raises an error if it is larger than rounding."""
    tolerance, worst = TOLERANCE[results[0].dtype], 0.0
    for part, found, true in zip(PARTS, results, expected, strict=False):
        error = float((found.double() - true).abs().max() / true.abs().max())
        if not error < tolerance:
            raise LabError(f"{what} is wrong, so nothing is timed: {part} is off by {error:.1e}, limit {tolerance:.0e}")
        worst = max(worst, error)
    return worst
