"""The C kernels: the same bits with any number of threads, in every path that leads to them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

import kalmannorm
from kalmannorm._ops.dispatch import kernels_for
from kalmannorm._ops.normalize import aten, aten_settled, native, native_settled
from kalmannorm._ops.normalize.arguments import Inputs, Results, SettledInputs
from kalmannorm._ops.normalize.aten_settled_rows import AtenSettledRows
from kalmannorm._ops.normalize.native_rows import NativeRows
from kalmannorm._ops.normalize.row_kernels import Expected, Memory, Scratch
from support.op_arguments import channels_last, relative_error
from support.poisoned import poison
from support.settled_cases import Case, doubled, inputs_of, results

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


SETTLED = {
    "ragged last group": Case((5, 6, 3, 3), 2, relu=True),
    "NCHW, ragged": Case((5, 6, 3, 3), 2, last=False, moments=True),
    "one group, no prior": Case((4, 8, 5, 5), 4, prior=0),
    "N groups, wide": Case((4, 70, 5, 5), 1, gain=1),
    "(N, C)": Case((7, 5), 2, relu=True),
    "volume": Case((3, 4, 2, 3, 2), 2, moments=True),
    "rows of groups for everything": Case((5, 4, 3, 3), 2, prior=2, gain=2, weight=2, bias=2, relu=True, moments=True),
    "residual": Case((5, 4, 3, 3), 2, residual=True),
    "residual and relu": Case((5, 4, 3, 3), 2, residual=True, relu=True),
    "residual and relu, NCHW": Case((5, 4, 25, 31), 3, residual=True, relu=True, last=False),
    "large mean": Case((4, 6, 8, 8), 2, mean=1000.0),
}


@pytest.mark.parametrize("name", SETTLED)
@pytest.mark.parametrize("threads", [1, 3])
def test_settled_as_pytorch_operations(name, threads, monkeypatch):
    inputs, rest = inputs_of(SETTLED[name]._replace(device="cpu"))
    exact = SettledInputs(*doubled(inputs)), doubled(rest)
    expected = results(aten_settled, *exact)
    monkeypatch.setattr(native_settled, "threads_for", lambda values: threads)
    monkeypatch.setattr(aten_settled, "backward", None)  # not asked
    poison(monkeypatch)
    for given, tolerance in ((exact, 1e-10), ((inputs, rest), 1e-5)):
        found = results(native_settled, *given)
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.shape == other.shape, index
            assert relative_error(one, other) < max(tolerance, 3e-7 * SETTLED[name].mean), index
    assert all(torch.equal(a, b) for a, b in zip(results(native_settled, inputs, rest), found, strict=True))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("residual", "relu"), [(True, True), (True, False), (False, True)])
def test_settled_rows_as_pytorch_operations(last, residual, relu):
    inputs, rows, groups = given((5, 70, 9, 7), last, torch.float64, residual=residual, relu=relu)
    x, channels = inputs.x, inputs.x.shape[1]
    spread = rows.unsqueeze(1).expand(-1, groups, -1)
    running, averages = (
        (torch.randn(channels).double(), torch.rand(channels).double() + 0.5),
        torch.randn(channels + 2, 3).double(),  # of other norms too
    )
    grad, found = torch.randn_like(x), []
    for kind in (AtenSettledRows, native_settled.NativeSettledRows):
        kernels = kind(x, 2, 1e-5, residual=residual, relu=relu, pitch=channels)
        memory = Memory(torch.full((4 * groups * channels + 2 * channels + 3,), float("nan")).double(), Scratch())
        y = kernels.settle(x, spread, inputs.residual, running, memory, 3)
        saved = x, y if kernels.keeps_output else None, spread, Expected(averages, 2)
        dx, d_rows, d_residual = kernels.differentiate(grad, saved, memory, 3)
        found.append([y, memory.moments[3:], dx, d_rows.sum(1), dx if d_residual is None else d_residual])
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("m", [5, sys.maxsize, 2**64])
def test_groups_larger_than_the_batch(m):
    x = torch.randn(4, 3, 5, 5)
    found, expected = (
        kalmannorm.batch_kalman_norm(x, None, None, None, None, statistics_batch_size=size) for size in (m, None)
    )
    assert torch.equal(found[0], expected[0])


def trained(x, weight, bias, prior, gain, residual):
    """The output and the gradients of one step."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y, posterior = kalmannorm.batch_kalman_norm(
        leaves[0], prior, gain, *leaves[1:], statistics_batch_size=2, residual=residual, relu=True
    )
    return y, *torch.autograd.grad((y * torch.arange(5.0)).sum() + posterior.var.sum(), leaves)


