"""The closing phase of a norm: its output is drawn from the statistics of a group to the running statistics.

With the posterior (μ, v) of a group, ρ = 1 / sqrt(v + eps), the running statistics (m, s²) of earlier forwards, and a
strength λ between 0 and 1:

    forward   r = clip(1 / (ρ s), 1/L, L)^λ      d = λ clip((μ - m) / s, -D, D)      s includes eps
              z = r (x - μ) ρ + d                y = γ z + β
    limits    L = 3^(1 / (1 - λ))                D = 5 / (1 - λ)
    backward  r and d are constants. The gradients of μ and v contain the sums of g = dL/dy and of g z over the group.
              By 1 - λ these are the group's own sums, by λ their expectations from earlier steps.

The expectations may also contain the sums of the present forward, over all of its groups, by a share κ (`present`).

At λ = 0 this is the norm as it is. The limits widen with λ, and at λ = 1 nothing is clipped. Then neither direction
depends on the group, as if the batch were infinite: z = (x - m) / s, and the output is that of `population` inference.
With the group's own sums at λ = 1, a step would no longer undo what it did to mean and scale, and small groups diverge.
`settled.py` computes λ = 1 in one pass for each direction, if `present` is 0.

The expectations are moving averages of two sums per backward, Σ g and Σ g z over all values of x. They are gradients of
the loss with respect to β and γ. A mean loss does not change them with the size of x, so they also fit a last batch
that is smaller. They are divided by the values of x when they are used. They do not contain γ, so γ = 0 is no problem.

The result is the gradient of no function. So it has no second derivative, and `torch.func` cannot transform it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmannorm import _filter as kalman
from kalmannorm._groups import cast, group_sizes, statistics_dtype
from kalmannorm._ops.dispatch import transformed
from kalmannorm._ops.normalize import exportable, registered
from kalmannorm.moments import Moments

R_MAX, D_MAX = 3.0, 5.0
"""The limits at λ = 0."""
Affine = tuple[Tensor | None, Tensor | None]
"""γ and β, each (C,) or (G, C)."""


class Target(NamedTuple):
    """What a forward is drawn to: running mean and variance, the averages in units of this loss, and λ."""

    mean: Tensor
    var: Tensor
    averages: Tensor
    strength: Tensor | None
    """None: the norm is settled, and λ is 1."""
    present: float = 0.0


def refuse_transforms() -> None:
    if transformed():
        raise RuntimeError(
            "a norm in its closing phase has no derivative that torch.func can transform; end the phase first, with "
            "ClosingPhase.remove()"
        )


class _Rows(NamedTuple):
    """r, d and what follows from them, each (G, C)."""

    step: Tensor
    """ρ r"""
    r: Tensor
    d: Tensor
    expected: tuple[Tensor, Tensor]
    """The part of the gradients of μ and v that does not depend on the group, without γ."""
    drawn: Tensor | float
    """λ times the share of all values that each group has, (G, 1) or one number."""

    @classmethod
    def of(cls, posterior: Moments, target: Target, share: Tensor | float, eps: float) -> _Rows:
        """`share`: the share of all values that each group has, (G, 1) or one number."""
        dtype = posterior.mean.dtype
        assert target.strength is not None
        mean, var, averages, strength = (each.to(dtype) for each in (*target[:3], target.strength))
        rho, inverse = (posterior.var + eps).rsqrt(), (var + eps).rsqrt()
        own, largest = 1 - strength, torch.finfo(dtype).max
        # Finite also at λ = 1, where 1 / (1 - λ) is infinite: ρ may be 0, and 0 times infinity is NaN.
        most_r = torch.pow(R_MAX, 1 / own).clamp(max=largest)
        most_d = (D_MAX / own).clamp(max=largest)
        r = torch.minimum(torch.maximum(inverse / rho, 1 / most_r), most_r) ** strength
        away = (posterior.mean - mean) * inverse
        d = strength * torch.minimum(torch.maximum(away, -most_d), most_d)
        step, drawn = rho * r, strength * share
        sums = drawn * averages.t()[:2].unsqueeze(1)
        return cls(step, r, d, (-step * sums[0], -0.5 * step.square() * sums[1]), drawn)

    def including(self, at_scale: Tensor, at_shift: Tensor, present: float) -> _Rows:
        """The same with expected sums that contain those of this forward by the share `present`."""
        g, gz = at_shift.sum(0), (self.r * at_scale + self.d * at_shift).sum(0)
        mean = torch.lerp(self.expected[0], -self.step * self.drawn * g, present)
        var = torch.lerp(self.expected[1], -0.5 * self.step.square() * self.drawn * gz, present)
        return _Rows(self.step, self.r, self.d, (mean, var), self.drawn)

    def parameters(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """γ r and γ d + β."""
        return weight * self.r, weight * self.d + bias

    def backward(self, at_scale: Tensor, at_shift: Tensor, weight: Tensor, probe: Tensor) -> tuple[Tensor, ...]:
        """Gradients of γ, β and the probe, from those of γ r and γ d + β, which are sums over groups."""
        sums = at_shift, self.r * at_scale + self.d * at_shift  # of g and of g z
        whole = [each.sum(0) for each in sums]
        collected = torch.stack([*whole, torch.ones_like(whole[0])], 1).to(probe.dtype)
        return sums[1].sum_to_size(weight.shape), sums[0].sum_to_size(weight.shape), collected


def _share(x: Tensor, size: int, like: Tensor) -> Tensor | float:
    positions = x.numel() // (x.shape[0] * x.shape[1])
    return group_sizes(x.shape[0], size, like) * (positions / (x.numel() // x.shape[1]))


def given_affine(affine: Affine, channels: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """γ and β in the dtype of the statistics. Without them, ones and zeros."""
    weight, bias = affine
    return (
        torch.ones(channels, device=device, dtype=dtype) if weight is None else cast(weight, dtype),
        torch.zeros(channels, device=device, dtype=dtype) if bias is None else cast(bias, dtype),
    )


def corrected(
    posterior: Moments, affine: Affine, target: Target, probe: Tensor, *, eps: float, x: Tensor, size: int
) -> tuple[Moments, Tensor, Tensor]:
    """Moments to normalize x with, and γ r and γ d + β, all (G, C), for a posterior that was computed elsewhere.

    The moments are the posterior, but their gradients are those of the closing phase.
    """
    like = posterior.mean
    mean, var, scale, shift = _Corrected.apply(  # type: ignore[no-untyped-call]
        *posterior[:2], *given_affine(affine, x.shape[1], like.device, like.dtype), probe, *target,
        _share(x, size, like), eps,
    )  # fmt: skip
    return Moments(mean, var), scale, shift


class _Corrected(torch.autograd.Function):
    """The op that follows computes the group's own sums: they are the gradients of its moments, γ and β."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, probe: Tensor, run_mean: Tensor,
        run_var: Tensor, averages: Tensor, strength: Tensor, present: float, share: Tensor | float, eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        target = Target(run_mean, run_var, averages, strength)
        rows = _Rows.of(Moments(mean, var), target, share, eps)
        ctx.present, ctx.drawn = present, rows.drawn
        ctx.save_for_backward(weight, probe, 1 - strength.to(mean.dtype), *rows[:3], *rows.expected)
        return mean.view_as(mean), var.view_as(var), *rows.parameters(weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, at_mean: Tensor, at_var: Tensor, at_scale: Tensor, at_shift: Tensor) -> tuple[Any, ...]:
        weight, probe, own, step, r, d, *expected = ctx.saved_tensors
        rows = _Rows(step, r, d, (expected[0], expected[1]), ctx.drawn)
        if ctx.present:
            rows = rows.including(at_scale, at_shift, ctx.present)
        of_moments = own * at_mean + weight * rows.expected[0], own * at_var + weight * rows.expected[1]
        return *of_moments, *rows.backward(at_scale, at_shift, weight, probe), *[None] * 7


