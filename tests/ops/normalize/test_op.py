"""The op against the naive reference and against `F.batch_norm`: output, moments, every gradient."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

from kalmannorm import Moments, batch_kalman_norm
from kalmannorm._ops.normalize import exportable, naive
from kalmannorm._ops.normalize.registered import batch_kalman_norm as op
from kalmannorm._ops.normalize.registered import observe
from support.op_arguments import SHAPES, TOLERANCE, arguments, assert_same, channels_last, relative_error, run

pytestmark = pytest.mark.usefixtures("each_kernels")
LAYOUTS = {f"{name}-contiguous": (shape, "contiguous") for name, shape in SHAPES.items()}
LAYOUTS |= {f"{name}-channels_last": (shape, "channels_last") for name, shape in SHAPES.items() if len(shape) > 3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 16])
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_matches_reference(shape, layout, m, dtype):
    inputs = arguments(shape, m, dtype)
    if layout == "channels_last":
        inputs[0] = channels_last(inputs[0].detach()).requires_grad_()
    exact = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    # Half precision: the reference in float64 on the same rounded inputs, its results rounded once.
    grads = [torch.randn_like(o) for o in op(*inputs, m, 1e-5)]
    actual, actual_grads = run(op, inputs, m, grads)
    expected, expected_grads = run(naive.batch_kalman_norm, exact, m, grads)
    tolerance = TOLERANCE[dtype]
    assert actual[0].dtype == dtype
    assert all(o.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) for o in actual[1:])
    for index, (a, e) in enumerate(zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True)):
        assert a.shape == e.shape
        assert relative_error(a, e) < tolerance, f"result {index}"
    assert actual[0].stride() == inputs[0].stride()


@pytest.mark.parametrize("rows", ["groups", "one"])
@pytest.mark.parametrize("prior", [True, False], ids=["prior", "no-prior"])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_gradcheck(m, prior, rows):
    inputs = arguments((4, 2, 3), m, rows=rows, prior=prior)
    leaves = [t for t in inputs if t is not None]

    def function(*given):
        it = iter(given)
        return op(*(None if t is None else next(it) for t in inputs), m, 1e-5)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_per_channel_gain_gradcheck():
    x, mean, var, _, weight, bias = arguments((4, 3, 2), 2)
    gain = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: op(*a, 2, 1e-5), (x, mean, var, gain, weight, bias))


@pytest.mark.parametrize("gain", [0.3, 0.5, 0.999])
def test_a_variance_that_overflows_gives_the_naive_output(gain):
    """Zero, as from `F.batch_norm`, in the op, in its plain form and in the reference; never NaN."""
    x = torch.tensor([1e20, -1e20, 3e19, 2e19])[:, None]
    prior, q = Moments(torch.zeros(1, 1), torch.ones(1, 1)), torch.tensor(gain)
    expected = naive.batch_kalman_norm(x, *prior[:2], q, None, None, 4, 1e-5)
    found = op(x, *prior[:2], q, None, None, 4, 1e-5)
    plainly, *moments = exportable.normalize(x, prior, q, None, None, statistics_batch_size=4, eps=1e-5)
    assert torch.equal(expected[0], F.batch_norm(x, None, None, None, None, True))
    for results in (found, (plainly, *(t for m in moments for t in m[:2]))):
        for a, e in zip(results, expected, strict=True):
            torch.testing.assert_close(a, e)


def test_a_value_beside_an_outlier_keeps_its_digits():
    """The outlier pulls x̄ far away, but by q = 1e-6 not the posterior's mean, near which the other values lie."""
    x = torch.randn(6, 1, 2, 2) * 1e6
    x[0] = 2e13
    leaves = [x, torch.zeros(1, 1), torch.ones(1, 1), torch.tensor(1e-6), torch.ones(1), torch.zeros(1)]
    exact = [t.double() for t in leaves]
    y, expected = (f(*given, 6, 1e-5)[0][1:] for f, given in ((op, leaves), (naive.batch_kalman_norm, exact)))
    assert relative_error(y, expected) < 1e-6


