"""Values and gradients in closed form. They need fewer operations than autograd on the formulas.

Each function has two parts. `f(mean, var, ...)` returns the moments and the tensors that its gradient needs.
`f_gradient(...)` returns the gradients with respect to mean and var, given the gradients with respect to the results.
For x ~ N(mean, var) the gradients of an expectation are expectations:

    d E f / d mean = E f'        d E f / d var = E f'' / 2

ReLU, with Φ the probability above zero and d the density at zero:

    d mean' = Φ d mean + d/2 d var            d var' = 2 mean' (1 - Φ) d mean + (Φ - mean' d) d var

Piecewise quadratics, for the truncated moments B_j of `activations.py`:

    d B_j = j B_{j-1} d mean + j (j - 1) / 2 B_{j-2} d var        with B_{-1} = d, and at the knot k
    d B_0 = d d mean + d (k - mean) / (2 var) d var               d B_1 = B_0 d mean + d/2 d var

Convolutions are in `linear.py`. An autograd function does not support transforms of `torch.func`, forward mode,
compilation and export. In these cases, and for gradients of gradients, the formulas run in plain operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOOR = 1e-20
"""A pruned channel has variance 0, where the square root has no finite slope. Below this floor (a deviation of 1e-10)
the variance gets no gradient, and everything stays finite."""

Numbers = tuple[float, float, float]


def applicable(*moments: Tensor) -> bool:
    """Whether a closed form may replace the plain operations."""
    if torch.compiler.is_compiling() or any(tensor.shape != moments[0].shape for tensor in moments):
        return False
    level: int = forward_ad._current_level
    return level < 0 and not torch._C._are_functorch_transforms_active() and torch._C._get_tracing_state() is None


def again(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Any], arriving: Sequence[Tensor | None]
) -> list[Any]:
    """Gradients by autograd through the plain operations, for gradients that will be differentiated again."""
    with torch.enable_grad():
        # As views: one input may have been computed from another. Each derivative must treat them as independent.
        inputs = [each.view_as(each) if isinstance(each, Tensor) else each for each in inputs]
        results = function(*inputs)
    pairs = [(result, grad) for result, grad in zip(results, arriving, strict=True) if grad is not None]
    asked = [i for i, each in enumerate(inputs) if isinstance(each, Tensor) and each.requires_grad]
    outputs, grads = [result for result, _ in pairs], [grad for _, grad in pairs]
    found = torch.autograd.grad(outputs, [inputs[i] for i in asked], grads, create_graph=True, allow_unused=True)
    by_place = dict(zip(asked, found, strict=True))
    return [by_place.get(i) for i in range(len(inputs))]


def working_dtype(like: Tensor) -> torch.dtype:
    """float64, because tails lose digits and a few numbers per channel cost nothing. MPS has no float64."""
    return like.dtype if like.device.type == "mps" else torch.float64


def _tail(distance: Tensor) -> tuple[Tensor, Tensor]:
    """The normal density at `distance` deviations, and the probability beyond it."""
    density = (distance * distance).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return density, torch.erfc(distance * math.sqrt(0.5)).mul_(0.5)


def relu(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Moments after a ReLU, in the working dtype. Let r be how far x lies beyond zero, on the side without the mean.
    Then max(x, 0) is r if the mean is below zero, and x + r if the mean is above."""
    varies = var >= FLOOR
    var = var.clamp(min=FLOOR)
    deviation = var.sqrt()
    above = mean >= 0
    gap = mean.abs()
    density, tail = _tail(gap / deviation)
    spread = deviation * density
    first = spread - gap * tail  # E r
    second = (var + gap * gap).mul_(tail).sub_(gap * spread)  # E r²
    value = mean.clamp(min=0) + first
    result = torch.where(above, var - second - 2 * (gap * first), second).sub_(first * first).clamp_(min=0)
    share = torch.where(above, 1 - tail, tail)
    below = torch.where(above, tail, 1 - tail)
    return value, result, (value, share, below, density.div_(deviation).mul_(varies), varies)


def relu_gradient(kept: Sequence[Tensor], grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor, Tensor]:
    value, share, below, density, varies = kept
    d_mean = (grad_mean * share).addcmul_(grad_var, (value * below).mul_(2))
    # The share needs its own mask: below the variance floor the density is zero, but the share is not.
    d_var = (grad_var * (share * varies)).addcmul_(density, torch.addcmul(grad_mean * 0.5, grad_var, value, value=-1))
    return d_mean, d_var


def _about(piece: Numbers, origin: float) -> Numbers:
    c0, c1, c2 = piece
    return c0 + origin * (c1 + origin * c2), c1 + 2 * origin * c2, c2


