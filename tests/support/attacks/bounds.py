"""How far arithmetic in float32 may be from the exact op: a running error analysis, in float64.

Every quantity has an `Amount`: its value, a bound of its terms' absolute values and a bound of its error. A result is
rounded once for each operation on the way to it, and `u` stands for the roundings of one formula together. Where terms
cancel, the error is relative to the terms and not to their sum: no order of the operations could do better.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDINGS = 8
"""Of one formula without a sum: at most so many operations follow each other in it."""


class Precision(NamedTuple):
    """Of the statistics: relative error of one formula, absolute error near 0, and where numbers overflow."""

    u: float
    tiny: float
    largest: float


def precision(dtype: torch.dtype, values: int = 1) -> Precision:
    """Where sums are of so many values, which are added one after the other at worst."""
    info, roundings = torch.finfo(dtype), ROUNDINGS + values
    return Precision(roundings * info.eps / 2, roundings * info.smallest_normal * info.eps, info.max / 16)


class Amount(NamedTuple):
    """A value, the sum of its terms' absolute values, and how far float32 may be from it."""

    value: Tensor
    terms: Tensor
    error: Tensor


Pair = tuple[Amount, Amount]


class Slabs:
    """x (N, C, *) as (G, m, C, L), a smaller last group filled up with values that do not count."""

    def __init__(self, x: Tensor, size: int) -> None:
        self.shape, self.size = x.shape, size
        self.there = self.view(torch.ones_like(x))
        self.count = self.there.sum((1, 3))[:, :1]  # values of each group, (G, 1)

    def view(self, x: Tensor) -> Tensor:
        missing = -x.shape[0] % self.size
        flat = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).reshape(x.shape[0] + missing, x.shape[1], -1)
        return flat.view(-1, self.size, *flat.shape[1:])

    def back(self, slabs: Tensor) -> Tensor:
        return slabs.flatten(0, 1)[: self.shape[0]].reshape(self.shape)

    def mean(self, slabs: Tensor) -> Tensor:
        return (slabs * self.there).sum((1, 3)) / self.count


def rows(values: Tensor) -> Tensor:
    """(G, C) to broadcast over (G, m, C, L)."""
    return values[:, None, :, None]


class Forward(NamedTuple):
    """Bounds of the forward, (G, C): the observation, the posterior, ρ; and what is squared on the way to it."""

    observed_mean: Amount
    observed_var: Amount
    surprise: Amount
    mean: Amount
    var: Amount
    rho: Amount
    highest: Tensor


def observe(x: Tensor, slabs: Slabs, at: Precision, *, merged: bool = False) -> Pair:
    """Mean and variance; those of examples first, which are merged, round more where |mean| ≫ σ."""
    values = slabs.view(x)
    mean, size = slabs.mean(values), slabs.mean(values.abs())
    mean_error = at.u * size + at.tiny
    away = values - rows(mean)
    var = slabs.mean(away.square())
    error = at.u * var + mean_error.square() + at.tiny
    return Amount(mean, size, mean_error), Amount(var, var, error + 2 * var.sqrt() * mean_error if merged else error)


def fuse(seen: Pair, prior: tuple[Tensor, Tensor] | None, gain: Tensor | None, eps: float, at: Precision) -> Forward:
    mean, var = seen
    if prior is None or gain is None:
        nothing = torch.zeros_like(mean.value)
        surprise = Amount(nothing, nothing, nothing)
        return Forward(*seen, surprise, mean, var, inverse_deviation(var, eps, at), var.value)
    prior_mean, prior_var = prior
    q, p = gain, 1 - gain
    d = mean.value - prior_mean
    surprise = Amount(d, mean.terms + prior_mean.abs(), mean.error + at.u * (mean.value.abs() + prior_mean.abs()))
    parts = p * prior_mean.abs() + q * mean.terms
    fused = Amount(p * prior_mean + q * mean.value, parts, at.u * parts + q * mean.error + at.tiny)
    total = p * prior_var + q * var.value + p * q * d.square()
    moving = p * q * (2 * d.abs() * surprise.error + surprise.error.square())
    spread = Amount(total, total, at.u * total + q * var.error + moving + at.tiny)
    return Forward(mean, var, surprise, fused, spread, inverse_deviation(spread, eps, at), d.square() + var.value)


def inverse_deviation(var: Amount, eps: float, at: Precision) -> Amount:
    """ρ = (var + eps)^-½; its `error` is relative, and inf where the variance may as well be 0."""
    relative = 0.5 * var.error / (var.value + eps)
    relative = torch.where(relative < 0.1, 1.2 * relative + at.u, torch.inf)
    rho = (var.value + eps).rsqrt()
    return Amount(rho, rho, relative)


