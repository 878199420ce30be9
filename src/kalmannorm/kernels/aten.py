"""The op in PyTorch's own operations: any device, any layout, all groups in one pass.

    forward    c = x - x̄  ->  S = mean c²  ->  update  ->  y = γρ c + (β + γρ (x̄ - mean)),  ρ = (var + eps)^-½
               then y + residual, and ReLU
    backward   S0 = Σ g, S1 = ρ Σ g (x - mean)  ->  update_backward  ->  dx = γρ g + 2 dS (x - x̄)/M + dx̄/M

x is looked at in groups, without a copy. Every pass works on centred values, so nothing cancels where |x̄| ≫ σ, and y is
made in place of c. Small tensors dominate small batches, so rows (G, C) broadcast as they are and are never spread out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kalmannorm import filter as kalman
from kalmannorm.groups import group_size, group_sizes, statistics_dtype
from kalmannorm.moments import Moments

PIECE = 1024


class Slabs:
    """x (N, C, *) seen in groups: (G, m, C, L), or (G, m·L, C) for channels_last; a smaller last group by itself.

    With one position, as in (N, C), both views are the same memory, and channels last is the one that vectorises.
    """

    def __init__(self, x: Tensor, statistics_batch_size: int) -> None:
        self.examples, self.channels = x.shape[:2]
        self.size = group_size(self.examples, statistics_batch_size)
        self.positions = x.numel() // (self.examples * self.channels)
        self.last = not x.is_contiguous() or self.positions == 1
        self.whole = self.examples // self.size
        self.over = (1,) if self.last else (1, 3)

    def parts(self, x: Tensor) -> list[Tensor]:
        """The groups of x, or of a tensor that lies as x does: those of full size, then the last."""
        cut = self.whole * self.size
        pieces = [x] if cut in (0, self.examples) else [x[:cut], x[cut:]]
        return [self._view(piece, self.whole if cut and index == 0 else 1) for index, piece in enumerate(pieces)]

    def _view(self, x: Tensor, groups: int) -> Tensor:
        if self.last:
            return x.movedim(1, -1).reshape(groups, -1, self.channels)
        return x.reshape(groups, -1, self.channels, self.positions)

    def rows(self, moments_GC: Tensor) -> list[Tensor]:
        """Rows (G, C) or (1, C), shaped to broadcast over each of the parts."""
        shape = (-1, 1, self.channels) if self.last else (-1, 1, self.channels, 1)
        rows = moments_GC.view(shape)
        if self.examples % self.size == 0 or self.whole == 0 or rows.shape[0] == 1:
            return [rows] * 2
        return [rows[: self.whole], rows[self.whole :]]

    def gather(self, rows: list[Tensor]) -> Tensor:
        """Rows of each of the parts, (g, 1, C) or (g, 1, C, 1), as one (G, C)."""
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).view(-1, self.channels)


def mean_square(centred: Tensor, last: bool) -> Tensor:
    """Of every group, (g, C)."""
    if last:
        return centred.square().mean(1)
    # A norm is one vectorised pass, but it adds up in plain float32: over pieces, or large maps would lose digits.
    groups, examples, channels, positions = centred.shape
    whole = positions - positions % PIECE
    total: Tensor = torch.linalg.vector_norm(centred[..., whole:], dim=3).square_()
    if whole:
        pieces = centred[..., :whole].reshape(groups, examples, channels, -1, PIECE)
        total = total + torch.linalg.vector_norm(pieces, dim=4).square_().sum(3)
    return total.sum(1).div_(examples * positions)


def centre(values: Tensor, slabs: Slabs, out: Tensor | None = None) -> tuple[Tensor, Tensor, Moments]:
    """Centred values, what they were centred by, and the moments of one of the parts."""
    middle = values.mean(slabs.over, keepdim=True, dtype=statistics_dtype(values))
    centred = values - middle if out is None else torch.sub(values, middle, out=out)
    # The first mean carries the rounding of a long float32 sum; what it missed is the mean of the centred values.
    missed = centred.mean(slabs.over, keepdim=True)
    var = mean_square(centred, slabs.last).view(missed.shape)
    return centred, middle, Moments(middle + missed, var.addcmul_(missed, missed, value=-1).clamp_(min=0))


def observe(x: Tensor, statistics_batch_size: int) -> tuple[Tensor, Tensor]:
    """Observed mean and variance, (G, C)."""
    slabs = Slabs(x, statistics_batch_size)
    seen = [centre(values, slabs)[2] for values in slabs.parts(x)]
    return slabs.gather([m.mean for m in seen]), slabs.gather([m.var for m in seen])


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
    slabs = Slabs(x, statistics_batch_size)
    # The output is the base of its parts, not a view of them: autograd refuses in-place activations on views.
    y = torch.empty_like(x)
    parts_of_y = slabs.parts(y)
    whole = x.dtype == statistics_dtype(x)
    parts = [
        centre(values, slabs, out if whole else None) for values, out in zip(slabs.parts(x), parts_of_y, strict=True)
    ]
    middle = slabs.gather([middle for _, middle, _ in parts])
    observation = Moments(
        slabs.gather([seen.mean for *_, seen in parts]), slabs.gather([seen.var for *_, seen in parts])
    )
    posterior = observation
    if prior_mean is not None and prior_var is not None and gain is not None:
        posterior = kalman.update(Moments(prior_mean, prior_var), observation, gain)

    scale = torch.rsqrt(posterior.var + eps)
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    shift = (middle - posterior.mean).mul_(scale)
    if bias is not None:
        shift = shift.add_(bias.to(shift.dtype))
    added = [None] * 2 if residual is None else slabs.parts(residual)
    for (centred, *_), a, b, extra, out in zip(
        parts, slabs.rows(scale), slabs.rows(shift), added, parts_of_y, strict=False
    ):
        centred.mul_(a).add_(b)
        if extra is not None:
            centred.add_(extra)
        if relu:
            centred.relu_()
        if not whole:
            out.copy_(centred)
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
    slabs = Slabs(x, statistics_batch_size)
    posterior, observation = Moments(*moments[:2]), Moments(*moments[2:])
    rho = torch.rsqrt(posterior.var + eps)
    scale = rho if weight is None else rho * weight.to(rho.dtype)
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    if y is not None:
        grad_y = torch.where(y <= 0, 0, grad_y)
    values, passed = slabs.parts(x), slabs.parts(grad_y)
    if relu and y is None:
        passed = pass_relu(slabs, values, passed, posterior.mean, scale, bias)
    sums = [
        reduce_gradient(value, g, centre, slabs.last)
        for value, g, centre in zip(values, passed, slabs.rows(posterior.mean), strict=False)
    ]
    sum_g, sum_gx = (slabs.gather(list(kind)) for kind in zip(*sums, strict=True))
    sum_gx = sum_gx * rho

    at_observation = at_posterior = plus(Moments(-scale * sum_g, scale * rho * sum_gx * -0.5), *grad_moments[:2])
    of_prior: list[tuple[Tensor, Tensor]] = []
    if prior_mean is not None and prior_var is not None and gain is not None:
        prior = Moments(prior_mean, prior_var)
        at_prior, at_observation, at_gain = kalman.update_backward(prior, observation, gain, at_posterior)
        of_prior = [(at_prior.mean, prior_mean), (at_prior.var, prior_var), (at_gain, gain)]
    at_observation = plus(at_observation, *grad_moments[2:])

    count = group_sizes(slabs.examples, slabs.size, rho) * slabs.positions
    slope, constant = 2 * at_observation.var / count, at_observation.mean / count
    dx = torch.empty_like(x)
    whole = x.dtype == rho.dtype
    rows = (slabs.rows(t) for t in (scale, slope, observation.mean, constant))
    for out, value, g, a, b, middle, c in zip(slabs.parts(dx), values, passed, *rows, strict=False):
        # b (x - x̄), not b x - b x̄: the expanded form cancels where |x̄| ≫ σ.
        line = torch.sub(value, middle, out=out) if whole else value - middle
        line.mul_(b).addcmul_(g.to(rho.dtype), a).add_(c)
        if not whole:
            out.copy_(line)
    results = [dx] if y is None else [dx, grad_y]
    results += [summed(g, like.shape).to(like.dtype) for g, like in of_prior]
    if weight is not None:
        results.append(summed(sum_gx, weight.shape).to(weight.dtype))
    if bias_rows:
        results.append(summed(sum_g, (bias_rows, slabs.channels)))
    return results


def pass_relu(
    slabs: Slabs, values: list[Tensor], grads: list[Tensor], mean: Tensor, scale: Tensor, bias: Tensor | None
) -> list[Tensor]:
    """What of the gradient a ReLU lets through, of each of the parts."""
    shift = torch.zeros_like(mean[:1]) if bias is None else bias.to(mean.dtype).view(-1, slabs.channels)
    rows = (slabs.rows(t) for t in (mean, scale, shift))
    return [
        torch.where((value - centre).mul_(a).add_(b) <= 0, 0, g)
        for value, g, centre, a, b in zip(values, grads, *rows, strict=False)
    ]


def reduce_gradient(values: Tensor, grad: Tensor, mean: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    """Σ g and Σ g (x - mean) of every group, (g, C)."""
    if not last and values.device.type == "cpu":
        # As one example with a channel for every row, both sums are one pass of PyTorch's native batch-norm backward.
        rows = values.shape[:3]
        centre, ones = mean.squeeze(3).expand(rows).reshape(-1), torch.ones(rows.numel(), dtype=mean.dtype)
        flat = (1, -1, values.shape[3])
        _, dot, total = torch.ops.aten.native_batch_norm_backward(
            grad.reshape(flat), values.reshape(flat), ones, centre, ones, centre, ones, True, 0.0, [False, True, True]
        )
        return total.view(rows).sum(1), dot.view(rows).sum(1)
    over = (1,) if last else (1, 3)
    return grad.sum(over, dtype=mean.dtype), (values - mean).mul_(grad).sum(over)


def plus(grad: Moments, mean: Tensor | None, var: Tensor | None) -> Moments:
    """With what else arrives, where something does."""
    return Moments(grad.mean if mean is None else grad.mean + mean, grad.var if var is None else grad.var + var)


def summed(grad_GC: Tensor, shape: Sequence[int]) -> Tensor:
    """A gradient per group, summed to the shape that was broadcast: (), (1,), (C,), (1, C) or (G, C)."""
    values = math.prod(shape)
    if values < grad_GC.numel():
        grad_GC = grad_GC.sum(0) if values == grad_GC.shape[1] else grad_GC.sum()
    return grad_GC.reshape(shape)
