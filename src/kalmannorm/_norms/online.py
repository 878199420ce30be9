"""Online Normalization (Chiley et al., "Online Normalization for Training Neural Networks", 2019), a baseline for
comparisons. It knows no batch: examples pass one after another. With the mean m and the variance v of a channel in
example t, and moments μ, σ² of the examples before it:

    forward   y = (x - μ) / sqrt(σ² + eps)
              σ² ← α σ² + (1 - α) v + α (1 - α) (m - μ)²      μ ← α μ + (1 - α) m       α = 0.999
    backward  g' = g - (1 - a) e y                            e ← e + mean(g' y)        a = 0.99
              dx = g' / sqrt(σ² + eps) - (1 - a) d            d ← d + mean(dx)

e and d are accumulated errors. They push the gradient back to where batch norm has it: orthogonal to y and to 1. The
output is z = γ y + β, divided by the root mean square of z over all channels and positions of the example. This layer
scaling keeps activations from growing. Alternatively they are clamped.

Each state of a channel is a recurrence h_t = a_t h_{t-1} + b_t over the examples of a batch. All rows of a batch are
computed at once, in log2(N) steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kalmannorm._groups import cast, statistics_dtype
from kalmannorm._support.activation_checkpoints import first_seen, recompute_id
from kalmannorm._support.checks import check_number, positive_int


class OnlineNorm(nn.Module):
    """Online Normalization of x (N, C, *), in the order of its examples.

    Args:
        num_features: channels C of x.
        forward_decay, backward_decay: α and a, per example.
        layer_scaling: divide the output of each example by its root mean square.
        clamp: limit the output to ± this number. None: no limit.

    Inference uses the running mean and variance, and the same layer scaling. So it cannot be folded. Each rank has a
    state of its own. The units of e and d are those of the loss: do not change a loss scale.
    """

    then: tuple[str, ...] = ()
    """Children that are applied to the result, in order."""
    running_mean: Tensor
    running_var: Tensor
    errors: Tensor
    """e and d, (2, C)."""

    def __init__(
        self,
        num_features: int,
        *,
        forward_decay: float = 0.999,
        backward_decay: float = 0.99,
        layer_scaling: bool = True,
        clamp: float | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features = positive_int("num_features", num_features)
        for name, decay in (("forward_decay", forward_decay), ("backward_decay", backward_decay)):
            check_number(name, decay, 0, 1)
        if clamp is not None and not clamp > 0:
            raise ValueError(f"clamp must be positive or None, got {clamp}")
        self.forward_decay, self.backward_decay = forward_decay, backward_decay
        self.layer_scaling, self.clamp, self.eps, self.affine = layer_scaling, clamp, eps, affine
        statistics = torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32
        zeros = torch.zeros(num_features, device=device, dtype=statistics)
        self.register_buffer("running_mean", zeros)
        self.register_buffer("running_var", torch.ones_like(zeros))
        self.register_buffer("errors", torch.stack([zeros, zeros]))
        example = nn.GroupNorm(1, num_features, eps, affine, device=device, dtype=dtype)
        self.weight, self.bias = example.weight, example.bias

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"x must be (N, {self.num_features}, *), got shape {tuple(input.shape)}")
        dtype = statistics_dtype(input)
        x = input.to(dtype)
        if self.training and len(x):
            y = self._train(x)
        else:
            rho = (self.running_var + self.eps).rsqrt()
            y = (x - _channels(self.running_mean, x)) * _channels(rho, x)
        if self.weight is not None:
            y = y * _channels(cast(self.weight, dtype), x) + _channels(cast(self.bias, dtype), x)
        if self.layer_scaling:
            over = tuple(range(1, y.dim()))
            y = y * (y.square().mean(over, keepdim=True) + self.eps).rsqrt()
        if self.clamp is not None:
            y = y.clamp(-self.clamp, self.clamp)
        y = y.to(input.dtype)
        for name in self.then:
            y = getattr(self, name)(y)
        return y

    def _train(self, x: Tensor) -> Tensor:
        alpha, over = self.forward_decay, tuple(range(2, x.dim()))
        with torch.no_grad():
            # This forward changes what it reads. Its recomputation must read the old values.
            start_mean, start_var = first_seen(self, lambda: (self.running_mean, self.running_var))
            mean = x.mean(over) if over else x  # (N, C)
            var = x.var(over, correction=0) if over else torch.zeros_like(x)
            decay = torch.full_like(mean, alpha)
            means = recurrence(decay, (1 - alpha) * mean, start_mean.to(mean.dtype))
            before = means[:-1]
            spread = (1 - alpha) * var + alpha * (1 - alpha) * (mean - before).square()
            variances = recurrence(decay, spread, start_var.to(mean.dtype))
            rho = (variances[:-1] + self.eps).rsqrt()
            # mean(y) and mean(y²) of every example, for the backward
            first = (mean - before) * rho
            second = var * rho.square() + first.square()
        y: Tensor = _Online.apply(x, before, rho, first, second, self.errors, 1 - self.backward_decay)  # type: ignore[no-untyped-call]
        if recompute_id() == -1:
            keep(self.running_mean, means[-1])
            keep(self.running_var, variances[-1])
        return y

    def extra_repr(self) -> str:
        decays = f"forward_decay={self.forward_decay}, backward_decay={self.backward_decay}"
        return f"{self.num_features}, {decays}, layer_scaling={self.layer_scaling}, clamp={self.clamp}, eps={self.eps}"


class _Online(torch.autograd.Function):
    """y, with the gradient of the definition. The backward updates `errors`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, rho: Tensor, first: Tensor, second: Tensor, errors: Tensor, rate: float
    ) -> Tensor:
        y = (x - _examples(mean, x)) * _examples(rho, x)
        ctx.save_for_backward(y, rho, first, second)
        ctx.errors, ctx.rate = errors, rate
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        y, rho, first, second = ctx.saved_tensors
        rate, over = ctx.rate, tuple(range(2, y.dim()))
        start = ctx.errors.to(y.dtype)
        along, plain = ((grad * y).mean(over), grad.mean(over)) if over else (grad * y, grad)
        e = recurrence(1 - rate * second, along, start[0])
        push = rate * e[:-1]
        d = recurrence(torch.full_like(rho, 1 - rate), (plain - push * first) * rho, start[1])
        dx = (grad - _examples(push, y) * y) * _examples(rho, y) - _examples(rate * d[:-1], y)
        keep(ctx.errors, torch.stack([e[-1], d[-1]]))
        return dx, None, None, None, None, None, None


def recurrence(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """h_0 = start and h_t = a_t h_{t-1} + b_t for the rows of a and b: (N, C) -> (N + 1, C)."""
    reach = 1
    while reach < len(a):  # each row becomes the map over `2 reach` rows up to it
        b = torch.cat([b[:reach], a[reach:] * b[:-reach] + b[reach:]])
        a = torch.cat([a[:reach], a[reach:] * a[:-reach]])
        reach *= 2
    return torch.cat([start.unsqueeze(0), a * start + b])


@torch.no_grad()
def keep(buffer: Tensor, value: Tensor) -> None:
    """Overwrite a buffer, unless the value is NaN or Inf somewhere."""
    buffer.copy_(torch.where(torch.isfinite(value).all(), value, buffer))


def _channels(row: Tensor, x: Tensor) -> Tensor:
    return row.view(1, -1, *(1,) * (x.dim() - 2))


def _examples(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(*rows.shape, *(1,) * (x.dim() - 2))