def normalized(
    x: Tensor, slabs: Slabs, mean: Amount, rho: Amount, weight: Amount, bias: Amount, at: Precision
) -> Amount:
    """y, (N, C, *). γ and β are rows (G, C) or (1, C) with errors of their own."""
    values = slabs.view(x)
    away = (values - rows(mean.value)).abs()
    scale = rows(weight.terms * rho.value)
    size = (values.abs() + rows(mean.terms)) * scale
    error = rows(mean.error) * scale + away * scale * rows(rho.error) + at.u * (size + rows(bias.terms))
    error = error + away * rows(rho.value * weight.error) + rows(bias.error)
    error = error + at.tiny * (1 + scale + rows(weight.terms))
    y = (values - rows(mean.value)) * rows(weight.value * rho.value) + rows(bias.value)
    return Amount(slabs.back(y), slabs.back(size), slabs.back(error))


class Backward(NamedTuple):
    """Bounds of the gradients: of x (N, C, *), of the others (G, C) for each group by itself."""

    x: Amount
    prior_mean: Amount
    prior_var: Amount
    gain: Amount
    weight: Amount
    bias: Amount
    highest: Tensor


def differentiate(
    x: Tensor,
    grads: list[Tensor],
    slabs: Slabs,
    forward: Forward,
    prior: tuple[Tensor, Tensor] | None,
    gain: Tensor | None,
    weight: Amount,
    at: Precision,
    far: float,
) -> Backward:
    """Errors alone; values are left at 0, for the reference has them. `far` is that of `normalize.aten`."""
    g = slabs.view(grads[0]).abs()
    arriving = [t.abs() for t in grads[1:]]
    values, (mean, var, d), rho = slabs.view(x), forward[:3], forward.rho
    off = rho.error + at.u
    away = (values - rows(forward.mean.value)).abs()
    sum_g = g.sum((1, 3))
    sum_gx = rho.value * (g * away).sum((1, 3))
    gx_error = rho.value * (sum_g * forward.mean.error + at.tiny) + sum_gx * off + at.tiny * (1 + sum_g)
    scale = weight.terms * rho.value
    slack = weight.error * rho.value
    at_mean = arriving[0] + scale * sum_g
    mean_error = at.u * at_mean + scale * sum_g * off + slack * sum_g + at.tiny
    at_var = arriving[1] + 0.5 * scale * rho.value * sum_gx
    # γρ times S1 may underflow before it is multiplied by ρ.
    strength_error = scale * (gx_error + 2 * sum_gx * off) + slack * sum_gx + at.tiny
    var_error = at.u * at_var + 0.5 * rho.value * strength_error + at.tiny
    nothing = torch.zeros_like(at_mean)
    of_prior = [Amount(nothing, nothing, nothing)] * 3
    highest = torch.maximum(at_mean, at_var)
    if prior is not None and gain is not None:
        q, p = gain, 1 - gain
        lever = d.value.abs() * at_var
        lever_error = d.value.abs() * var_error + d.error * at_var + at.u * lever + at.tiny * (1 + d.value.abs())

        def carried(share: Tensor, other: Tensor) -> Amount:
            terms = share * (at_mean + 2 * other * lever)
            error = share * (mean_error + 2 * other * lever_error) + at.u * terms + at.tiny * (1 + d.value.abs())
            return Amount(nothing, terms, error)

        turn = (p - q).abs()
        inner = at_mean + turn * lever
        spread = var.value + prior[1]
        terms = d.value.abs() * inner + at_var * spread
        error = d.error * inner + d.value.abs() * (mean_error + turn * lever_error) + at.u * terms + at.tiny
        error = error + var_error * spread + at_var * (var.error + at.u * spread)
        # The reference differentiates p and q each by itself, and what is far larger than the result cancels.
        naive = at_mean * (mean.value.abs() + prior[0].abs()) + at_var * (spread + d.value.square())
        error = error + precision(torch.float64).u * naive
        of_prior = [carried(p, q), Amount(nothing, p * at_var, p * var_error + at.tiny), Amount(nothing, terms, error)]
        at_mean, mean_error = carried(q, p)[1:]
        at_var, var_error = q * at_var, q * var_error + at.u * q * at_var + at.tiny
        highest = torch.stack([highest, lever, terms]).amax(0)
    at_mean, at_var = at_mean + arriving[2], at_var + arriving[3]
    mean_error, var_error = mean_error + at.u * at_mean, var_error + at.u * at_var
    # The expanded form b x + (c - b x̄) may take the place of b (x - x̄) + c where x̄ is near.
    near = torch.minimum(mean.value.abs(), far / rho.value)
    off_mean = (values - rows(mean.value)).abs()
    dx = rows(scale) * g * rows(off) + rows(slack) * g + at.u * rows(scale) * g
    dx = dx + (rows(mean_error) + 2 * rows(var_error) * off_mean) / rows(slabs.count)
    dx = dx + 2 * rows(at_var) * (rows(mean.error + at.u * near) + at.u * off_mean) / rows(slabs.count)
    dx = dx + at.tiny * (1 + off_mean + rows(near))
    x_error = Amount(grads[0], slabs.back(rows(scale) * g), slabs.back(dx))
    of_weight = Amount(nothing, sum_gx, gx_error + at.u * sum_gx)
    of_bias = Amount(nothing, sum_g, at.u * sum_g + at.tiny)
    highest = torch.stack([highest, sum_gx, (g * away).sum((1, 3)) * 2, 2 * at_var * off_mean.amax((1, 3))]).amax(0)
    return Backward(x_error, *of_prior, of_weight, of_bias, highest)


