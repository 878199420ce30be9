"""Moments through an activation: x ~ N(mean, var) in, the mean and the variance of f(x) out.

Piecewise quadratics are exact: ReLU, its variants and the hard functions. Near the mean, f is one quadratic P. At each
knot k the next piece differs from the previous one by a quadratic D_k. It only affects the tail beyond k:

    E f = E P + sum_k s E[D_k(x); x beyond k]         s = +1 for a knot above the mean, -1 for one at or below it

With D_k in powers of x - k, the truncated moments B_j = s E[(x - k)^j; x beyond k] are needed:

    B_0 = s Q(|k - mean| / sd)      B_1 = sd phi((k - mean) / sd) + (mean - k) B_0
    B_j = (j - 1) var B_{j-2} + (mean - k) B_{j-1}

Only tails are used, never a difference of near-equal probabilities. All values are relative to f(mean). The arithmetic
is float64 for every dtype, because the recurrence loses digits in far tails: in float32 Hardswish's variance would be
0.5 % off at -4 sd. A few numbers per channel cost nothing. Only MPS stays in float32, because it has no float64.

Smooth functions are integrated by the trapezoidal rule in z = (x - mean) / sd. It converges exponentially if f is
analytic. The variance is then a weighted sum of squares, so it neither cancels nor becomes negative.

Worst error against dense integration for |mean| <= 4 sd and 0.1 <= sd <= 5, as a share of the output's deviation (mean)
and variance. Float32 adds its own rounding, up to 6e-6 and 3e-6.

                                                 mean    variance
    piecewise quadratics                         1e-14   4e-11
    GELU, SiLU, sigmoid, Softplus, Mish          5e-11   6e-9
    tanh                                         2e-7    5e-6
    ELU, CELU                                    3e-6    2e-5      a jump in the second derivative
    ELU with alpha other than 1, SELU            4e-5    4e-4      a jump in the first derivative
    Softplus(beta=5)                             2e-5    2e-4      5 times as sharp: as if sd were 25

The result is exact only for a Gaussian input. Channels are handled one by one, so a `cov` is dropped. Piecewise
quadratics are here in plain operations. Usually their closed form with gradients runs instead, from `closed.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kalmannorm.moments import closed
from kalmannorm.moments.core import Moments

# A number, or a tensor that broadcasts with (G, C) if the function is learned.
Coefficient = float | Tensor
Quadratic = tuple[Coefficient, Coefficient, Coefficient]
"""c0 + c1 x + c2 x²."""
Shape = tuple[tuple[float, ...], tuple[closed.Numbers, ...]]
"""Knots, and the pieces between them."""

DENSITY = 8  # nodes per deviation
_KINK_DENSITY = 32  # nodes per deviation for functions that are not analytic


def _deviation(var: Tensor) -> tuple[Tensor, Tensor]:
    var = var.clamp(min=closed.FLOOR)
    return var, var.sqrt()


def _absent(coefficient: Coefficient) -> bool:
    return not isinstance(coefficient, Tensor) and coefficient == 0


def _about(piece: Quadratic, origin: Coefficient) -> Quadratic:
    """The same quadratic in powers of x - origin."""
    c0, c1, c2 = piece
    return c0 + origin * (c1 + origin * c2), c1 + 2 * origin * c2, c2


def _multiply(a: Quadratic, b: Quadratic) -> list[Coefficient]:
    product: list[Coefficient] = [0.0] * 5
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            if not (_absent(left) or _absent(right)):
                product[i + j] = product[i + j] + left * right
    return product


def _tail(mean: Tensor, var: Tensor, deviation: Tensor, knot: float, above: Tensor) -> list[Tensor]:
    """B_0 ... B_4: moments about the knot of the tail beyond it, with sign s. `above`: whether mean >= knot."""
    side = 1 - 2 * above.to(mean.dtype)
    distance = side * (knot - mean) / deviation
    density = torch.exp(-0.5 * distance * distance) * (1 / math.sqrt(2 * math.pi))
    gap = mean - knot
    tail = [0.5 * side * torch.erfc(distance * math.sqrt(0.5))]
    tail.append(deviation * density + gap * tail[0])
    for order in range(2, 5):
        tail.append((order - 1) * var * tail[-2] + gap * tail[-1])
    return tail


def _weighted(coefficients: Sequence[Coefficient], tail: Sequence[Tensor]) -> Tensor:
    terms = [c * moment for c, moment in zip(coefficients, tail[: len(coefficients)], strict=True) if not _absent(c)]
    return functools.reduce(torch.add, terms, torch.zeros_like(tail[0]))


def piecewise(m: Moments, knots: Sequence[float], pieces: Sequence[Quadratic]) -> Moments:
    """Through a piecewise quadratic. `pieces[i]` = (c0, c1, c2) is c0 + c1 x + c2 x² up to `knots[i]`.

    The last piece holds beyond the last knot, so there is one more piece than knots. Knots are finite and increasing.
    The function may jump at a knot.
    """
    if len(pieces) != len(knots) + 1:
        raise ValueError(f"piecewise: {len(knots)} knots need {len(knots) + 1} pieces, but {len(pieces)} were given")
    if any(not math.isfinite(knot) for knot in knots) or any(a >= b for a, b in itertools.pairwise(knots)):
        raise ValueError(f"piecewise: `knots` must be finite and increasing, got {tuple(knots)}")
    numbers = not any(isinstance(c, Tensor) for piece in pieces for c in piece)
    if numbers and closed.applicable(m.mean, m.var):
        return _closed_form(m, closed.Piecewise(knots, pieces))  # type: ignore[arg-type]
    return _piecewise(m, knots, pieces)


def _piecewise(m: Moments, knots: Sequence[float], pieces: Sequence[Quadratic]) -> Moments:
    """`piecewise` in plain operations."""
    work = closed.working_dtype(m.mean)
    mean = m.mean.to(work)
    var, deviation = _deviation(m.var.to(work))
    above = [mean >= knot for knot in knots]

    # The quadratic that holds at the mean, as value + slope (x - mean) + curve (x - mean)².
    home = [torch.zeros_like(mean) + c for c in _about(pieces[0], mean)]
    for beyond, piece in zip(above, pieces[1:], strict=True):
        home = [torch.where(beyond, new, old) for new, old in zip(_about(piece, mean), home, strict=True)]
    value, slope, curve = home

    first = curve * var  # E[f - f(mean)]
    second = slope * slope * var + 3 * first * first  # E[(f - f(mean))²]
    for knot, beyond, left, right in zip(knots, above, pieces[:-1], pieces[1:], strict=True):
        tail = _tail(mean, var, deviation, knot, beyond)
        below, over = _about(left, knot), _about(right, knot)
        jump = (over[0] - below[0], over[1] - below[1], over[2] - below[2])
        # (over - value)² - (below - value)² = (over - below)(over + below - 2 value)
        total = (over[0] + below[0] - 2 * value, over[1] + below[1], over[2] + below[2])
        first = first + _weighted(jump, tail)
        second = second + _weighted(_multiply(jump, total), tail)
    spread = (second - first * first).clamp(min=0)
    return Moments((value + first).to(m.mean.dtype), spread.to(m.var.dtype))


class _ClosedForm(torch.autograd.Function):
    """The piecewise quadratic `shape`, or ReLU if `shape` is None."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, shape: closed.Piecewise | None) -> tuple[Tensor, Tensor]:
        work = closed.working_dtype(mean)
        given = mean.to(work), var.to(work)
        value, spread, kept = closed.relu(*given) if shape is None else closed.piecewise(*given, shape)
        ctx.save_for_backward(mean, var, *kept)
        ctx.shape = shape
        return value.to(mean.dtype), spread.to(var.dtype)

    @staticmethod
    def backward(ctx: Any, at_mean: Tensor, at_var: Tensor) -> tuple[Any, ...]:
        mean, var, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *closed.again(functools.partial(_spelt_out, ctx.shape), (mean, var), (at_mean, at_var)), None
        gradient = closed.relu_gradient if ctx.shape is None else closed.jacobian_gradient
        work = closed.working_dtype(mean)
        d_mean, d_var = gradient(kept, at_mean.to(work), at_var.to(work))
        return d_mean.to(mean.dtype), d_var.to(var.dtype), None


