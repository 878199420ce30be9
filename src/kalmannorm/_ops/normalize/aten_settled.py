"""A norm with the running statistics of earlier forwards, in PyTorch operations.

    forward    y = γ (x - m) ρ + β,  ρ = (s² + eps)^-½;  then residual, and ReLU.  x̄ and S of every group are observed.
    backward   dx = γρ g + A + B (x - x̄),  with A and B from expected sums of g and g z, z = (x - m) ρ

No value of y or dx needs a sum over x. So one pass computes both: it writes y and observes, or writes dx and sums. The
formulas are those of the closing phase at λ = 1 (`_norms/closing.py`). The averages e₀ and e₁ of Σ g and Σ g z give the
gradients with respect to mean and variance of a group's posterior, with its share w of all values of x:

    dμ = -γρ w e₀      dv = -½ γρ² w e₁

`kalman.update_backward` turns them into gradients of x̄ and S. With M values in the group, A = dx̄ / M and B = 2 dS / M.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kalmannorm import _filter as kalman
from kalmannorm._groups import cast, group_sizes, statistics_dtype
from kalmannorm._ops.normalize import aten, native
from kalmannorm._ops.normalize.arguments import SettledGrads, SettledInputs, SettledResults
from kalmannorm.moments import Moments


def forward(inputs: SettledInputs) -> SettledResults:
    x, *filtered, weight, bias, mean, var, size, eps, residual, relu = inputs
    seen = Moments(*(native if native.fits(x) else aten).observe(x, size))
    if weight.dim() == 1 and bias.dim() == 1:
        # The operations of population inference, so the bits are the same.
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        y = y if residual is None else y.add_(residual)
    else:
        values = torch.empty_like(x, dtype=mean.dtype)
        slabs = aten.Slabs(x, size)
        results = slabs.parts(values)
        slabs.subtract(slabs.parts(cast(x, mean.dtype)), mean.unsqueeze(0), results)
        scale, shift = (each.view(-1, slabs.channels) for each in ((var + eps).rsqrt() * weight, bias))
        slabs.affine(results, scale, shift, results)
        y = cast(values if residual is None else values.add_(residual), x.dtype)
    y = y.relu_() if relu else y
    posterior = Moments(seen.mean.clone(), seen.var.clone())  # an op may not return the same tensor twice
    prior_mean, prior_var, gain = filtered
    if prior_mean is not None and prior_var is not None and gain is not None:
        posterior = kalman.update(Moments(prior_mean, prior_var), seen, gain)
    return SettledResults(y, *posterior[:2], *seen[:2], mean.clone(), (var + eps).rsqrt())


def backward(given: SettledGrads) -> list[Tensor]:
    """Gradients of x, γ, β and the probe (C, 3), then of the residual and of prior mean, prior var and gain, if any."""
    x, y, rho, weight = given.x, given.y, given.rho, given.weight
    slabs = aten.Slabs(x, given.statistics_batch_size)
    scale = (rho * weight).view(-1, slabs.channels)
    grad_y = given.grad_y if y is None else torch.where(y <= 0, 0, given.grad_y)
    parts, slopes = slabs.parts(cast(x, rho.dtype)), slabs.parts(cast(grad_y, rho.dtype))
    centre = given.centre.unsqueeze(0)
    if given.relu and y is None:
        slopes = aten.pass_relu(slabs, parts, slopes, centre, scale, given.bias)
    dx = torch.empty_like(x, dtype=rho.dtype)
    outputs = slabs.parts(dx)
    sum_g, sum_gz = slabs.products(slopes, parts, centre, outputs)
    sum_gz = sum_gz * rho

    examples = group_sizes(slabs.examples, slabs.size, rho)
    sums = given.averages.t()[:2].unsqueeze(1) * (examples / slabs.examples)
    expected = Moments(-scale * sums[0], -0.5 * scale * rho * sums[1])
    grad_posterior = aten.plus(expected, given.grad_mean, given.grad_var)
    grad_seen, of_prior = grad_posterior, list[Tensor]()
    if given.prior_mean is not None and given.prior_var is not None and given.gain is not None:
        prior, seen = Moments(given.prior_mean, given.prior_var), Moments(given.observed_mean, given.observed_var)
        grad_prior, grad_seen, grad_gain = kalman.update_backward(prior, seen, given.gain, grad_posterior)
        pairs = (grad_prior.mean, prior.mean), (grad_prior.var, prior.var), (grad_gain, given.gain)
        of_prior = [aten.summed(grad.expand_as(sum_g), like) for grad, like in pairs]
    grad_seen = aten.plus(grad_seen, given.grad_observed_mean, given.grad_observed_var)
    count = examples * slabs.positions
    slabs.subtract(parts, given.observed_mean, outputs)
    slabs.affine(outputs, grad_seen.var * (2 / count), grad_seen.mean / count, outputs)
    for out, g, a in zip(outputs, slopes, slabs.rows(scale), strict=False):
        out.addcmul_(g, a)

    whole = sum_g.sum(0), sum_gz.sum(0)
    collected = torch.stack([*whole, torch.ones_like(rho)], 1)
    gradients = [cast(dx, x.dtype), aten.summed(sum_gz, weight), aten.summed(sum_g, given.bias), collected]
    if given.residual:
        assert y is not None
        gradients.append(grad_y)
    return gradients + [grad.clone() if grad._base is not None else grad for grad in of_prior]


def forward_fake(inputs: SettledInputs) -> SettledResults:
    """Shapes and layouts of `forward`."""
    x, rows = inputs.x, inputs.running_mean
    groups = -(-x.shape[0] // (inputs.statistics_batch_size or x.shape[0]))
    moments = [x.new_empty((groups, x.shape[1]), dtype=statistics_dtype(x)) for _ in range(4)]
    return SettledResults(*[torch.empty_like(x), *moments, torch.empty_like(rows), torch.empty_like(rows)])


def backward_fake(given: SettledGrads) -> list[Tensor]:
    """Shapes and layouts of `backward`."""
    gradients = [torch.empty_like(each) for each in (given.x, given.weight, given.bias, given.averages)]
    gradients += [torch.empty_like(given.x)] if given.residual else []
    return gradients + [torch.empty_like(t) for t in (given.prior_mean, given.prior_var, given.gain) if t is not None]
