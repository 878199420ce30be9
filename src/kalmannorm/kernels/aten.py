"""The op in PyTorch's own operations: any device, any layout, all groups in one pass.

    forward    c = x - x̄  ->  S = mean c²  ->  update  ->  y = γρ c + (β + γρ (x̄ - mean)),  ρ = (var + eps)^-½
               then y + residual, and ReLU
    backward   S0 = Σ g, S1 = ρ Σ g (x - mean)  ->  update_backward  ->  dx = γρ g + 2 dS (x - x̄)/M + dx̄/M

x is looked at as rows, one per example: (N, C, L) or, for channels_last, (N, L, C), both without a copy. Every pass
works on centred values, so nothing cancels where |x̄| ≫ σ, and y is made in place of c.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kalmannorm import filter as kalman
from kalmannorm.groups import expand_groups, group_size, group_sizes, mean_groups, statistics_dtype, sum_groups
from kalmannorm.moments import Moments

PIECE = 1024


class Rows:
    """x (N, C, *) seen as rows of L positions per example; `axis` is where the positions lie.

    With one position, as in (N, C), both views are the same memory, and (N, 1, C) is the one that vectorises.
    """

    def __init__(self, x: Tensor) -> None:
        examples, channels = x.shape[:2]
        self.positions = x.numel() // (examples * channels)
        self.channels_last = not x.is_contiguous()
        self.axis = 1 if self.channels_last or self.positions == 1 else 2
        if self.axis == 1:
            self.values = x.movedim(1, -1).reshape(examples, self.positions, channels)
        else:
            self.values = x.reshape(examples, channels, self.positions)

    def spread(self, rows_NC: Tensor) -> Tensor:
        """(N, C) shaped to broadcast over the positions."""
        return rows_NC.unsqueeze(self.axis)

    def restore(self, values: Tensor, x: Tensor) -> Tensor:
        """Values in this view back in the shape and memory format of x."""
        if self.channels_last:
            return values.view(x.movedim(1, -1).shape).movedim(-1, 1)
        return values.view(x.shape)


def mean_square(centred: Tensor, axis: int) -> Tensor:
    if axis == 1:
        return centred.square().mean(1)
    # A norm is one vectorised pass, but it adds up in plain float32: over pieces, or large maps would lose digits.
    positions = centred.shape[2]
    whole = positions - positions % PIECE
    total: Tensor = torch.linalg.vector_norm(centred[:, :, whole:], dim=2).square_()
    if whole:
        pieces = centred[:, :, :whole].reshape(*total.shape, -1, PIECE)
        total = total + torch.linalg.vector_norm(pieces, dim=3).square_().sum(2)
    return total / positions


def forward(
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics_batch_size: int,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, posterior mean and variance, observed mean and variance, all (G, C) but the first.

    γ and β are (C,) or (G, C); `residual` lies as x does.
    """
    rows = Rows(x)
    examples = x.shape[0]
    size = group_size(examples, statistics_batch_size)

    def spread(moments_GC: Tensor) -> Tensor:
        return rows.spread(expand_groups(moments_GC, examples, size))

    centre = mean_groups(rows.values.mean(rows.axis, dtype=statistics_dtype(x)), size)
    # The output is the base of its rows, not a view of them: autograd refuses in-place activations on views.
    y = torch.empty_like(x)
    rows_of_y = Rows(y).values
    whole = rows.values.dtype == centre.dtype
    centred = torch.sub(rows.values, spread(centre), out=rows_of_y) if whole else rows.values - spread(centre)
    # The first mean carries the rounding of a long float32 sum; what it missed is the mean of the centred values.
    missed = mean_groups(centred.mean(rows.axis), size)
    var = mean_groups(mean_square(centred, rows.axis), size) - missed * missed
    observation = Moments(centre + missed, var.clamp_(min=0))
    posterior = observation
    if prior_mean is not None and prior_var is not None and gain is not None:
        posterior = kalman.update(Moments(prior_mean, prior_var), observation, gain)

    scale = torch.rsqrt(posterior.var + eps)
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    shift = (centre - posterior.mean) * scale
    if bias is not None:
        shift = shift + bias.to(shift.dtype)
    centred.mul_(spread(scale)).add_(spread(shift))
    if residual is not None:
        centred.add_(Rows(residual).values)
    if relu:
        centred.relu_()
    if not whole:
        rows_of_y.copy_(centred)
    # An op may not return one tensor twice.
    if posterior is observation:
        posterior = Moments(observation.mean.clone(), observation.var.clone())
    return y, posterior.mean, posterior.var, observation.mean, observation.var