def pooled(moments: Pair, shares: Tensor, kind: str, eps: float, at: Precision) -> Pair:
    """One row (C,) of all groups, as running statistics of that kind see it."""
    mean, var = moments
    centre, size = (shares * mean.value).sum(0), (shares * mean.terms).sum(0)
    middle = Amount(centre, size, (shares * mean.error).sum(0) + at.u * size + at.tiny)
    if kind == "sigma":
        sigma = (var.value + eps).sqrt()
        total = (shares * sigma).sum(0)
        error = (shares * torch.minimum(0.5 * var.error / sigma, var.error.sqrt())).sum(0) + at.u * total
        return middle, Amount(total, total, error)
    away = (mean.value - centre).abs() if kind == "total" else torch.zeros_like(mean.value)
    off = mean.error + middle.error + at.u * (mean.value.abs() + size)
    spread = var.value + away.square()
    total = (shares * spread).sum(0)
    error = var.error + 2 * away * off + (off.square() if kind == "total" else 0)
    return middle, Amount(total, total, (shares * error).sum(0) + at.u * total + at.tiny)


def updated(mean: Tensor, var: Tensor, batch: Pair, alpha: float, kind: str, eps: float, at: Precision) -> Pair:
    """Where moving averages go; `batch` is of `pooled`."""
    step = batch[0].value - mean
    off = batch[0].error + at.u * (batch[0].value.abs() + mean.abs())
    size = mean.abs() + alpha * step.abs()
    middle = Amount(mean + alpha * step, size, alpha * off + at.u * size + at.tiny)
    if kind == "sigma":
        sigma = (1 - alpha) * (var + eps).sqrt() + alpha * batch[1].value
        error = alpha * batch[1].error + at.u * (sigma + (var + eps).sqrt())
        squared = (sigma.square() - eps).clamp(min=0)
        return middle, Amount(
            squared, sigma.square(), 2 * sigma * error + error.square() + at.u * (sigma.square() + eps)
        )
    spread = (1 - alpha) * step.square() if kind == "total" else torch.zeros_like(step)
    error = batch[1].error + (1 - alpha) * (2 * step.abs() * off + off.square() if kind == "total" else 0)
    target = batch[1].value + spread
    size = var + alpha * target
    return middle, Amount(var + alpha * (target - var), var + target, alpha * error + at.u * size + at.tiny)


def mixed(parts: list[tuple[Tensor, Pair]], at: Precision) -> Pair:
    """Moments of a mixture of these, each with its weight."""
    mean = sum((weight * moments[0].value for weight, moments in parts), torch.zeros(()))
    size = sum((weight * moments[0].terms for weight, moments in parts), torch.zeros(()))
    error = sum((weight * moments[0].error for weight, moments in parts), torch.zeros(())) + at.u * size + at.tiny
    var, var_error = torch.zeros_like(mean), torch.zeros_like(mean)
    squares = [(centre.value - mean).square() + spread.value + spread.error for _, (centre, spread) in parts]
    for weight, (centre, spread) in parts:
        away = (centre.value - mean).abs()
        off = centre.error + error + at.u * (centre.terms + size)
        var = var + weight * (spread.value + away.square())
        var_error = var_error + weight * (spread.error + 2 * away * off + off.square())
    highest = torch.stack(squares).amax(0)  # whatever its weight
    return Amount(mean, size, error), Amount(var, highest, var_error + at.u * var + at.tiny)