def normalize_closing(
    x: Tensor,
    prior: Moments | None,
    gain: Tensor | None,
    affine: Affine,
    target: Target,
    probe: Tensor,
    *,
    statistics_batch_size: int | None,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Moments, Moments]:
    """Output, posterior and observation, as `functional.normalize` returns them, in the closing phase."""
    dtype = statistics_dtype(x)
    given: list[Tensor | None] = [None, None, None] if prior is None else [prior.mean, prior.var, gain]
    x = registered.dense(x)
    y, *moments = _Closing.apply(  # type: ignore[no-untyped-call]
        x, *[None if each is None else cast(each, dtype) for each in given],
        *given_affine(affine, x.shape[1], x.device, dtype), residual, probe, *target,
        statistics_batch_size or 0, eps, relu,
    )  # fmt: skip
    return y, Moments(*moments[:2]), Moments(*moments[2:])


class _Closing(torch.autograd.Function):
    """The op with another prior and a smaller gain, which make the same posterior.

    The gain is q' = q (1 - λ). So the op multiplies the group's own sums by 1 - λ before they reach x. The new prior
    combines the prior, with weight p = 1 - q, and the rest of the observation, with weight q λ.

    The other part of the gradient is known before the backward. It enters as a gradient of the observation. So one pass
    writes dx, and nothing is rounded before it is added.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, prior_mean: Tensor | None, prior_var: Tensor | None, gain: Tensor | None, weight: Tensor,
        bias: Tensor, residual: Tensor | None, probe: Tensor, run_mean: Tensor, run_var: Tensor, averages: Tensor,
        strength: Tensor, present: float, size: int, eps: float, relu: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        seen = Moments(*registered.observe(x, size))
        own = 1 - strength.to(seen.mean.dtype)
        # Not 0: the variance of x may be infinite, and 0 times infinity is NaN. Not 1: p' would be 0.
        tiny = torch.finfo(own.dtype).eps
        if prior_mean is None or prior_var is None or gain is None:
            prior, posterior, trust = None, seen, own.clamp(tiny**3, 1 - tiny)
            other = seen
        else:
            prior = Moments(prior_mean, prior_var)
            posterior = exportable.posterior_of(prior, seen, gain)
            trust = (gain * own).clamp(min=tiny**3)
            other = exportable.posterior_of(prior, seen, gain * (1 - own) / (1 - trust))
        target, share = Target(run_mean, run_var, averages, strength), _share(x, size or len(x), seen.mean)
        rows = _Rows.of(posterior, target, share, eps)
        inputs = x, other.mean, other.var, trust, *rows.parameters(weight, bias), size, eps, residual, relu
        output = registered.batch_kalman_norm(*inputs) if registered.watched(x) else registered.forward(*inputs)
        registered.save(ctx, inputs, output)
        ctx.closing, ctx.present = (prior, gain, seen, own, other, trust, weight, probe, rows), present
        return output[0], posterior.mean.clone(), posterior.var.clone(), *output[3:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        prior, gain, seen, own, other, trust, weight, probe, rows = ctx.closing
        grad_y, at_mean, at_var, *at_seen = grads
        saved = ctx.saved_tensors  # once: an activation checkpoint gives them only once
        if ctx.present:  # one pass for the sums, one for dx: parts of dx that are rounded before they are added diverge
            nothing = torch.zeros_like(seen.mean)
            sums = registered.differentiate_saved(ctx, saved, grad_y, None, None, nothing, nothing)
            rows = rows.including(sums[4], sums[5], ctx.present)
        wanted = Moments(
            weight * rows.expected[0] + (0 if at_mean is None else at_mean),
            weight * rows.expected[1] + (0 if at_var is None else at_var),
        )
        known = wanted if prior is None else kalman.update_backward(prior, seen, gain, wanted)[1]
        to_seen = [mine if grad is None else mine + grad for mine, grad in zip(known[:2], at_seen, strict=True)]
        found = registered.differentiate_saved(ctx, saved, grad_y, None, None, *to_seen)
        dx, of_other_mean, of_other_var, _, at_scale, at_shift, _, _, d_residual, _ = found
        of_prior: list[Tensor | None] = [None, None, None]
        if prior is not None:
            # Gradients of μ and v by the group's own sums, from those of the other prior.
            d_var = of_other_var / (1 - trust)
            d_mean = of_other_mean / (1 - trust) + 2 * trust * (seen.mean - other.mean) * d_var
            whole = Moments(own * d_mean + wanted.mean, own * d_var + wanted.var)
            of_moments, _, of_gain = kalman.update_backward(prior, seen, gain, whole)
            of_prior = [of_moments.mean.sum_to_size(prior.mean.shape), of_moments.var.sum_to_size(prior.var.shape)]
            of_prior.append(of_gain.sum_to_size(gain.shape) if gain.dim() else of_gain.sum())
        d_weight, d_bias, collected = rows.backward(at_scale, at_shift, weight, probe)
        return dx, *of_prior, d_weight, d_bias, d_residual, collected, *[None] * 8
