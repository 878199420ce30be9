"""Moments through activations against sampling, against dense integration, and where they are hard to compute."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kalmannorm import moments
from kalmannorm.moments import ACTIVATIONS, Moments, belief
from support.wide import wide

torch.set_num_threads(1)

SLOPES = (0.25, -0.5)  # of the PReLU cases, for even and odd channels


def slopes(like: Tensor) -> Tensor:
    return torch.tensor(SLOPES, dtype=like.dtype).repeat(like.shape[-1])[: like.shape[-1]]


class Case:
    """An activation, the function itself, where it is not smooth, and the error admitted for mean and variance."""

    def __init__(self, name, options=(), *, knots=(), error=(1e-10, 1e-8)):
        self.name, self.options, self.knots, self.error = name, dict(options), knots, error
        self.id = name + "".join(f"-{key}={value}" for key, value in self.options.items())
        self.default = not options

    def __call__(self, m: Moments) -> Moments:
        if self.name == "prelu":
            return moments.prelu(m, slopes(m.mean))
        return ACTIVATIONS[self.name](m, **self.options)

    def function(self, x: Tensor) -> Tensor:
        if self.name == "identity":
            return x
        if self.name == "prelu":
            return torch.where(x > 0, x, slopes(x) * x)
        return getattr(F, self.name)(x, **self.options)


CLOSED = {"error": (1e-13, 1e-10)}
CASES = [
    Case("identity", **CLOSED),
    Case("relu", knots=(0,), **CLOSED),
    Case("leaky_relu", knots=(0,), **CLOSED),
    Case("leaky_relu", {"negative_slope": 0.3}, knots=(0,), **CLOSED),
    Case("prelu", knots=(0,), **CLOSED),
    Case("relu6", knots=(0, 6), **CLOSED),
    Case("hardtanh", knots=(-1, 1), **CLOSED),
    Case("hardtanh", {"min_val": -0.5, "max_val": 2.0}, knots=(-0.5, 2), **CLOSED),
    Case("hardsigmoid", knots=(-3, 3), **CLOSED),
    Case("hardswish", knots=(-3, 3), **CLOSED),
    Case("gelu"),
    Case("gelu", {"approximate": "tanh"}),
    Case("silu"),
    Case("sigmoid"),
    Case("tanh", error=(2e-7, 5e-6)),
    Case("elu", knots=(0,), error=(3e-6, 2e-5)),
    Case("elu", {"alpha": 0.5}, knots=(0,), error=(4e-5, 4e-4)),
    Case("celu", knots=(0,), error=(3e-6, 2e-5)),
    Case("celu", {"alpha": 0.5}, knots=(0,), error=(3e-6, 2e-5)),
    Case("selu", knots=(0,), error=(4e-5, 4e-4)),
    Case("softplus", knots=(20,)),
    Case("softplus", {"beta": 5.0}, knots=(4,), error=(2e-5, 2e-4)),
    Case("mish"),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@functools.cache
def grid() -> tuple[Tensor, Tensor]:
    """Means within 4 deviations, seldom where the quadrature has its nodes; deviations from 0.1 to 5. Each (1, C)."""
    deviation = torch.tensor([0.1, 0.3, 1.0, 2.2, 5.0], dtype=torch.float64).view(-1, 1)
    mean = torch.linspace(-4, 4, 27, dtype=torch.float64) * deviation
    return mean.reshape(1, -1), deviation.expand_as(mean).reshape(1, -1)


def relative_error(found: Moments, mean: Tensor, var: Tensor) -> tuple[float, float]:
    """Of the mean in deviations of the output, of the variance in itself."""
    off = (found.mean.double() - mean).abs() / var.sqrt()
    return off.max().item(), (found.var.double() / var - 1).abs().max().item()


@functools.cache
def sample(count: int = 20_000, widen: float = 1.5) -> tuple[Tensor, Tensor]:
    """Draws z and their weights for N(0, 1): one from each of `count` equally likely slices of N(0, widen²).

    Plain sampling would meet the variance of a ReLU at -4 deviations, a tail of 3e-5, too rarely to tell 1 %.
    """
    random = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = widen * torch.special.ndtri((torch.arange(count) + random) / count)
    weight = torch.exp(0.5 * z * z * (1 / widen**2 - 1))
    return z.view(-1, 1), (weight / weight.sum()).view(-1, 1)


@dtypes
@every
def test_within_one_percent_of_sampling(case, dtype):
    mean, deviation = grid()
    z, weight = sample()
    values = case.function(mean + deviation * z)
    sampled_mean = (weight * values).sum(0, keepdim=True)
    sampled_var = (weight * (values - sampled_mean).square()).sum(0, keepdim=True)
    found = case(Moments(mean.to(dtype), deviation.square().to(dtype)))
    assert found.mean.dtype == found.var.dtype == dtype
    assert max(relative_error(found, sampled_mean, sampled_var)) < 0.01


def integrate(case: Case, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre on 800 panels of ±12 deviations, cut at the knots; counted from f(mean)."""
    edges = torch.linspace(-12, 12, 801, dtype=torch.float64).view(-1, 1).expand(-1, mean.shape[1])
    cuts = [((knot - mean) / deviation).clamp(-12, 12) for knot in case.knots]
    edges = torch.cat([edges, *cuts]).sort(0).values
    nodes, weights = (torch.from_numpy(part).view(-1, 1, 1) for part in np.polynomial.legendre.leggauss(6))
    half = (edges[1:] - edges[:-1]) / 2
    z = (edges[:-1] + half + half * nodes).flatten(0, 1)
    weight = (half * weights).flatten(0, 1) * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    middle = case.function(mean)
    offsets = case.function(mean + deviation * z) - middle
    shift = (weight * offsets).sum(0, keepdim=True)
    return middle + shift, (weight * (offsets - shift).square()).sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, (0, 0)), (torch.float32, (6e-6, 3e-6))], ids=["float64", "float32"]
)
@every
def test_as_exact_as_the_docstring_says(case, dtype, rounding):
    mean, deviation = grid()
    found = case(Moments(mean.to(dtype), deviation.square().to(dtype)))
    off, ratio = relative_error(found, *integrate(case, mean, deviation))
    assert off < case.error[0] + rounding[0]
    assert ratio < case.error[1] + rounding[1]


