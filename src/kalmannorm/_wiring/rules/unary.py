"""Functions of one tensor: the moments after each of them, and the options of the call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kalmannorm import moments as algebra
from kalmannorm._wiring.program import Apply, Program
from kalmannorm._wiring.recording.trace import Op, Ref
from kalmannorm._wiring.rules.arguments import named
from kalmannorm.moments import Moments


def absolute(m: Moments) -> Moments:
    return algebra.piecewise(m, [0.0], [(0.0, -1.0, 0.0), (0.0, 1.0, 0.0)])


def square(m: Moments) -> Moments:
    """Exact for a Gaussian: m² + v, and 2v² + 4m²v."""
    return Moments(m.mean.square() + m.var, 2 * m.var.square() + 4 * m.mean.square() * m.var)


def power(m: Moments, exponent: float) -> Moments:
    return m if exponent == 1 else square(m)


def clamp(m: Moments, min: float | None = None, max: float | None = None) -> Moments:
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    if low == -math.inf:
        flipped = clamp(algebra.scale(m, -1.0), -high)
        return algebra.scale(flipped, -1.0)
    if high == math.inf:
        return algebra.shift(algebra.relu(algebra.shift(m, -low)), low)
    return algebra.hardtanh(m, low, high)


def negative(m: Moments) -> Moments:
    return algebra.scale(m, -1.0)


def sine(m: Moments) -> Moments:
    return algebra.through(m, torch.sin)


def cosine(m: Moments) -> Moments:
    return algebra.through(m, torch.cos)


def error_function(m: Moments) -> Moments:
    return algebra.through(m, torch.erf)


def logsigmoid(m: Moments) -> Moments:
    return algebra.through(m, torch.nn.functional.logsigmoid)


def softsign(m: Moments) -> Moments:
    return algebra.through(m, torch.nn.functional.softsign, 32)


def averaged(m: Moments, positions: int) -> Moments:
    """The mean over n positions: variance / √n. Equal positions would give variance, independent ones variance / n.

    This is a compromise, because moments do not tell how strongly neighbours correlate. docs/families.md shows its
    effect on noise and on a few photographs. If the prior variance is too small, the norm's variance is wrong by at
    most a factor q. If it is too large, the error has no bound.
    """
    return Moments(m.mean, m.var / math.sqrt(positions))


def second_moment(m: Moments) -> Moments:
    """E x², as a number without variance: the limit of averages and lengths over many values."""
    second = m.mean.square() + m.var
    return Moments(second, torch.zeros_like(second))


def inverse_root(m: Moments) -> Moments:
    """x^-½ of a number without variance."""
    root = m.mean.clamp(min=1e-12).rsqrt()
    return Moments(root, torch.zeros_like(root))


def reciprocal(m: Moments) -> Moments:
    """1/x to first order: mean 1/m, variance v/m⁴. Finite even if x may be zero."""
    second = (m.mean.square() + m.var).clamp(min=1e-12)
    return Moments(m.mean / second, m.var / second.square())


UNARY: dict[str, Callable[..., Moments]] = {
    **algebra.ACTIVATIONS,
    "abs": absolute,
    "square": square,
    "pow": power,
    "clamp": clamp,
    "clip": clamp,
    "neg": negative,
    "sin": sine,
    "cos": cosine,
    "erf": error_function,
    "logsigmoid": logsigmoid,
    "softsign": softsign,
    "reciprocal": reciprocal,
}

_OPTIONS: dict[str, dict[str, Any]] = {
    "leaky_relu": {"negative_slope": 0.01},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0},
    "gelu": {"approximate": "none"},
    "elu": {"alpha": 1.0},
    "celu": {"alpha": 1.0},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "clamp": {"min": None, "max": None},
    "clip": {"min": None, "max": None},
    "pow": {"exponent": 1.0},
}


def activation_options(op: Op) -> dict[str, Any] | None:
    """The options that change the function, without `inplace`. None if no rule handles them."""
    signature = _OPTIONS.get(op.name, {})
    given = named(op, {"input": None, **signature})
    options = {name: given[name] for name in signature}
    if any(isinstance(value, Ref) for value in options.values()):
        return None
    if op.name == "pow" and options["exponent"] not in (1, 2):
        return None
    return options


def gated(program: Program, x: int, gate: int) -> str | None:
    """If the step `gate` is f of the step `x`, the name of f. Their product is then x f(x)."""
    step = program.steps[gate]
    if not isinstance(step, Apply) or step.inputs != (x,) or step.options:
        return None
    for name in ("sigmoid", "hardsigmoid", "tanh", "relu"):
        if step.function is algebra.ACTIVATIONS[name]:
            return name
    return None
