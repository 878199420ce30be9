"""The op in PyTorch operations: any device, any layout, all groups in one pass.

    forward    x̄ and S  ->  update  ->  y = a x + (β - a mean),  a = γρ,  ρ = (var + eps)^-½;  then residual, and ReLU
    backward   S0 = Σ g, S1 = ρ Σ g (x - mean)  ->  update_backward  ->  dx = a g + b x + (dx̄/M - b x̄),  b = 2 dS/M

x is viewed in groups, without a copy. Intermediate results are written into the memory of the final result, because
allocating a tensor of that size costs as much as two passes. Where |x̄| ≫ σ the expanded forms would cancel, so x is
centred first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kalmannorm import _filter as kalman
from kalmannorm._groups import cast, group_size, group_sizes, statistics_dtype
from kalmannorm._ops.normalize import arm_sums
from kalmannorm._ops.normalize.arguments import Inputs, Results
from kalmannorm.moments import Moments

FAR = 8.0
"""Up to this many deviations between x̄ and 0, a x + b may replace a (x - x̄) + c. The error is then at most 10⁻⁶."""
EACH = 0  # "no reduction" in PyTorch's numbering for losses
_ops: Any = torch.ops.aten


class Slabs:
    """Views of x (N, C, *) in groups: (G, m, C, L), or (G, m·L, C) for channels_last. A smaller last group is separate.

    With one position, as in (N, C), both views have the same layout. Then channels_last is used, because it vectorises.
    """

    def __init__(self, x: Tensor, statistics_batch_size: int) -> None:
        self.examples, self.channels = x.shape[:2]
        self.size = group_size(self.examples, statistics_batch_size)
        self.positions = x.numel() // (self.examples * self.channels)
        self.last = not x.is_contiguous() or self.positions == 1
        self.over = (1,) if self.last else (1, 3)
        self.row = (-1, 1, self.channels) if self.last else (-1, 1, self.channels, 1)
        self.whole = self.examples // self.size
        self.ragged = self.whole > 0 and self.examples % self.size > 0
        self.native = not self.last and x.device.type == "cpu"
        self.pooled = self.last and arm_sums.worthwhile(x)

    def parts(self, x: Tensor) -> list[Tensor]:
        """The groups of x, or of a tensor with the layout of x: all full groups, then a smaller last group."""
        if not self.ragged:
            return [self._view(x, self.whole or 1)]
        cut = self.whole * self.size
        return [self._view(x[:cut], self.whole), self._view(x[cut:], 1)]

    def _view(self, x: Tensor, groups: int) -> Tensor:
        if self.last:  # x has no gaps, so this equals movedim and view, at half the cost
            values = x.shape[0] // groups * self.positions
            return x.as_strided((groups, values, self.channels), (values * self.channels, self.channels, 1))
        return x.view(groups, -1, self.channels, self.positions)

    def rows(self, moments_GC: Tensor) -> list[Tensor]:
        """Rows (G, C) or (1, C), shaped to broadcast over each part."""
        rows = moments_GC.view(self.row)
        if not self.ragged or rows.shape[0] == 1:
            return [rows] * 2
        return [rows[: self.whole], rows[self.whole :]]

    def gather(self, rows: list[Tensor]) -> Tensor:
        """Rows of all parts, (g, 1, C) or (g, 1, C, 1), as one (G, C)."""
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).view(-1, self.channels)

    def moments(self, parts: list[Tensor], scratch: list[Tensor]) -> Moments:
        """Mean and variance, (G, C). `scratch` are parts that are overwritten. They may be `parts` themselves."""
        means = [self.mean(values) for values in parts]
        for values, mean, squares in zip(parts, means, scratch, strict=True):
            _ops.mse_loss.out(values, mean, EACH, out=squares)
        return Moments(self.gather(means), self.gather([self.mean(squares) for squares in scratch]))

    def mean(self, values: Tensor) -> Tensor:
        """The mean of every group of a part, shaped to broadcast over the part."""
        return arm_sums.mean(values).unsqueeze(1) if self.pooled else values.mean(self.over, keepdim=True)

    def total(self, values: Tensor) -> Tensor:
        """The sum of every group of a part, (g, C)."""
        return arm_sums.total(values) if self.pooled else values.sum(self.over)

    def centred(self, parts: list[Tensor], mean_GC: Tensor) -> list[Tensor]:
        return [values - mean for values, mean in zip(parts, self.rows(mean_GC), strict=False)]

    def subtract(self, parts: list[Tensor], mean_GC: Tensor, results: list[Tensor]) -> None:
        """As `centred`, but write into `results`."""
        for values, mean, out in zip(parts, self.rows(mean_GC), results, strict=False):
            torch.sub(values, mean, out=out)

    def affine(self, parts: list[Tensor], scale_GC: Tensor, shift_GC: Tensor, results: list[Tensor]) -> None:
        """x · scale + shift. Every group has its own row of scale and shift."""
        for values, scale, shift, out in zip(parts, self.rows(scale_GC), self.rows(shift_GC), results, strict=False):
            if self.last:
                torch.addcmul(shift, values, scale, out=out)
            else:  # addcmul does not vectorise with two broadcast operands
                torch.mul(values, scale, out=out).add_(shift)

    def products(
        self, grads: list[Tensor], parts: list[Tensor], mean_GC: Tensor, scratch: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Σ g and Σ g (x - mean) of every group, (G, C). `scratch` are parts that are overwritten."""
        sums, products = [], []
        for g, values, mean, each in zip(grads, parts, self.rows(mean_GC), scratch, strict=False):
            if self.native:
                # As one example with a channel for every row. PyTorch's batch-norm backward computes both sums in one
                # pass.
                rows, flat = values.shape[:3], (1, -1, self.positions)
                centre = mean.squeeze(3).expand(rows).reshape(-1)
                _, product, total = _ops.native_batch_norm_backward(
                    g.view(flat), values.view(flat), None, None, None, centre, torch.ones_like(centre), True, 0.0,
                    [False, True, True],
                )  # fmt: skip
                sums.append(total.view(rows).sum(1))
                products.append(product.view(rows).sum(1))
            else:
                _ops.mse_loss_backward.grad_input(g, values, mean, EACH, grad_input=each)  # 2 g (x - mean)
                sums.append(self.total(g))
                products.append(self.total(each).mul_(0.5))
        return self.gather(sums), self.gather(products)


