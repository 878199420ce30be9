"""The C kernels: the same bits with any number of threads, in every path that leads to them."""

from __future__ import annotations

import pytest
import torch

from kalmannorm._ops.dispatch import kernels_for
from kalmannorm._ops.normalize import aten, native
from kalmannorm._ops.normalize.arguments import Inputs, Results
from kalmannorm._ops.normalize.native_rows import NativeRows
from kalmannorm._ops.normalize.row_kernels import Memory, Scratch
from support.op_arguments import channels_last

SHAPES = {
    "wide": (5, 70, 9, 7),
    "narrow": (4, 3, 16, 16),
    "flat": (6, 130),
    "volume": (3, 17, 4, 5, 3),
    "one": (7, 1, 1),
}
CASES = [(name, False) for name in SHAPES] + [(name, True) for name in ("wide", "narrow", "volume")]


def given(shape, last, dtype=torch.float32, *, residual=True, relu=True, m=2):
    x, other = torch.randn(shape, dtype=dtype) * 3 + 1, torch.randn(shape, dtype=dtype)
    if last:
        x, other = channels_last(x), channels_last(other)
    groups, channels = -(-shape[0] // m), shape[1]
    rows = torch.rand(5, channels, dtype=dtype).add_(0.2)
    rows[4].clamp_(max=0.9)
    weight, bias, mean, var, gain = rows
    inputs = Inputs(
        x,
        mean.expand(groups, -1),
        var.expand(groups, -1),
        gain,
        weight,
        bias,
        m,
        1e-5,
        other if residual else None,
        relu,
    )
    return inputs, rows, groups


@pytest.fixture(autouse=True)
def _needed():
    if not native.fits(torch.zeros(1, 1)):
        pytest.skip("no C compiler")


@pytest.mark.parametrize(("name", "last"), CASES)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
def test_as_pytorch_operations_in_float64(name, last, residual, relu):
    inputs, _, groups = given(SHAPES[name], last, torch.float64, residual=residual, relu=relu)
    results, expected = native.forward(inputs), aten.forward(inputs)
    for found, wanted in zip(results, expected, strict=True):
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    grads = Results(*(torch.randn_like(each) for each in results))
    kept = results if relu and residual else results._replace(y=None)
    found = native.backward(grads, inputs, kept, groups)
    wanted = aten.backward(grads, inputs, kept, groups)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "last"), CASES)
def test_the_same_bits_with_any_number_of_threads(name, last, monkeypatch):
    inputs, _, groups = given(SHAPES[name], last)
    grad = torch.randn_like(inputs.x)

    def run(threads):
        monkeypatch.setattr(native, "threads_for", lambda values: threads)
        results = native.forward(inputs)
        grads = Results(grad, None, None, None, None)
        return [*results, *native.backward(grads, inputs, results, groups)]

    alone = run(1)
    for threads in (2, 3, 5):
        assert all(torch.equal(a, b) for a, b in zip(alone, run(threads), strict=True))


@pytest.mark.parametrize(("name", "last"), CASES)
def test_rows_and_the_output_once_more_have_the_bits_of_the_op(name, last):
    inputs, rows, groups = given(SHAPES[name], last)
    x, channels = inputs.x, inputs.x.shape[1]
    results = native.forward(inputs)
    assert torch.equal(native.again(inputs, *results[1:4]), results.y)
    kernels = NativeRows(x, 2, 1e-5, residual=True, relu=True, pitch=channels)
    memory = Memory(torch.full((4 * groups * channels + 3,), float("nan")), Scratch())
    spread = rows.unsqueeze(1).expand(-1, groups, -1)
    y = kernels.forward(x, spread, inputs.residual, memory, 3)
    assert torch.equal(y, results.y)
    assert all(torch.equal(a, b) for a, b in zip(kernels.moments(memory.moments, 3), results[1:], strict=True))
    grad = torch.randn_like(x)
    dx, d_rows, d_residual = kernels.backward(grad, x, y, spread, memory, 3)
    expected = native.backward(Results(grad, *[None] * 4), inputs, results, groups)
    d_gain = d_rows[4].sum(0)
    found = [dx, d_residual, d_rows[2], d_rows[3], d_gain, d_rows[0].sum(0), d_rows[1]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("last", [False, True])
def test_far_from_zero_nothing_cancels(last):
    """A mean of a thousand deviations: float32 has four digits left of every value, and no more are lost."""
    inputs, _, groups = given((4, 70, 8, 8), last, residual=False, relu=False)
    inputs = inputs._replace(x=inputs.x + 3000, prior_mean=inputs.prior_mean + 3000)
    exact = Inputs(*(t.double() if isinstance(t, torch.Tensor) else t for t in inputs))
    results, expected = native.forward(inputs), aten.forward(exact)
    assert (results.y - expected.y).abs().max() < 1e-3
    torch.testing.assert_close(results.observed_var.double(), expected.observed_var, rtol=1e-6, atol=0)
    grads = Results(torch.randn_like(inputs.x), *[None] * 4)
    found = native.backward(grads, inputs, results._replace(y=None), groups)
    wanted = aten.backward(Results(grads.y.double(), *[None] * 4), exact, expected._replace(y=None), groups)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


def test_what_is_not_finite_stays_in_its_channel():
    inputs, _, _ = given((4, 5, 6, 6), False, relu=False)
    inputs.x[1, 2, 3, 3] = float("inf")
    inputs.x[2, 4, 0, 0] = float("nan")
    y = native.forward(inputs).y
    broken = torch.zeros(4, 5, dtype=torch.bool)
    broken[:2, 2] = broken[2:, 4] = True
    assert torch.equal(y.isfinite().all(3).all(2), ~broken)


def test_what_it_cannot_read_goes_to_pytorch_operations():
    x = torch.randn(4, 6, 8, 8)
    assert kernels_for(x, 2) is native
    assert kernels_for(channels_last(x), 2) is native
    for other in (x[:, ::2], x.transpose(2, 3), x.bfloat16(), x[:0]):
        assert kernels_for(other, 2) is aten