@pytest.mark.parametrize("m", [1, 3])
def test_opcheck(m):
    """Schema, fake tensors, autograd registration and aot dispatch, as torch checks them itself."""
    torch.library.opcheck(op, (*arguments((5, 3, 2, 2), m), m, 1e-5))
    inputs = arguments((5, 3, 2, 2), m)
    inputs[0] = channels_last(inputs[0].detach()).requires_grad_()
    torch.library.opcheck(op, (*inputs, m, 1e-5))


@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (6, 3), (6, 3, 4), (6, 3, 2, 2, 2)], ids=str)
def test_no_prior_equals_batch_norm(shape):
    x, *_, weight, bias = arguments(shape, 6, prior=False)
    y, posterior = batch_kalman_norm(x, None, None, weight, bias)
    running_mean, running_var = torch.zeros(3).double(), torch.ones(3).double()
    expected = F.batch_norm(x, running_mean, running_var, weight, bias, training=True, momentum=1.0)
    g = torch.randn_like(y)
    leaves = (x, weight, bias)
    assert_same([y], [expected], 1e-12)
    assert_same(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g), 1e-10)
    assert_same([posterior.mean[0]], [running_mean], 1e-12)


def test_full_trust_equals_batch_norm():
    x, mean, var, _, weight, bias = arguments((6, 3, 4), 6)
    y, _ = batch_kalman_norm(x, Moments(mean, var), torch.ones(()).double(), weight, bias)
    assert_same([y], [F.batch_norm(x, None, None, weight, bias, training=True)], 1e-12)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("N", [6, 7, 8], ids=["N6", "N7-ragged", "N8-ragged"])
def test_groups_equal_separate_calls(N, layout):
    """Output, moments and gradients; the last, smaller group equals its own call too."""
    m = 3
    inputs = arguments((N, 4, 3, 3), m)
    if layout == "channels_last":
        inputs[0] = channels_last(inputs[0].detach()).requires_grad_()
    x, mean, var, gain, weight, bias = inputs
    y, posterior = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=m)
    parts = [
        batch_kalman_norm(x[start : start + m], Moments(mean[g : g + 1], var[g : g + 1]), gain, weight, bias)
        for g, start in enumerate(range(0, N, m))
    ]
    separate = [torch.cat(t) for t in zip(*((part, *moments[:2]) for part, moments in parts), strict=True)]
    together = [y, posterior.mean, posterior.var]
    grads = [torch.randn_like(t) for t in together]
    assert_same(together, separate, 1e-12)
    assert_same(torch.autograd.grad(together, inputs, grads), torch.autograd.grad(separate, inputs, grads), 1e-12)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("mean", [0, 1000])
@pytest.mark.parametrize("shape", [(8, 16, 12, 12), (2, 4, 256, 256), (1, 2, 96, 96, 96)], ids=str)
def test_loses_no_more_digits_than_batch_norm(shape, mean, layout):
    """Up to |mean| = 1000 σ, float32: mean errors of output and dx against float64, beside F.batch_norm's own."""

    def both(function, values, g):
        leaf = values.clone().requires_grad_()
        y = function(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, g.to(y.dtype))[0]

    def ours(values):
        return batch_kalman_norm(values, None, None, None, None)[0]

    def theirs(values):
        return F.batch_norm(values, None, None, training=True)

    errors = {ours: torch.zeros(2), theirs: torch.zeros(2)}
    draws = 8 if len(shape) == 4 else 2
    for _ in range(draws):
        x = (torch.randn(shape, dtype=torch.float64) + mean).float()
        x = x if layout == "contiguous" else channels_last(x)
        g = torch.randn(x.shape, dtype=torch.float64)
        truth = both(theirs, x.double(), g)
        for function, total in errors.items():
            total += torch.tensor([relative_error(a, t) for a, t in zip(both(function, x, g), truth, strict=True)])
    mine, reached = errors[ours] / draws, errors[theirs] / draws
    # Where both are exact to float32 rounding no digit is lost; beyond that, not a hundredth of one more.
    assert ((mine < 2e-7) | (mine < 10**0.01 * reached)).all(), (mine, reached)


