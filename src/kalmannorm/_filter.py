"""The Kalman filter on moments: predict from the layer before, then update with the observation.

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
    """Posterior: combine prior and observation. `gain` = q is the weight of the observation.

    If both have a covariance, the posterior has one too. Then q must be one number.
    """
    return mix(prior, observation, gain, 1 - gain)


def mix(prior: Moments, observation: Moments, trust: Tensor, doubt: Tensor) -> Moments:
    """`update` with a given p (`doubt`). If q is near 1, computing 1 - q would lose digits of p."""
    surprise = observation.mean - prior.mean
    # `torch.lerp` is not used: if the observation overflows, it subtracts infinity from infinity.
    mean = torch.addcmul(doubt * prior.mean, trust, observation.mean)
    if prior.cov is None or observation.cov is None:
        # Multiply by both gains before squaring the surprise. The square alone might overflow.
        var = torch.addcmul(doubt * prior.var, trust, observation.var)
        return Moments(mean, torch.addcmul(var, trust * doubt * surprise, surprise))
    outer = surprise.unsqueeze(2) * surprise.unsqueeze(1)
    cov = doubt * prior.cov + trust * observation.cov + trust * doubt * outer
    return Moments(mean, cov.diagonal(dim1=-2, dim2=-1), cov)


def update_backward(
    prior: Moments, observation: Moments, gain: Tensor, grad: Moments
) -> tuple[Moments, Moments, Tensor]:
    """Gradients of the diagonal `update` with respect to prior, observation and gain.

    The gradient with respect to the gain is (G, C). The caller sums it.
    """
    trust, doubt = gain, 1 - gain
    surprise = observation.mean - prior.mean
    # Each gradient has its own formula. Differences of two gradients would cancel as q -> 0, q -> 1 or q -> 1/2.
    # The gain is multiplied before the surprise, because the square of the surprise may be very large.
    grad_var = trust * grad.var
    lever = grad_var * surprise
    grad_gain = torch.addcmul(grad.mean, (doubt - trust) * grad.var, surprise).mul_(surprise)
    return (
        Moments(torch.sub(grad.mean, lever, alpha=2).mul_(doubt), doubt * grad.var),
        Moments(torch.addcmul(trust * grad.mean, doubt, lever, value=2), grad_var),
        grad_gain.addcmul_(grad.var, observation.var - prior.var),
    )


# A float32 sigmoid can be exactly 1. q must stay below 1. Otherwise a group of one value would have no variance.
GAIN_MARGIN = 1e-6


def gain_of(logit: Tensor) -> Tensor:
    """q in (0, 1)."""
    return GAIN_MARGIN + (1 - 2 * GAIN_MARGIN) * torch.sigmoid(logit)


def gain_slope(logit: Tensor) -> Tensor:
    """Derivative of q with respect to the logit."""
    share = torch.sigmoid(logit)
    return (1 - 2 * GAIN_MARGIN) * share * (1 - share)