@every
def test_float32_keeps_its_digits_a_thousand_deviations_away(case):
    deviation = torch.tensor([[1e-3, 1e-2, 1e-1, 1.0]], dtype=torch.float64).repeat(1, 2)
    mean = 1000 * deviation * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(4)
    mean, deviation = mean.float().double(), deviation.float().double()
    exact_mean, exact_var = integrate(case, mean, deviation)
    found = case(Moments(mean.float(), deviation.square().float()))
    # The function itself is rounded to float32 where it is evaluated: that much, and no more, cannot be told.
    rounding = 5e-7 * exact_mean.abs().clamp(min=1)
    torch.testing.assert_close(found.mean.double(), exact_mean, rtol=0, atol=rounding.max().item())
    assert ((found.var.double() - exact_var).abs() <= 0.01 * exact_var + rounding.square()).all()


def finite(*tensors: Tensor) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)


@dtypes
@every
def test_zero_variance_gives_the_function_and_finite_gradients(case, dtype):
    bias = torch.tensor([0.0, -1.0, 1.0, -3.0, 3.0, 6.0, 0.3, -20.0], dtype=dtype, requires_grad=True)
    weight = torch.zeros_like(bias, requires_grad=True)
    found = case(belief(weight, bias))
    torch.testing.assert_close(found.mean[0], case.function(bias), rtol=1e-5, atol=1e-7)
    assert ((found.var >= 0) & (found.var < 1e-12)).all()
    (found.mean.sum() + found.var.sum()).backward()
    assert finite(weight.grad, bias.grad)

    mean, var = bias.detach().clone().requires_grad_(), torch.zeros_like(bias, requires_grad=True)
    found = case(Moments(mean.view(1, -1), var.view(1, -1)))
    (found.mean.sum() + found.var.sum()).backward()
    assert finite(mean.grad, var.grad)


@dtypes
@every
def test_finite_and_never_negative_at_extremes(case, dtype):
    means = torch.tensor([0.0, 1e-6, -1e-6, 1.0, -3.0, 6.0, 1e4, -1e4], dtype=dtype)
    variances = torch.tensor([0.0, 1e-30, 1e-20, 2e-20, 1e-12, 1.0, 1e6], dtype=dtype)
    mean = means.repeat(len(variances)).view(1, -1).requires_grad_()
    var = variances.repeat_interleave(len(means)).view(1, -1).requires_grad_()
    found = case(Moments(mean, var))
    assert finite(found.mean, found.var)
    assert (found.var >= 0).all()
    (found.mean.sum() + found.var.sum()).backward()
    assert finite(mean.grad, var.grad)


@every
def test_gradients(case):
    mean = torch.tensor([[0.3, -0.7, 2.9], [-3.2, 6.1, -0.04]], dtype=torch.float64, requires_grad=True)
    var = torch.tensor([[0.5, 2.0, 0.02], [1.1, 4.0, 9.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: case(Moments(a, b))[:2], (mean, var))


@pytest.mark.parametrize("case", [case for case in CASES if case.error == CLOSED["error"]], ids=lambda case: case.id)
def test_gradients_with_the_mean_on_a_knot(case):
    mean = torch.tensor([[0.0, *case.knots]], dtype=torch.float64, requires_grad=True)
    var = torch.linspace(0.3, 2, mean.shape[1], dtype=torch.float64).view(1, -1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: case(Moments(a, b))[:2], (mean, var))


closed = pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("relu", "leaky_relu", "relu6", "hardswish")],
    ids=lambda case: case.id,
)