def far(mean: Tensor, rho: Tensor) -> bool:
    """Whether any mean is more than FAR deviations away from 0, so that expanded forms lose digits.

    On other devices than the CPU the answer is always True, because reading the values would wait for the device.
    """
    return mean.device.type != "cpu" or not (mean * rho).abs_().max().item() <= FAR


def observe(x: Tensor, statistics_batch_size: int) -> tuple[Tensor, Tensor]:
    """Observed mean and variance, (G, C)."""
    slabs = Slabs(x, statistics_batch_size)
    parts = slabs.parts(cast(x, statistics_dtype(x)))
    middle = slabs.gather([slabs.mean(values) for values in parts])
    centred = slabs.centred(parts, middle)
    # The first mean has the rounding error of a long float32 sum. The mean of the centred values corrects it.
    missed = slabs.moments(centred, centred)
    return middle + missed.mean, missed.var


def forward(inputs: Inputs) -> Results:
    x, prior_mean, prior_var, gain, _, _, statistics_batch_size, eps, _, _ = inputs

    def combined() -> tuple[Moments, Tensor]:
        posterior = observation
        if prior_mean is not None and prior_var is not None and gain is not None:
            posterior = kalman.update(Moments(prior_mean, prior_var), observation, gain)
        return posterior, posterior.var.add(eps).rsqrt_()

    slabs = Slabs(x, statistics_batch_size)
    values = cast(x, statistics_dtype(x))
    # The parts are views of the output. The output itself must not be a view: autograd refuses in-place activations
    # on views.
    y = torch.empty_like(values)
    parts, results = slabs.parts(values), slabs.parts(y)
    observation = slabs.moments(parts, results)
    posterior, rho = combined()
    away = far(observation.mean, rho)
    if away:
        middle = observation.mean
        centred = slabs.centred(parts, middle)
        # The first mean has the rounding error of a long float32 sum. The mean of the centred values corrects it.
        missed = slabs.moments(centred, results)
        observation = Moments(middle + missed.mean, missed.var)
        posterior, rho = combined()
    _normalize(slabs, parts, y, posterior.mean, rho, inputs, away)
    # An op may not return the same tensor twice.
    if posterior is observation:
        posterior = Moments(observation.mean.clone(), observation.var.clone())
    return Results(cast(y, x.dtype), *posterior[:2], *observation[:2])


def _normalize(
    slabs: Slabs, parts: list[Tensor], y: Tensor, centre: Tensor, rho: Tensor, inputs: Inputs, away: bool
) -> None:
    """Write y from the parts of x and the posterior. `away`: means are far from 0."""
    _, _, _, _, weight, bias, _, _, residual, relu = inputs
    results = slabs.parts(y)
    if away:
        # From x, not from values centred on x̄: a value near the posterior's mean may be far from x̄, and x - x̄ then has
        # lost digits.
        slabs.subtract(parts, centre, results)
        parts, centre = results, torch.zeros_like(centre)
    scale = rho if weight is None else rho * cast(weight, rho.dtype)
    shift = centre * -scale if bias is None else torch.addcmul(cast(bias, rho.dtype), centre, scale, value=-1)
    slabs.affine(parts, scale, shift, results)
    if residual is not None:
        y.add_(residual)
    if relu:
        y.relu_()


