"""Priors of learned transitions by Triton's kernels against the separate operations in float64, gradients too."""

from __future__ import annotations

import pytest
import torch

from kalmannorm import BatchKalmanNorm1d, Moments
from kalmannorm._norms import transition
from kalmannorm._ops import dispatch
from kalmannorm._ops.predict import triton_predict
from support.poisoned import DEVICE, poison

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter

SIZES = {
    "one group": (1, 24, 40),
    "more inputs than a tile": (1, 5, 300),
    "two groups": (2, 17, 33),
    "several blocks of outputs": (3, 70, 20),
    "more groups than a tile": (70, 6, 3),
    "single channels": (5, 1, 1),
}


@pytest.fixture
def launches(monkeypatch):
    """The kernels do it, on poisoned memory; what they were given."""
    calls = []

    class Run:
        @staticmethod
        def forward(*tensors):
            calls.append("forward")
            return triton_predict.forward(*tensors)

        @staticmethod
        def backward(*arguments):
            calls.append("backward")
            return triton_predict.backward(*arguments)

    poison(monkeypatch)
    monkeypatch.setattr(transition, "predicting_for", lambda *tensors: Run)
    return calls


def tensors_of(G, C, P, gains, noise=0.7):
    made = [torch.randn(G, P), torch.rand(G, P) + 0.1, torch.randn(C, P) / P**0.5, torch.tensor(noise)]
    made.append(torch.randn(C) if gains else torch.tensor(0.3))
    return [tensor.to(DEVICE).requires_grad_() for tensor in made]


def gradients(function, tensors, at):
    results = function(*tensors)
    return results, torch.autograd.grad(results, tensors, at)


def assert_close(found, expected):
    for name, a, b in zip(("mean", "var", "matrix", "noise", "logit"), found, expected, strict=False):
        assert a.dtype == torch.float32 and a.shape == b.shape
        scale = b.abs().max().clamp(min=1)  # sums of either sign may cancel
        torch.testing.assert_close(
            a.double() / scale, b / scale, rtol=0, atol=3e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("gains", [False, True], ids=["one gain", "gains"])
@pytest.mark.parametrize(("G", "C", "P"), SIZES.values(), ids=SIZES.keys())
def test_values_and_gradients(G, C, P, gains, launches):
    tensors = tensors_of(G, C, P, gains, noise=-0.7)
    at = [torch.randn(G, C, device=DEVICE), torch.randn(G, C, device=DEVICE), torch.randn(C, device=DEVICE)]
    run = transition.predicting_for()
    results, grads = gradients(lambda *t: transition._Predicted.apply(run, *t), tensors, at)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected, expected_grads = gradients(transition._one_by_one, exact, [grad.double() for grad in at])
    assert_close(results, expected)
    assert_close(grads, expected_grads)
    assert launches == ["forward", "backward"]


@pytest.mark.parametrize("arriving", [(1, 2), (0, 2), (0, 1), (2,)])
def test_gradients_that_do_not_arrive(arriving, launches):
    tensors = tensors_of(2, 5, 4, True)
    run = transition.predicting_for()
    results = transition._Predicted.apply(run, *tensors)
    chosen = [results[i] for i in arriving]
    at = [torch.randn_like(result) for result in chosen]
    found = torch.autograd.grad(chosen, tensors, at, allow_unused=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = [transition._one_by_one(*exact)[i] for i in arriving]
    expected = torch.autograd.grad(wanted, exact, [grad.double() for grad in at], allow_unused=True)
    assert (found[4] is None) == (expected[4] is None)
    assert all(grad is None for grad in found[:4]) == (arriving == (2,))
    for a, b in zip(found, expected, strict=True):
        if a is not None:
            assert_close([a], [torch.zeros_like(a, dtype=torch.float64) if b is None else b])


def test_gradients_of_gradients(launches):
    tensors = [tensor.detach().double().requires_grad_() for tensor in tensors_of(2, 3, 4, True)]

    class Exact:
        forward = staticmethod(transition._one_by_one)

    assert torch.autograd.gradgradcheck(lambda *t: transition._Predicted.apply(Exact, *t), tensors)


@pytest.mark.parametrize("m", [2, 6], ids=["groups", "one group"])
def test_a_layer_trains_as_without_the_kernels(m, launches, monkeypatch):
    layer = BatchKalmanNorm1d(5, prior_features=7, transition="learned", statistics_batch_size=m).to(DEVICE)
    torch.nn.init.normal_(layer.transition.matrix)
    x, rows = torch.randn(6, 5, 4, device=DEVICE), -(-6 // m)
    previous = Moments(torch.randn(rows, 7, device=DEVICE), torch.rand(rows, 7, device=DEVICE) + 0.1)

    def trained():
        layer.zero_grad()
        y = layer(x, previous)
        y.square().sum().backward()
        return [y.detach(), *(parameter.grad for parameter in layer.parameters())]

    found = trained()
    assert launches == ["forward", "backward"]
    monkeypatch.setattr(transition, "predicting_for", lambda *tensors: None)
    for a, b in zip(found, trained(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE != "cuda", reason="elsewhere nothing is for the kernels")
def test_a_noise_for_each_channel_is_not_for_the_kernels():
    tensors = tensors_of(2, 5, 4, True)
    assert dispatch.predicting_for(*tensors) is triton_predict
    assert dispatch.predicting_for(*tensors[:3], torch.ones(5, device=DEVICE), tensors[4]) is None