@closed
def test_gradients_of_gradients(case):
    """A closed form has none of its own: those of the operations it stands for."""
    mean = torch.tensor([[0.3, -0.7, 2.9]], dtype=torch.float64, requires_grad=True)
    var = torch.tensor([[0.5, 2.0, 0.2]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda a, b: case(Moments(a, b))[:2], (mean, var))


@closed
def test_transforms_and_forward_mode(case):
    mean, var = torch.tensor([0.3, -0.7, 2.9]).double(), torch.tensor([0.5, 2.0, 0.2]).double()

    def total(mean, var):
        found = case(Moments(mean.view(1, -1), var.view(1, -1)))
        return (found.mean + 3 * found.var).sum()

    leaves = mean.clone().requires_grad_(), var.clone().requires_grad_()
    expected = torch.autograd.grad(total(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(total, argnums=(0, 1))(mean, var), expected)
    mapped = torch.func.vmap(torch.func.grad(total, argnums=(0, 1)))(mean.view(3, 1), var.view(3, 1))
    torch.testing.assert_close(tuple(part.view(-1) for part in mapped), expected)
    _, slope = torch.func.jvp(total, (mean, var), (torch.ones_like(mean), torch.zeros_like(var)))
    torch.testing.assert_close(slope, expected[0].sum())


def test_a_row_of_means_with_many_of_variances():
    mean, var = torch.randn(1, 4, requires_grad=True), torch.rand(3, 4)
    moments.relu(Moments(mean, var)).var.sum().backward()
    assert mean.grad.shape == (1, 4)


@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_prelu_weight_gets_a_gradient(shape):
    weight = torch.full(shape, 0.2, dtype=torch.float64, requires_grad=True)
    m = Moments(torch.tensor([[0.3, -0.7, 0.0]]).double(), torch.tensor([[0.5, 2.0, 1.0]]).double())
    assert torch.autograd.gradcheck(lambda w: moments.prelu(m, w)[:2], (weight,))


@every
def test_rows_are_independent_and_a_covariance_is_dropped(case):
    random = torch.Generator().manual_seed(1)
    m = Moments(torch.randn(3, 5, generator=random), torch.rand(3, 5, generator=random))
    found = case(m)
    assert found.mean.shape == found.var.shape == (3, 5)
    for row in range(3):
        alone = case(Moments(m.mean[row : row + 1], m.var[row : row + 1]))
        torch.testing.assert_close(alone, Moments(found.mean[row : row + 1], found.var[row : row + 1]))
    if case.name != "identity":
        assert case(Moments(*m[:2], torch.diag_embed(m.var))).cov is None


@wide
def test_compiles_in_one_graph():
    def every_case(mean: Tensor, var: Tensor) -> list[Moments]:
        return [case(Moments(mean, var)) for case in CASES]

    mean, var = torch.randn(2, 6, generator=torch.Generator().manual_seed(2)), torch.ones(2, 6)
    compiled = torch.compile(every_case, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mean, var), every_case(mean, var))


def test_autocast_changes_nothing():
    m = Moments(torch.linspace(-2, 2, 9).view(1, -1), torch.linspace(0, 2, 9).view(1, -1))
    for case in CASES:
        plain = case(m)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(case(m), plain, rtol=0, atol=0)


def test_every_activation_is_tested_with_its_defaults():
    assert set(ACTIVATIONS) == {case.name for case in CASES if case.default}
    assert set(ACTIVATIONS) <= set(moments.__all__)


def test_through_a_function_of_ones_own():
    mean, var = torch.tensor([[0.5, -2.0]]).double(), torch.tensor([[0.7, 3.0]]).double()
    found = moments.through(Moments(mean, var), torch.sin)
    expected = mean.sin() * torch.exp(-var / 2)
    torch.testing.assert_close(found.mean, expected)
    torch.testing.assert_close(found.var, (1 - (2 * mean).cos() * torch.exp(-2 * var)) / 2 - expected.square())


def test_piecewise_takes_jumps():
    mean, var = torch.tensor([[-2.0, 0.0, 1.0]]).double(), torch.tensor([[1.0, 2.0, 0.5]]).double()
    step = moments.piecewise(Moments(mean, var), (0.0,), ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0)))
    above = torch.special.ndtr(mean / var.sqrt())
    torch.testing.assert_close(step, Moments(above, above * (1 - above)))


ONE = Moments(torch.zeros(1, 3), torch.ones(1, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: moments.prelu(ONE, torch.ones(2)), r"`weight`.*3 channels.*\(2,\)", id="prelu-weight"),
        pytest.param(lambda: moments.hardtanh(ONE, 1.0, 1.0), "`min_val` must be below `max_val`", id="hardtanh-empty"),
        pytest.param(lambda: moments.piecewise(ONE, (0.0,), ((0.0, 1.0, 0.0),)), "but 1 were", id="pieces-missing"),
        pytest.param(lambda: moments.piecewise(ONE, (1.0, 0.0), ((0.0,) * 3,) * 3), "increasing", id="knots-unordered"),
        pytest.param(lambda: moments.piecewise(ONE, (math.inf,), ((0.0,) * 3,) * 2), "finite", id="knots-infinite"),
        pytest.param(lambda: moments.through(ONE, torch.sin, density=0), "`density`", id="no-nodes"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