def test_other_layouts_of_the_gradient():
    """A gradient may arrive expanded, or in the other layout."""
    x, mean, var, gain, weight, bias = arguments((4, 3, 2, 5), 2)
    for source in (x, channels_last(x.detach()).requires_grad_()):
        y, _ = batch_kalman_norm(source, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
        g = torch.randn(4, 3, 1, 1, dtype=y.dtype).expand_as(y)
        for grad in (g, g.contiguous(), channels_last(g)):
            (dx,) = torch.autograd.grad(y, source, grad, retain_graph=True)
            expected = naive.batch_kalman_norm(source, mean, var, gain, weight, bias, 2, 1e-5)[0]
            assert_same([dx], torch.autograd.grad(expected, source, g), 1e-12)


def test_strided_input():
    """A slice that lies in no dense layout is taken as it is."""
    wide = torch.randn(4, 6, 5, 5, dtype=torch.float64, requires_grad=True)
    y, _ = batch_kalman_norm(wide[:, ::2, 1:4], None, None, None, None, statistics_batch_size=2)
    expected, *_ = naive.batch_kalman_norm(wide[:, ::2, 1:4], None, None, None, None, None, 2, 1e-5)
    assert_same([y], [expected], 1e-12)
    assert_same(torch.autograd.grad(y.square().sum(), wide), torch.autograd.grad(expected.square().sum(), wide), 1e-9)


def test_inputs_that_need_no_gradient():
    x, mean, var, gain, weight, bias = (t.detach() for t in arguments((4, 3, 2), 2))
    weight.requires_grad_()
    y, posterior = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
    y.square().sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        y, posterior = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
    assert not y.requires_grad
    assert not posterior.mean.requires_grad


def test_gradient_through_the_posterior_alone():
    x, mean, var, gain, weight, bias = arguments((4, 3, 2), 2)
    _, posterior = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
    _, expected_mean, expected_var, *_ = naive.batch_kalman_norm(x, mean, var, gain, weight, bias, 2, 1e-5)
    leaves = (x, mean, var, gain)
    actual = torch.autograd.grad(posterior.var.square().sum() + posterior.mean.sum(), leaves)
    assert_same(actual, torch.autograd.grad(expected_var.square().sum() + expected_mean.sum(), leaves), 1e-12)


def test_autocast_keeps_statistics_in_float32():
    x, mean, var, gain, weight, bias = arguments((8, 3, 6, 6), 2, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, posterior = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
    assert y.dtype == torch.bfloat16
    assert posterior.mean.dtype == posterior.var.dtype == torch.float32
    expected = naive.batch_kalman_norm(*(t.double() for t in (x, mean, var, gain, weight, bias)), 2, 1e-5)
    assert_same([posterior.mean, posterior.var], [e.float() for e in expected[1:3]], 1e-5)


@pytest.mark.parametrize("N", [4, 5], ids=["N4", "N5-ragged"])
def test_full_covariance_matches_its_definition(N):
    x, mean, var, gain, weight, bias = arguments((N, 3, 4, 2), 2)
    y, posterior = batch_kalman_norm(
        x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2, covariance="full"
    )
    diagonal, expected = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
    assert_same([y, posterior.mean, posterior.var], [diagonal, expected.mean, expected.var], 1e-12)
    for group, start in enumerate(range(0, N, 2)):
        values = x[start : start + 2].detach().movedim(1, 0).reshape(3, -1)
        d = values.mean(1) - mean[group].detach()
        q = gain.item()
        covariance = torch.cov(values, correction=0)
        fused = (1 - q) * torch.diag(var[group].detach()) + q * covariance + q * (1 - q) * torch.outer(d, d)
        assert_same([posterior.cov[group].detach()], [fused], 1e-12)


@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 3), (4, 2, 3, 2)], ids=str)
def test_observing_alone(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    actual, expected = observe(x, 2), naive.batch_kalman_norm(x, *[None] * 5, 2, 1e-5)[3:]
    assert_same(actual, expected, 1e-12)
    assert torch.autograd.gradcheck(lambda x: observe(x, 2), x)
    assert torch.autograd.gradgradcheck(lambda x: observe(x, 2), x)
    torch.library.opcheck(observe, (x, 2))


def test_third_derivatives():
    """Gradients of gradients of gradients, as plain autograd has them. (`F.batch_norm`'s own are off in torch 2.10.)"""

    def third(function):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).pow(3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), leaf)

    x = torch.randn(4, 2, 3, dtype=torch.float64)
    nothing = (None,) * 5
    expected = third(lambda v: naive.batch_kalman_norm(v, *nothing, 0, 1e-5)[0])
    assert_same(third(lambda v: batch_kalman_norm(v, *nothing[:4])[0]), expected, 1e-8)