class Piecewise:
    """A piecewise quadratic with fixed numbers. `jumps` and `sums` of neighbouring pieces are in powers of x - knot."""

    def __init__(self, knots: Sequence[float], pieces: Sequence[Numbers]) -> None:
        self.knots, self.pieces = tuple(knots), tuple(pieces)
        sides = [
            (_about(a, k), _about(b, k)) for k, a, b in zip(self.knots, self.pieces[:-1], self.pieces[1:], strict=True)
        ]
        self.jumps = [tuple(right - left for left, right in zip(*side, strict=True)) for side in sides]
        self.sums = [tuple(right + left for left, right in zip(*side, strict=True)) for side in sides]

    def home(self, mean: Tensor) -> list[Tensor]:
        """The quadratic that holds at the mean, in powers of x - mean: value, slope, curve."""
        c0, c1, c2 = (torch.full_like(mean, c) for c in self.pieces[0])
        for knot, piece in zip(self.knots, self.pieces[1:], strict=True):
            beyond = mean >= knot
            c0, c1, c2 = (torch.where(beyond, new, old) for new, old in zip(piece, (c0, c1, c2), strict=True))
        slope = c1 + c2 * mean
        return [c0 + slope * mean, slope + c2 * mean, c2]


def piecewise(mean: Tensor, var: Tensor, shape: Piecewise) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Moments after a piecewise quadratic, in the working dtype, computed relative to f(mean) and from tails only."""
    varies = var >= FLOOR
    var = var.clamp(min=FLOOR)
    deviation = var.sqrt()
    value, slope, curve = shape.home(mean)
    first = curve * var  # E[f - f(mean)]
    second = slope * slope * var + 3 * first * first  # E[(f - f(mean))²]
    # Derivatives of both with respect to mean and variance. f(mean) is a constant here: no variance depends on it.
    first_mean, first_var = slope, curve
    second_mean, second_var = 6 * slope * first, slope * slope + 6 * curve * first
    for knot, jump, total in zip(shape.knots, shape.jumps, shape.sums, strict=True):
        gap = mean - knot
        side = 1 - 2 * (gap >= 0).to(mean.dtype)
        density, tail = _tail(gap.abs() / deviation)
        grad_knot = density / deviation
        b = [side * tail]
        b.append(deviation * density + gap * b[0])
        for order in range(2, 5):
            b.append((order - 1) * var * b[-2] + gap * b[-1])
        by_mean = [grad_knot, b[0], 2 * b[1], 3 * b[2], 4 * b[3]]
        by_var = [grad_knot * gap / var * -0.5, 0.5 * grad_knot, b[0], 3 * b[1], 6 * b[2]]
        # (over - value)² - (below - value)² = (over - below)(over + below - 2 value)
        centred: tuple[Any, ...] = (total[0] - 2 * value, total[1], total[2])
        product: list[Any] = [0.0] * 5
        for i, left in enumerate(jump):
            for j, right in enumerate(centred):
                if left != 0:
                    product[i + j] = product[i + j] + left * right
        first = first + _dot(jump, b)
        first_mean, first_var = first_mean + _dot(jump, by_mean), first_var + _dot(jump, by_var)
        second = second + _dot(product, b)
        second_mean, second_var = second_mean + _dot(product, by_mean), second_var + _dot(product, by_var)
    spread_mean = second_mean - 2 * first * first_mean
    spread_var = (second_var - 2 * first * first_var) * varies
    kept = (first_mean, first_var * varies, spread_mean, spread_var)
    return value + first, (second - first * first).clamp(min=0), kept


def _dot(coefficients: Sequence[Any], moments: Sequence[Tensor]) -> Any:
    """Sum of products. Coefficients that are the number 0 are skipped."""
    total: Any = 0.0
    for c, moment in zip(coefficients, moments[: len(coefficients)], strict=True):
        if isinstance(c, Tensor) or c != 0:
            total = total + c * moment
    return total


def jacobian_gradient(kept: Sequence[Tensor], grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients from four derivatives: those of the new mean and those of the new variance, each by mean and var."""
    mean_mean, mean_var, var_mean, var_var = kept
    return grad_mean * mean_mean + grad_var * var_mean, grad_mean * mean_var + grad_var * var_var


REACH = 8
"""Deviations on either side of the mean that the quadrature covers."""


def nodes_and_weights(density: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the trapezoidal rule for a normal density, each (nodes, 1, 1)."""
    steps = REACH * density
    nodes = torch.arange(-steps, steps + 1, dtype=like.dtype, device=like.device) / density
    weights = torch.exp(-0.5 * nodes * nodes)
    return nodes.view(-1, 1, 1), (weights / weights.sum()).view(-1, 1, 1)


def quadrature(
    mean: Tensor, var: Tensor, function: Callable[[Tensor], tuple[Tensor, Tensor]], density: int
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """As `activations.through`, with derivatives. `function` returns its values and its slopes."""
    varies = var >= FLOOR
    deviation = var.clamp(min=FLOOR).sqrt()
    nodes, weights = nodes_and_weights(density, mean)
    values, slopes = function(mean + deviation * nodes)
    middle = values[REACH * density]  # f(mean): offsets from it keep their digits if |mean| >> sd
    offsets = values - middle
    shift = (weights * offsets).sum(0)
    away = offsets - shift
    slopes = weights * slopes
    across = 0.5 * nodes * slopes
    scale = varies / deviation
    kept = (slopes.sum(0), across.sum(0) * scale, 2 * (away * slopes).sum(0), 2 * (away * across).sum(0) * scale)
    return middle + shift, (weights * away.square()).sum(0), kept