def again(inputs: Inputs, mean: Tensor, var: Tensor, observed_mean: Tensor) -> Tensor:
    """y of a forward that is over, with the same operations, from x, γ, β, the residual and the moments."""
    slabs, values = Slabs(inputs.x, inputs.statistics_batch_size), cast(inputs.x, mean.dtype)
    y, rho = torch.empty_like(values), var.add(inputs.eps).rsqrt_()
    _normalize(slabs, slabs.parts(values), y, mean, rho, inputs, far(observed_mean, rho))
    return cast(y, inputs.x.dtype)


def backward(grads: Results, inputs: Inputs, results: Results, bias_rows: int) -> list[Tensor]:
    """Gradients with respect to x, residual, prior mean, prior var, gain, weight and bias, as far as they exist.

    Each has the shape and dtype of its input. The gradient of the bias is (bias_rows, C), in float32 or float64. With a
    residual, the mask of the ReLU comes from `results.y`. Without one, it comes from x and `inputs.bias`.
    """
    x, prior_mean, prior_var, gain, weight, bias, statistics_batch_size, eps, _, relu = inputs
    grad_y, *grad_moments = grads
    y, *moments = results
    slabs = Slabs(x, statistics_batch_size)
    posterior, observation = Moments(*moments[:2]), Moments(*moments[2:])  # type: ignore[arg-type]
    rho = posterior.var.add(eps).rsqrt_()
    scale = rho if weight is None else rho * cast(weight, rho.dtype)
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    if y is not None:
        grad_y = torch.where(y <= 0, 0, grad_y)
    parts, slopes = slabs.parts(cast(x, rho.dtype)), slabs.parts(cast(grad_y, rho.dtype))
    if relu and y is None:
        slopes = pass_relu(slabs, parts, slopes, posterior.mean, scale, bias)
    dx = torch.empty_like(x, dtype=rho.dtype)
    outputs = slabs.parts(dx)
    sum_g, sum_gx = slabs.products(slopes, parts, posterior.mean, outputs)
    sum_gx = sum_gx.mul_(rho)
    middle = observation.mean
    if far(middle, rho):
        parts, middle = slabs.centred(parts, middle), torch.zeros_like(middle)

    strength = scale * sum_gx
    grad_observation = grad_posterior = plus(
        Moments((scale * sum_g).neg_(), strength.mul_(rho).mul_(-0.5)), *grad_moments[:2]
    )
    of_prior: list[tuple[Tensor, Tensor]] = []
    if prior_mean is not None and prior_var is not None and gain is not None:
        prior = Moments(prior_mean, prior_var)
        grad_prior, grad_observation, grad_gain = kalman.update_backward(prior, observation, gain, grad_posterior)
        of_prior = [(grad_prior.mean, prior_mean), (grad_prior.var, prior_var), (grad_gain, gain)]
    grad_observation = plus(grad_observation, *grad_moments[2:])

    count = group_sizes(slabs.examples, slabs.size, rho) * slabs.positions
    slope, constant = grad_observation.var * (2 / count), grad_observation.mean / count
    slabs.affine(parts, slope, constant.addcmul_(slope, middle, value=-1), outputs)
    for out, g, a in zip(outputs, slopes, slabs.rows(scale), strict=False):
        out.addcmul_(g, a)
    gradients = [cast(dx, x.dtype)] if y is None else [cast(dx, x.dtype), grad_y]
    gradients += [summed(g, like) for g, like in of_prior]
    if weight is not None:
        gradients.append(summed(sum_gx, weight))
    if bias_rows:
        gradients.append(sum_g.sum(0, keepdim=True) if bias_rows < sum_g.shape[0] else sum_g)
    return gradients


def pass_relu(
    slabs: Slabs, parts: list[Tensor], grads: list[Tensor], mean: Tensor, scale: Tensor, bias: Tensor | None
) -> list[Tensor]:
    """Each part of the gradient, with the mask of the ReLU applied."""
    shift = torch.zeros_like(mean[:1]) if bias is None else bias.to(mean.dtype).view(-1, slabs.channels)
    rows = (slabs.rows(t) for t in (scale, shift))
    return [
        torch.where(value.mul_(a).add_(b) <= 0, 0, g)
        for value, g, a, b in zip(slabs.centred(parts, mean), grads, *rows, strict=False)
    ]


def plus(grad: Moments, mean: Tensor | None, var: Tensor | None) -> Moments:
    """Add further gradients, if there are any."""
    return Moments(grad.mean if mean is None else grad.mean + mean, grad.var if var is None else grad.var + var)


def summed(grad_GC: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient per group to the shape of the input that was broadcast: (), (1,), (C,), (1, C) or (G, C)."""
    values = like.numel()
    if values < grad_GC.numel():
        grad_GC = grad_GC.sum(0, keepdim=like.dim() == 2) if values == grad_GC.shape[1] else grad_GC.sum()
    return cast(grad_GC if grad_GC.shape == like.shape else grad_GC.reshape(like.shape), like.dtype)
