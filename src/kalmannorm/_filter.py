"""The filter on moments: predict from the layer before, update with the observation; no activations here.

    predict   mean_p = A mean_prev            var_p = (A∘A) var_prev + r
    update    mean   = p mean_p + q x̄         var   = p var_p + q S + p q (x̄ - mean_p)²,   p = 1 - q

With covariances: Σ_p = A Σ A^T + r I and Σ = p Σ_p + q S + p q d d^T, d = x̄ - mean_p. `docs/equations.md` derives
them and the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm.moments import Moments
from kalmannorm.moments.core import full_precision


def predict(previous: Moments, matrix: Tensor, noise: Tensor, *, full: bool = False) -> Moments:
    """Prior (G, C) from the posterior (G, P) of the layer before; `matrix` is A (C, P), `noise` is r ≥ 0."""
    with full_precision(matrix.device):
        mean = previous.mean @ matrix.t()
        if not full:
            return Moments(mean, previous.var @ matrix.square().t() + noise)
        cov = torch.diag_embed(previous.var) if previous.cov is None else previous.cov
        cov = matrix @ cov @ matrix.t()
        cov = cov + torch.diag_embed(noise.expand(cov.shape[-1]))
        return Moments(mean, cov.diagonal(dim1=-2, dim2=-1), cov)


def update(prior: Moments, observation: Moments, gain: Tensor) -> Moments:
    """Posterior: the prior fused with the observation, with trust `gain` = q in the observation.

    The covariance is kept where both sides have one; then q must be one number.
    """
    return mix(prior, observation, gain, 1 - gain)


def mix(prior: Moments, observation: Moments, trust: Tensor, doubt: Tensor) -> Moments:
    """`update` where p = 1 - q has more digits than q near 1 leaves it."""
    surprise = observation.mean - prior.mean
    # Not `torch.lerp`: where the observation overflows, it subtracts infinity from infinity.
    mean = torch.addcmul(doubt * prior.mean, trust, observation.mean)
    if prior.cov is None or observation.cov is None:
        # Both gains come before the surprise is squared, or a square might overflow that they make small.
        var = torch.addcmul(doubt * prior.var, trust, observation.var)
        return Moments(mean, torch.addcmul(var, trust * doubt * surprise, surprise))
    outer = surprise.unsqueeze(2) * surprise.unsqueeze(1)
    cov = doubt * prior.cov + trust * observation.cov + trust * doubt * outer
    return Moments(mean, cov.diagonal(dim1=-2, dim2=-1), cov)


def update_backward(
    prior: Moments, observation: Moments, gain: Tensor, grad: Moments
) -> tuple[Moments, Moments, Tensor]:
    """Gradients of the diagonal `update`: at the prior, at the observation, and at the gain before summing, (G, C)."""
    trust, doubt = gain, 1 - gain
    surprise = observation.mean - prior.mean
    # Each from its own formula: differences of one another would cancel as q -> 0, q -> 1 or q -> 1/2. And the gain
    # comes before the surprise, whose square may be as large as the gain is small.
    grad_var = trust * grad.var
    lever = grad_var * surprise
    grad_gain = torch.addcmul(grad.mean, (doubt - trust) * grad.var, surprise).mul_(surprise)
    return (
        Moments(torch.sub(grad.mean, lever, alpha=2).mul_(doubt), doubt * grad.var),
        Moments(torch.addcmul(trust * grad.mean, doubt, lever, value=2), grad_var),
        grad_gain.addcmul_(grad.var, observation.var - prior.var),
    )


# A float32 sigmoid reaches 1 exactly; q must not, or a group of one value would have no variance at all.
GAIN_MARGIN = 1e-6


def gain_of(logit: Tensor) -> Tensor:
    """q in (0, 1)."""
    return GAIN_MARGIN + (1 - 2 * GAIN_MARGIN) * torch.sigmoid(logit)


def gain_slope(logit: Tensor) -> Tensor:
    """dq by the logit."""
    share = torch.sigmoid(logit)
    return (1 - 2 * GAIN_MARGIN) * share * (1 - share)
