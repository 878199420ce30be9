"""Sums, products, concatenations and shapes of moments against samples that are exactly independent.

Every pair of a row of X and a row of Y, taken once, is a sample in which X and Y are independent with nothing left to
chance: its moments must be those of the algebra to rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kalmannorm.moments import Moments, add, concatenate, flatten, pooling, product, scale, select, shift, subtract

torch.set_num_threads(1)


def draw(rows: int, channels: int, seed: int) -> Tensor:
    """Correlated, far from Gaussian, with means of their own."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(channels, channels, generator=random, dtype=torch.float64)
    return torch.rand(rows, channels, generator=random, dtype=torch.float64).exp() @ mix + 1


def measured(x: Tensor) -> Moments:
    mean = x.mean(0, keepdim=True)
    cov = ((x - mean).T @ (x - mean) / len(x)).unsqueeze(0)
    return Moments(mean, cov.diagonal(dim1=1, dim2=2), cov)


def bare(m: Moments) -> Moments:
    return Moments(m.mean, m.var)


def pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.repeat_interleave(len(y), 0), y.repeat(len(x), 1)


X, Y, GATE = draw(13, 4, seed=1), draw(11, 4, seed=2), draw(11, 1, seed=3)


@pytest.mark.parametrize("full", [True, False], ids=["covariance", "diagonal"])
@pytest.mark.parametrize("other", [Y, GATE], ids=["same-channels", "one-channel"])
@pytest.mark.parametrize(
    ("algebra", "operation"),
    [(add, torch.add), (subtract, torch.subtract), (product, torch.multiply)],
    ids=["add", "subtract", "product"],
)
def test_two_branches(algebra, operation, other, full):
    expected = measured(operation(*pairs(X, other)))
    a, b = measured(X), measured(other)
    if full:
        torch.testing.assert_close(algebra(a, b), expected)
    else:
        torch.testing.assert_close(algebra(bare(a), bare(b)), bare(expected))
        assert algebra(a, bare(b)).cov is None
        assert algebra(bare(a), b).cov is None


def test_add_takes_many():
    a, b = measured(X), measured(Y)
    torch.testing.assert_close(add(a, b, a, b), add(add(a, b), add(a, b)))


@pytest.mark.parametrize(
    "factor", [-2.5, torch.tensor(0.5), torch.tensor([1.0, -2.0, 0.0, 3.0])], ids=["number", "scalar", "per-channel"]
)
def test_scale_and_shift(factor):
    torch.testing.assert_close(scale(measured(X), factor), measured(X * factor))
    torch.testing.assert_close(shift(measured(X), factor), measured(X + factor))
    assert scale(bare(measured(X)), factor).cov is None


def test_scale_keeps_the_dtype_and_gives_gradients():
    factor = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    m = shift(scale(measured(X).to(torch.float32), factor), factor)
    assert m.mean.dtype == m.var.dtype == torch.float32
    (m.mean.sum() + m.var.sum()).backward()
    torch.testing.assert_close(
        factor.grad.double(), measured(X).mean[0] + 2 * measured(X).var[0] + 1, rtol=0.01, atol=0
    )


def test_concatenate():
    expected = measured(torch.cat(pairs(X, GATE), 1))
    torch.testing.assert_close(concatenate([measured(X), measured(GATE)]), expected)
    torch.testing.assert_close(concatenate([measured(X), bare(measured(GATE))]), bare(expected))
    torch.testing.assert_close(concatenate([measured(X)]), measured(X))


def rows(count: int, channels: int) -> Moments:
    values = torch.arange(1.0, count * channels + 1).view(count, channels)
    return Moments(values, values.square(), torch.diag_embed(values.square()))


@pytest.mark.parametrize(
    "combine",
    [add, subtract, product, lambda a, b: concatenate([a, b])],
    ids=["add", "subtract", "product", "concatenate"],
)
def test_a_single_row_stands_for_every_group(combine):
    one, many = rows(1, 3), rows(5, 3)
    same = Moments(one.mean.expand(5, -1), one.var.expand(5, -1), one.cov.expand(5, -1, -1))
    torch.testing.assert_close(combine(one, many), combine(same, many))
    torch.testing.assert_close(combine(many, one), combine(many, same))


@pytest.mark.parametrize("size", [(1, 1), (2, 3)], ids=str)
def test_flatten_orders_channels_as_torch_does(size):
    m = rows(2, 3)
    image = m.mean.view(2, 3, 1, 1).expand(2, 3, *size)
    found = flatten(m, size[0] * size[1])
    torch.testing.assert_close(found, Moments(image.flatten(1), image.flatten(1).square()))


@pytest.mark.parametrize(
    "index",
    [slice(1, 3), slice(None, None, 2), [3, 0, 0], torch.tensor([2, 1]), torch.tensor([True, False, False, True])],
    ids=["slice", "every-other", "list", "tensor", "mask"],
)
def test_select(index):
    torch.testing.assert_close(select(measured(X), index), measured(X[:, index]))
    torch.testing.assert_close(select(bare(measured(X)), index), bare(measured(X[:, index])))


def test_pooling_leaves_moments_unchanged():
    torch.testing.assert_close(pooling(measured(X)), measured(X), rtol=0, atol=0)


def test_gradients():
    def everything(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        m, n = Moments(a, b), Moments(c, d)
        joined = concatenate([product(m, n), subtract(m, n), add(m, n, shift(scale(m, 2.0), 1.0))])
        return select(flatten(joined, 2), slice(1, None, 3))[:2]

    arguments = [torch.rand(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    assert torch.autograd.gradcheck(everything, arguments)


def test_compiles_in_one_graph():
    def everything(a: Moments, b: Moments, factor: Tensor) -> tuple[Moments, Moments]:
        joined = concatenate([product(a, b), subtract(a, b), add(a, b, shift(scale(a, factor), 1.0))])
        return flatten(pooling(joined), 2), select(joined, slice(0, 4))

    arguments = (measured(X), measured(Y), torch.ones(4))
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), everything(*arguments))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(lambda: add(rows(1, 3), rows(1, 2)), ValueError, r"add: .*channels.*\(1, 3\), \(1, 2\)", id="add"),
        pytest.param(lambda: subtract(rows(3, 3), rows(2, 3)), ValueError, "subtract: .*rows", id="subtract"),
        pytest.param(lambda: product(rows(1, 3), rows(1, 2)), ValueError, "product: .*channels", id="product"),
        pytest.param(
            lambda: concatenate([rows(3, 1), rows(2, 1)]), ValueError, "concatenate: .*rows", id="concatenate"
        ),
        pytest.param(lambda: concatenate([]), ValueError, "at least one", id="concatenate-nothing"),
        pytest.param(lambda: scale(rows(1, 3), torch.ones(2)), ValueError, "`factor`.*3 channels", id="scale"),
        pytest.param(lambda: shift(rows(1, 3), torch.ones(2)), ValueError, "`offset`.*3 channels", id="shift"),
        pytest.param(lambda: flatten(rows(1, 3), 0), ValueError, "`positions` must be at least 1", id="flatten"),
        pytest.param(lambda: select(rows(1, 3), 1), TypeError, r"`index`.*use \[1\]", id="select"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