def test_forward_mode():
    x, v = torch.randn(4, 2, 3, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64)

    def ours(x):
        return batch_kalman_norm(x, None, None, None, None)[0]

    def theirs(x):
        return F.batch_norm(x, None, None, training=True)

    expected = torch.func.jvp(theirs, (x,), (v,))[1]
    assert_same([torch.func.jvp(ours, (x,), (v,))[1]], [expected], 1e-10)
    with forward_ad.dual_level():
        dual = ours(forward_ad.make_dual(x, v))
        assert_same([forward_ad.unpack_dual(dual).tangent], [expected], 1e-10)


def test_bias_may_change_before_the_backward():
    x, mean, var, gain, weight, bias = arguments((4, 3, 2), 2)
    y, _ = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
    with torch.no_grad():
        bias.add_(1)
    y.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 8.0))


def test_torch_func():
    """Gradients, Jacobians and per-example gradients by torch.func equal autograd's."""
    x, mean, var, gain, weight, bias = arguments((4, 3, 2), 2)

    def loss(x, weight):
        y, posterior = batch_kalman_norm(x, Moments(mean, var), gain, weight, bias, statistics_batch_size=2)
        return y.pow(3).sum() + posterior.var.sum()

    expected = torch.autograd.grad(loss(x, weight), (x, weight))
    assert_same(torch.func.grad(loss, argnums=(0, 1))(x, weight), expected, 1e-10)
    jacobian = torch.func.jacrev(lambda x: batch_kalman_norm(x, None, None, None, None)[0])(x.detach())
    assert jacobian.shape == (*x.shape, *x.shape)
    batches = torch.stack([x.detach(), x.detach() + 1])
    per_batch = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(batches, weight.detach())
    assert_same([per_batch[0]], [expected[0]], 1e-10)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_fake_results_have_the_real_shapes_strides_and_dtypes(layout):
    """What torch.compile plans with is what the op returns, forward and backward."""
    inputs = arguments((5, 3, 2, 4), 2, torch.bfloat16)
    if layout == "channels_last":
        inputs[0] = channels_last(inputs[0].detach()).requires_grad_()
    real = op(*inputs, 2, 1e-5)
    real_grads = torch.autograd.grad(real[0].sum(), inputs)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(t) for t in inputs]
        fake = op(*faked, 2, 1e-5)
        fake_grads = torch.autograd.grad(fake[0].sum(), faked)
    for r, f in zip((*real, *real_grads), (*fake, *fake_grads), strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_double_backward_in_half_precision():
    """A gradient penalty on bf16 activations: right dtype, and the value of float64 to bf16's precision."""

    def penalty(leaf):
        y, _ = batch_kalman_norm(leaf, None, None, None, None, statistics_batch_size=2)
        (first,) = torch.autograd.grad(y.double().pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.double().square().sum(), leaf)[0]

    x = (torch.randn(4, 3, 8, 8) * 2).bfloat16().requires_grad_()
    actual, expected = penalty(x), penalty(x.detach().double().requires_grad_())
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, expected) < 5e-2