def one_step():
    x = torch.randn(4, 3, 5, 5)
    prior = kalmannorm.Moments(torch.rand(1, 3), torch.rand(1, 3) + 0.5)
    return x, torch.rand(3) + 0.5, torch.randn(3), prior, torch.full((3,), 0.3), torch.randn_like(x)


def test_another_default_device():
    """The C kernels would write to memory that is not there."""
    given = one_step()
    expected = trained(*given)
    with torch.device("meta"):
        y, _ = kalmannorm.batch_kalman_norm(given[0], given[3], 0.3, *given[1:3], statistics_batch_size=2)
        observed = kalmannorm.functional.observe(given[0], 2, join_last=True)
    assert y.device.type == observed.mean.device.type == expected[0].device.type == "cpu"


@pytest.mark.parametrize("name", ["weight", "prior"])
def test_tensors_of_another_device_raise(name):
    x, weight, bias, prior, gain, _ = one_step()
    if name == "weight":
        weight = weight.to("meta")
    else:
        prior = kalmannorm.Moments(prior.mean.to("meta"), prior.var)
    with pytest.raises(RuntimeError, match="meta"):
        kalmannorm.batch_kalman_norm(x, prior, gain, weight, bias, statistics_batch_size=2)


class Wrapped(torch.Tensor):
    """Has a tensor, as the weights of libraries for quantization have."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


def test_a_tensor_without_memory_of_its_own():
    x, weight, bias, prior, gain, _ = one_step()
    wrapped = Wrapped(weight)
    assert wrapped.data_ptr() == 0  # the C kernels would take it as "there is no γ"
    expected, found = (
        kalmannorm.batch_kalman_norm(x, prior, gain, each, bias, statistics_batch_size=2)[0]
        for each in (weight, wrapped)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_views_with_the_opposite_sign():
    """`z.conj().imag` is the memory of z, with a mark that torch's operations read."""

    def conjugate(t):
        return torch.complex(torch.zeros_like(t), -t).conj().imag

    x, weight, bias, prior, gain, residual = one_step()
    assert conjugate(weight).is_neg()
    expected = kalmannorm.batch_kalman_norm(x, prior, gain, weight, bias, statistics_batch_size=2, residual=residual)[0]
    changed = kalmannorm.Moments(conjugate(prior.mean), prior.var)
    for found in (
        kalmannorm.batch_kalman_norm(x, changed, gain, weight, bias, statistics_batch_size=2, residual=residual),
        kalmannorm.batch_kalman_norm(
            torch._neg_view(-x), prior, gain, conjugate(weight), bias, statistics_batch_size=2,
            residual=torch._neg_view(-residual),
        ),
    ):  # fmt: skip
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


def test_a_hook_that_changes_the_layout_of_the_output():
    x, weight, bias, prior, gain, residual = one_step()
    x, residual = channels_last(x), channels_last(residual)
    expected = trained(x, weight, bias, prior, gain, residual)

    def pack(t):
        return t.contiguous() if t.dim() == 4 and t.grad_fn is not None else t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = trained(x, weight, bias, prior, gain, residual)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual", [True, False])
def test_the_fake_of_the_op_on_rows_has_as_many_gradients(residual):
    inputs, rows, groups = given(SHAPES["narrow"], False)
    spread, other = rows.unsqueeze(1).expand(-1, groups, -1), inputs.residual if residual else None
    y, moments = torch.ops.kalmannorm.normalize_rows(inputs.x, spread, other, 2, 1e-5, True)
    run, how = torch.ops.kalmannorm.normalize_rows_backward, (2, 1e-5, True, residual)
    arguments = torch.randn_like(y), inputs.x, spread, moments, y
    found = run(*arguments, *how)
    with FakeTensorMode() as mode:
        fakes = run(*map(mode.from_tensor, arguments), *how)
    assert [each.shape for each in found] == [each.shape for each in fakes]