def _closed_form(m: Moments, shape: closed.Piecewise | None) -> Moments:
    return Moments(*_ClosedForm.apply(m.mean, m.var, shape))  # type: ignore[no-untyped-call]


def _spelt_out(shape: closed.Piecewise | None, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    m = Moments(mean, var)
    return (_relu(m) if shape is None else _piecewise(m, shape.knots, shape.pieces))[:2]


def through(m: Moments, function: Callable[[Tensor], Tensor], density: int = DENSITY) -> Moments:
    """Through any elementwise function, by quadrature. The function is called once, on a (nodes, G, C) tensor.

    This is the trapezoidal rule with `density` nodes per deviation, over 8 deviations on either side. The default fits
    analytic functions that change over more than 1/8 deviation. If the function has a kink, the error is of second
    order in 1/density. If it jumps, the error is of first order. Use `piecewise` for such functions.
    """
    if density < 1:
        raise ValueError(f"through: `density` must be at least 1 node per deviation, got {density}")
    _, deviation = _deviation(m.var)
    nodes, weights = closed.nodes_and_weights(density, m.mean)
    values = function(m.mean + deviation * nodes)
    middle = values[closed.REACH * density]  # f(mean): offsets from it keep their digits if |mean| >> sd
    offsets = values - middle
    shift = (weights * offsets).sum(0)
    return Moments(middle + shift, (weights * (offsets - shift).square()).sum(0))


def _clipped(low: float, high: float) -> Shape:
    return (float(low), float(high)), (_constant(low), _LINE, _constant(high))


def _constant(value: float) -> closed.Numbers:
    return float(value), 0.0, 0.0


_LINE: closed.Numbers = (0.0, 1.0, 0.0)
SHAPES: Mapping[str, Callable[..., Shape]] = {
    "relu": lambda: ((0.0,), (_constant(0), _LINE)),
    "leaky_relu": lambda negative_slope=0.01: ((0.0,), ((0.0, float(negative_slope), 0.0), _LINE)),
    "relu6": lambda: _clipped(0, 6),
    "hardtanh": lambda min_val=-1.0, max_val=1.0: _clipped(min_val, max_val),
    "hardsigmoid": lambda: ((-3.0, 3.0), (_constant(0), (0.5, 1 / 6, 0.0), _constant(1))),
    "hardswish": lambda: ((-3.0, 3.0), (_constant(0), (0.0, 0.5, 1 / 6), _LINE)),
}
"""Knots and pieces of the piecewise quadratic activations, by name and options."""


def identity(m: Moments) -> Moments:
    """Unchanged."""
    return m


def relu(m: Moments) -> Moments:
    """max(x, 0)."""
    return _closed_form(m, None) if closed.applicable(m.mean, m.var) else _relu(m)


def _relu(m: Moments) -> Moments:
    """`relu` in plain operations. It is common in networks, and `_piecewise` needs three times as many operations."""
    work = closed.working_dtype(m.mean)
    mean = m.mean.to(work)
    var, deviation = _deviation(m.var.to(work))
    above = mean >= 0
    gap = torch.where(above, mean, -mean)
    distance = gap / deviation
    density = deviation * torch.exp(-0.5 * distance * distance) * (1 / math.sqrt(2 * math.pi))
    tail = 0.5 * torch.erfc(distance * math.sqrt(0.5))
    first = density - gap * tail  # E r
    second = (var + gap * gap) * tail - gap * density  # E r²
    spread = torch.where(above, var - second - 2 * gap * first, second) - first * first
    value = torch.where(above, mean + first, first)
    return Moments(value.to(m.mean.dtype), spread.clamp(min=0).to(m.var.dtype))


def leaky_relu(m: Moments, negative_slope: float = 0.01) -> Moments:
    """x above 0, `negative_slope` x below."""
    return piecewise(m, *SHAPES["leaky_relu"](negative_slope))


def prelu(m: Moments, weight: Tensor) -> Moments:
    """x above 0, `weight` x below. The weight is one number or one per channel, and gets a gradient."""
    channels = m.mean.shape[-1]
    if weight.numel() not in (1, channels):
        raise ValueError(
            f"prelu: `weight` must hold 1 slope or one for each of the {channels} channels, got {tuple(weight.shape)}"
        )
    return piecewise(m, (0.0,), ((0.0, weight.reshape(-1), 0.0), (0.0, 1.0, 0.0)))


def hardtanh(m: Moments, min_val: float = -1.0, max_val: float = 1.0) -> Moments:
    """x clipped to [min_val, max_val]."""
    if not min_val < max_val:
        raise ValueError(f"hardtanh: `min_val` must be below `max_val`, got {min_val} and {max_val}")
    return piecewise(m, *SHAPES["hardtanh"](min_val, max_val))


def relu6(m: Moments) -> Moments:
    """x clipped to [0, 6]."""
    return piecewise(m, *SHAPES["relu6"]())


def hardsigmoid(m: Moments) -> Moments:
    """x/6 + 1/2 clipped to [0, 1]."""
    return piecewise(m, *SHAPES["hardsigmoid"]())


def hardswish(m: Moments) -> Moments:
    """x hardsigmoid(x)."""
    return piecewise(m, *SHAPES["hardswish"]())


def gelu(m: Moments, approximate: str = "none") -> Moments:
    """x Φ(x), or its `approximate="tanh"` form."""
    return through(m, functools.partial(F.gelu, approximate=approximate))


def silu(m: Moments) -> Moments:
    """x sigmoid(x)."""
    return through(m, F.silu)


def sigmoid(m: Moments) -> Moments:
    """1 / (1 + exp(-x))."""
    return through(m, torch.sigmoid)


def tanh(m: Moments) -> Moments:
    """Hyperbolic tangent."""
    return through(m, torch.tanh)


def elu(m: Moments, alpha: float = 1.0) -> Moments:
    """x above 0, `alpha` (exp(x) - 1) below."""
    return through(m, functools.partial(F.elu, alpha=alpha), _KINK_DENSITY)


def celu(m: Moments, alpha: float = 1.0) -> Moments:
    """x above 0, `alpha` (exp(x / alpha) - 1) below."""
    return through(m, functools.partial(F.celu, alpha=alpha), _KINK_DENSITY)


def selu(m: Moments) -> Moments:
    """ELU scaled so that zero mean and unit variance are a fixed point."""
    return through(m, F.selu, _KINK_DENSITY)


def softplus(m: Moments, beta: float = 1.0, threshold: float = 20.0) -> Moments:
    """log(1 + exp(beta x)) / beta. As in torch, it is x if beta x is above `threshold`."""
    return through(m, functools.partial(F.softplus, beta=beta, threshold=threshold))


def mish(m: Moments) -> Moments:
    """x tanh(softplus(x))."""
    return through(m, F.mish)


ACTIVATIONS: Mapping[str, Callable[..., Moments]] = {
    function.__name__: function
    for function in (
        identity,
        relu,
        leaky_relu,
        prelu,
        relu6,
        hardtanh,
        hardsigmoid,
        hardswish,
        gelu,
        silu,
        sigmoid,
        tanh,
        elu,
        celu,
        selu,
        softplus,
        mish,
    )
}
"""Activations by their names in `torch.nn.functional`, with the same options."""
