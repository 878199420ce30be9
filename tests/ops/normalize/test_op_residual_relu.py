"""The op with a residual and a ReLU: one node, the numbers of the separate operations, and no more memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from kalmannorm import Moments, batch_kalman_norm
from kalmannorm._ops.normalize import naive
from kalmannorm._ops.normalize.registered import batch_kalman_norm as op
from support.op_arguments import TOLERANCE, arguments, channels_last, relative_error

pytestmark = pytest.mark.usefixtures("each_kernels")
KINDS = {"relu": (False, True), "residual": (True, False), "both": (True, True)}


def inputs_of(shape, m, dtype=torch.float64, *, residual, last=False, prior=True):
    """The op's tensors, the residual last."""
    inputs = arguments(shape, m, dtype, prior=prior)
    inputs.append(torch.randn(shape).to(dtype) if residual else None)
    lie = channels_last if last else torch.Tensor.contiguous
    for index in (0, 6):
        if inputs[index] is not None:
            inputs[index] = lie(inputs[index].detach()).requires_grad_()
    return inputs


def call(function, inputs, m, relu):
    *first, residual = inputs
    return function(*first, m, 1e-5, residual, relu)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(5, 3, 4, 5), (7, 2), (4, 2, 2, 3, 2), (3, 1, 3, 3)], ids=str)
@pytest.mark.parametrize(("residual", "relu"), KINDS.values(), ids=KINDS.keys())
def test_matches_reference(residual, relu, shape, last, dtype):
    inputs = inputs_of(shape, 2, dtype, residual=residual, last=last)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    actual, expected = call(op, inputs, 2, relu), call(naive.batch_kalman_norm, exact, 2, relu)
    grads = [torch.randn(o.shape) for o in actual]
    everything = []
    for outputs, given in ((actual, inputs), (expected, exact)):
        leaves = [t for t in given if t is not None]
        arriving = [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
        everything.append((*outputs, *torch.autograd.grad(outputs, leaves, arriving)))
    for index, (a, e) in enumerate(zip(*everything, strict=True)):
        assert a.shape == e.shape
        assert relative_error(a, e) < TOLERANCE[dtype], f"result {index}"
    assert actual[0].stride() == inputs[0].stride()


@pytest.mark.parametrize("prior", [True, False], ids=["prior", "no prior"])
@pytest.mark.parametrize(("residual", "relu"), KINDS.values(), ids=KINDS.keys())
def test_gradcheck(residual, relu, prior):
    inputs = inputs_of((4, 2, 3), 2, residual=residual, prior=prior)
    leaves = [t for t in inputs if t is not None]

    def function(*given):
        it = iter(given)
        return call(op, [None if t is None else next(it) for t in inputs], 2, relu)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    torch.library.opcheck(op, (*inputs[:6], 2, 1e-5, inputs[6], relu))


def test_third_derivatives():
    def third(function):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).pow(3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), leaf)[0]

    x, r = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    nothing = (None,) * 5
    expected = third(lambda v: naive.batch_kalman_norm(v, *nothing, 2, 1e-5, r, True)[0])
    actual = third(lambda v: batch_kalman_norm(v, *nothing[:4], statistics_batch_size=2, residual=r, relu=True)[0])
    assert relative_error(actual, expected) < 1e-8


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_equals_the_separate_operations(covariance):
    x, mean, var, gain, weight, bias, residual = inputs_of((5, 3, 4, 4), 2, residual=True)
    given = x, Moments(mean, var), gain, weight, bias
    options = {"statistics_batch_size": 2, "covariance": covariance}
    y, posterior = batch_kalman_norm(*given, **options)
    fused, same = batch_kalman_norm(*given, **options, residual=residual, relu=True)
    torch.testing.assert_close(fused, F.relu(y + residual), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(same.var, posterior.var)
    mapped = torch.func.vmap(lambda x, r: batch_kalman_norm(x, *given[1:], **options, residual=r, relu=True)[0])
    if covariance == "diagonal":
        torch.testing.assert_close(mapped(x[None], residual[None])[0], fused, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "full"), {"relu": 1, "residual": 1, "both": 2}.items())
def test_what_is_kept_for_the_backward(kind, full, device):
    """x, and the output of a ReLU behind a residual, or on a CPU: BatchNorm and ReLU keep two, always."""
    residual, relu = KINDS[kind]
    full = 2 if relu and device == "cpu" else full
    inputs = inputs_of((8, 3, 16, 16), 2, torch.float32, residual=residual)
    inputs = [None if t is None else t.detach().to(device).requires_grad_() for t in inputs]
    kept = []
    with saved_tensors_hooks(lambda t: kept.append((t.data_ptr(), t.numel())) or t, lambda t: t):
        outputs = call(op, inputs, 2, relu)
    large = {pointer for pointer, values in kept if values == inputs[0].numel()}
    assert large == ({inputs[0].data_ptr(), outputs[0].data_ptr()} if full == 2 else {inputs[0].data_ptr()})
    assert sum(values for _, values in set(kept)) < full * inputs[0].numel() + 40 * 3


def test_a_residual_that_lies_otherwise():
    """Of the other layout, or expanded: its gradient is right all the same."""
    inputs = inputs_of((4, 3, 2, 5), 2, residual=False)
    for residual in (
        torch.randn(4, 1, 1, 5).double().expand(4, 3, 2, 5),
        channels_last(torch.randn(4, 3, 2, 5).double()),
    ):
        leaf = residual.detach().requires_grad_()
        outputs = [call(f, [*inputs[:6], leaf], 2, True)[0] for f in (op, naive.batch_kalman_norm)]
        actual, expected = (torch.autograd.grad(y.pow(2).sum(), leaf)[0] for y in outputs)
        torch.testing.assert_close(actual, expected)


def test_a_residual_of_another_shape_or_dtype_is_refused():
    x = torch.randn(4, 3, 2)
    for residual in (torch.randn(4, 3, 1), torch.randn(4, 3, 2).double()):
        with pytest.raises(ValueError, match=r"residual must have the shape and dtype of x"):
            batch_kalman_norm(x, None, None, None, None, residual=residual)


def test_rows_per_group_get_their_own_gradients():
    """γ and β of every group, as Batch Renorm has them, under a ReLU."""
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(2, 3, 3, dtype=torch.float64).unbind()
    leaves = x, weight.requires_grad_(), bias.requires_grad_()
    outputs = [f(x, None, None, None, weight, bias, 2, 1e-5, None, True)[0] for f in (op, naive.batch_kalman_norm)]
    actual, expected = (torch.autograd.grad(y.pow(2).sum(), leaves) for y in outputs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(("residual", "relu"), KINDS.values(), ids=KINDS.keys())
def test_fake_results_have_the_real_shapes_strides_and_dtypes(residual, relu):
    inputs = inputs_of((5, 3, 2, 4), 2, torch.bfloat16, residual=residual, last=True)
    real = call(op, inputs, 2, relu)
    leaves = [t for t in inputs if t is not None]
    real_grads = torch.autograd.grad(real[0].sum(), leaves)
    with FakeTensorMode() as mode:
        faked = [None if t is None else mode.from_tensor(t) for t in inputs]
        fake = call(op, faked, 2, relu)
        fake_grads = torch.autograd.grad(fake[0].sum(), [t for t in faked if t is not None])
    for r, f in zip((*real, *real_grads), (*fake, *fake_grads), strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_a_nan_is_not_hidden_by_the_relu():
    x = torch.randn(4, 3, 2)
    x[0, 1] = float("nan")
    assert batch_kalman_norm(x, None, None, None, None, relu=True)[0][:, 1].isnan().all()