def backward(
    grad_y: Tensor | None,
    grad_moments: Sequence[Tensor | None],
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Sequence[Tensor],
    y: Tensor | None,
    statistics_batch_size: int,
    eps: float,
    relu: bool = False,
    bias_rows: int = 0,
) -> list[Tensor]:
    """dx, and what exists of the gradients of residual, prior mean, prior var, gain, weight and bias, in this order.

    Each has the shape and dtype of what was given; the bias's is (bias_rows, C), in float32 or better. `y` comes with
    a residual under a ReLU, `bias` with a ReLU alone: they tell what it let through.
    """
    rows = Rows(x)
    examples = x.shape[0]
    size = group_size(examples, statistics_batch_size)
    posterior, observation = Moments(*moments[:2]), Moments(*moments[2:])
    rho = torch.rsqrt(posterior.var + eps)
    scale = rho if weight is None else weight.to(rho.dtype) * rho

    def spread(moments_GC: Tensor) -> Tensor:
        return rows.spread(expand_groups(moments_GC, examples, size))

    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    if relu and y is None:
        z = (rows.values - spread(posterior.mean)).mul_(spread(scale))
        if bias is not None:
            z.add_(spread(bias.to(rho.dtype).reshape(-1, x.shape[1])))
        grad_y = torch.where(rows.restore(z, x) <= 0, 0, grad_y)
    elif y is not None:
        grad_y = torch.where(y <= 0, 0, grad_y)
    grad_rows = Rows(grad_y)
    sum_g, sum_gx = (
        sum_groups(part, size)
        for part in reduce_gradient(rows, grad_rows, expand_groups(posterior.mean, examples, size))
    )
    sum_gx = sum_gx * rho

    at_posterior = Moments(-scale * sum_g, -0.5 * scale * rho * sum_gx)
    at_observation = at_posterior = plus(at_posterior, *grad_moments[:2])
    of_prior: list[tuple[Tensor, Tensor]] = []
    if prior_mean is not None and prior_var is not None and gain is not None:
        prior = Moments(prior_mean, prior_var)
        at_prior, at_observation, at_gain = kalman.update_backward(prior, observation, gain, at_posterior)
        of_prior = [(at_prior.mean, prior_mean), (at_prior.var, prior_var), (at_gain, gain)]
    at_observation = plus(at_observation, *grad_moments[2:])

    count = group_sizes(examples, size, rho) * rows.positions
    a, b, centre, c = (
        spread(t) for t in (scale, 2 * at_observation.var / count, observation.mean, at_observation.mean / count)
    )
    # b (x - x̄), not b x - b x̄: the expanded form cancels where |x̄| ≫ σ.
    dx = (rows.values - centre).mul_(b).addcmul_(grad_rows.values.to(rho.dtype), a).add_(c).to(x.dtype)
    results = [rows.restore(dx, x)] if y is None else [rows.restore(dx, x), grad_y]
    results += [summed(g, like.shape).to(like.dtype) for g, like in of_prior]
    if weight is not None:
        results.append(summed(sum_gx, weight.shape).to(weight.dtype))
    if bias_rows:
        results.append(summed(sum_g, (bias_rows, x.shape[1])))
    return results


def plus(grad: Moments, mean: Tensor | None, var: Tensor | None) -> Moments:
    """With what else arrives, where something does."""
    return Moments(grad.mean if mean is None else grad.mean + mean, grad.var if var is None else grad.var + var)


def summed(grad_GC: Tensor, shape: Sequence[int]) -> Tensor:
    """A gradient per group, summed to the shape that was broadcast: (), (1,), (C,), (1, C) or (G, C)."""
    padded = (1, 1, *shape)
    return grad_GC.sum_to_size(padded[-2:]).reshape(shape)


def reduce_gradient(rows: Rows, grad_rows: Rows, mean_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Σ g and Σ g (x - mean) of each example and channel, (N, C)."""
    if rows.axis == 2 and mean_NC.device.type == "cpu":
        # As one example with N·C channels, both sums are one pass of PyTorch's native batch-norm backward.
        mean, ones = mean_NC.reshape(-1), torch.ones(mean_NC.numel(), dtype=mean_NC.dtype)
        flat = (1, -1, rows.positions)
        _, dot, total = torch.ops.aten.native_batch_norm_backward(
            grad_rows.values.view(flat),
            rows.values.view(flat),
            ones,
            mean,
            ones,
            mean,
            ones,
            True,
            0.0,
            [False, True, True],
        )
        return total.view(mean_NC.shape), dot.view(mean_NC.shape)
    centred = rows.values - rows.spread(mean_NC)
    return (
        grad_rows.values.sum(grad_rows.axis, dtype=mean_NC.dtype),
        centred.mul_(grad_rows.values).sum(rows.axis),
    )
