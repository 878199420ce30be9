"""The closing phase of a norm: its output is drawn from the statistics of a group to the running statistics.

With the posterior (μ, v) of a group, ρ = 1 / sqrt(v + eps), the running statistics (m, s²) of earlier forwards, and a
strength λ between 0 and 1:

    forward   r = clip(1 / (ρ s), 1/3, 3)^λ      d = λ clip((μ - m) / s, -5, 5)      s includes eps
              z = r (x - μ) ρ + d                y = γ z + β
    backward  r and d are constants. The gradients of μ and v contain the sums of g = dL/dy and of g z over the group.
              By 1 - λ these are the group's own sums, by λ their expectations from earlier steps.

At λ = 0 this is the norm as it is. At λ = 1 neither direction depends on the group, as if the batch were infinite: the
output is that of `population` inference where nothing is clipped. With the group's own sums at λ = 1, a step would no
longer undo what it did to mean and scale, and small groups diverge.

The expectations are moving averages of two sums per backward, Σ g and Σ g z over all values of x. They are gradients of
the loss with respect to β and γ. A mean loss does not change them with the size of x, so they also fit a last batch
that is smaller. They are divided by the values of x when they are used. They do not contain γ, so γ = 0 is no problem.

The result is the gradient of no function. So it has no second derivative, and `torch.func` cannot transform it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kalmannorm._groups import group_sizes
from kalmannorm._ops.dispatch import transformed
from kalmannorm.moments import Moments

R_MAX, D_MAX = 3.0, 5.0


class ClosingState(nn.Module):
    """What a norm needs in the closing phase. `ClosingPhase` in `_model/closing.py` changes it after every step."""

    strength: Tensor
    """λ"""
    averages: Tensor
    """(3, C): the averages of Σ g and Σ g z, without the factor of a GradScaler, and the number of steps in them."""
    scale: Tensor
    """The factor of the GradScaler."""
    probe: Tensor
    """Zeros (3, C). Their gradient is the sum over backwards of Σ g and Σ g z, and the number of backwards.

    As a gradient it is summed by autograd like the gradients of the parameters. It belongs to no optimizer.
    """

    def __init__(self, channels: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("strength", torch.zeros((), device=device, dtype=dtype))
        self.register_buffer("averages", torch.zeros(3, channels, device=device, dtype=dtype))
        self.register_buffer("scale", torch.ones((), device=device, dtype=dtype), persistent=False)
        self._renew()

    def _renew(self) -> None:
        self.probe = torch.zeros_like(self.averages).requires_grad_()
        # From the beginning, and never removed: a CUDA graph adds to the same memory in every replay.
        self.probe.grad = torch.zeros_like(self.averages)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClosingState:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._renew()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "probe"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._renew()


class Target(NamedTuple):
    """What a forward is drawn to: running mean and variance, λ, and the averages in units of this loss."""

    mean: Tensor
    var: Tensor
    strength: Tensor
    averages: Tensor


def refuse_transforms() -> None:
    if transformed():
        raise RuntimeError(
            "a norm in its closing phase has no derivative that torch.func can transform; end the phase first, with "
            "ClosingPhase.remove()"
        )


def corrected(
    posterior: Moments,
    affine: tuple[Tensor | None, Tensor | None],
    target: Target,
    probe: Tensor,
    *,
    eps: float,
    x: Tensor,
    size: int,
) -> tuple[Moments, Tensor, Tensor]:
    """Moments to normalize x with, and γ r and γ d + β, all (G, C). The moments are the posterior; gradients differ."""
    dtype, (weight, bias) = posterior.mean.dtype, affine
    if weight is None or bias is None:
        weight, bias = torch.ones_like(posterior.mean[0]), torch.zeros_like(posterior.mean[0])
    positions = x.numel() // (x.shape[0] * x.shape[1])
    # The share of x's values that each group has, (G, 1) or one number.
    share = group_sizes(x.shape[0], size, posterior.mean) * (positions / (x.numel() // x.shape[1]))
    inputs = posterior.mean, posterior.var, weight.to(dtype), bias.to(dtype), probe, *target, share, eps
    mean, var, scale, shift = _Corrected.apply(*inputs)  # type: ignore[no-untyped-call]
    return Moments(mean, var), scale, shift


class _Corrected(torch.autograd.Function):
    """See the top of this file. The op computes the group's own sums: they are the gradients of its γ and β."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, probe: Tensor, run_mean: Tensor,
        run_var: Tensor, strength: Tensor, averages: Tensor, share: Tensor | float, eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        strength = strength.to(mean.dtype)
        rho, inverse = (var + eps).rsqrt(), (run_var.to(mean.dtype) + eps).rsqrt()
        r = (inverse / rho).clamp(1 / R_MAX, R_MAX) ** strength
        d = strength * ((mean - run_mean.to(mean.dtype)) * inverse).clamp(-D_MAX, D_MAX)
        expected = strength * share * averages[:2].to(mean.dtype).unsqueeze(1)  # (2, 1, C) or (2, G, C)
        ctx.save_for_backward(weight, rho * r, r, d, 1 - strength, expected)
        ctx.probe = probe.dtype
        return mean.view_as(mean), var.view_as(var), weight * r, weight * d + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, at_mean: Tensor, at_var: Tensor, at_scale: Tensor, at_shift: Tensor) -> tuple[Any, ...]:
        weight, step, r, d, own, expected = ctx.saved_tensors
        sums = at_shift, r * at_scale + d * at_shift  # of g and g z, in each group
        d_mean = own * at_mean - weight * step * expected[0]
        d_var = own * at_var - 0.5 * weight * step.square() * expected[1]
        whole = [each.sum(0) for each in sums]
        probe = torch.stack([*whole, torch.ones_like(whole[0])]).to(ctx.probe)
        at_weight, at_bias = (each.sum_to_size(weight.shape) for each in reversed(sums))
        return d_mean, d_var, at_weight, at_bias, probe, *[None] * 6
