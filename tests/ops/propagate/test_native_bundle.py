"""Bundles in C against the same in PyTorch operations and float64: every row, every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kalmannorm._ops.propagate import aten, native_bundle
from kalmannorm._ops.propagate.bundle import ROWS
from support.bundled_nets import IMAGE, Blocks, Smooth, bundles, converted

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """A residual sum, a difference, a product, scaled outputs, channels out of order, a convolution with a bias."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.third = nn.Conv2d(16, 6, 1), nn.BatchNorm2d(6, affine=False)
        self.other, self.fourth = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)

    def forward(self, x):
        x = self.first(self.stem(x)).relu()
        y = self.second(self.conv(x))
        z = torch.cat([(y + x).relu(), 0.5 * (y - x) + 1], 1)
        z = self.third(self.last(z[:, torch.arange(15, -1, -1)]))
        return z.mean((2, 3)) + self.fourth(self.other(y * x)).mean((2, 3))


CASES = {
    "mixed": (Mixed, IMAGE, {}),
    "channels_last": (lambda: Mixed().to(memory_format=torch.channels_last), IMAGE, {}),
    "a gain for each channel": (Mixed, IMAGE, {"per_channel_gain": True}),
}


@pytest.fixture(autouse=True)
def _needed():
    if not native_bundle.usable(torch.zeros(1)):
        pytest.skip("no C compiler")


def both(bundle, tensors, dtype, rows=True, asked=None):
    """All results and gradients of a bundle in C, and in PyTorch operations and float64."""
    torch.manual_seed(3)
    others = bundle.results[len(bundle.norms) :]
    at_rows = torch.randn(ROWS, bundle.channels) if rows else None
    at = [
        (torch.randn(1, each.numel()), None if n % 2 else torch.randn(1, each.numel())) for n, each in enumerate(others)
    ]
    asked = asked or [True] * len(tensors)

    def run(module, dtype):
        given = [tensor.to(dtype) for tensor in tensors]
        rows_of = None if at_rows is None else at_rows.to(dtype)
        pairs = [tuple(None if grad is None else grad.to(dtype) for grad in pair) for pair in at]
        made = module.forward(bundle, given, dtype, CPU, True)
        grads = module.backward(bundle, given, made.saved, made.state, rows_of, pairs, asked)
        return [made.rows, *(each for pair in made.others for each in pair)], grads

    return run(native_bundle, dtype), run(aten, torch.float64)


def assert_same(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            assert (one.double() - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_rows_and_gradients(name, dtype, monkeypatch):
    net, shape, options = CASES[name]
    found = bundles(converted(net(), shape, **options), torch.randn(shape), monkeypatch)
    assert found
    for bundle, tensors in found:
        assert native_bundle.applies(bundle, torch.float32, tensors)
        (results, grads), (exact, expected) = both(bundle, tensors, dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 3e-6
        assert_same(results, exact, tolerance)
        assert_same(grads, expected, tolerance)


@torch.no_grad()
def test_some_gradients_only(monkeypatch):
    (bundle, tensors), *_ = bundles(converted(Mixed(), IMAGE), torch.randn(IMAGE), monkeypatch)
    asked = [place % 2 == 0 for place in range(len(tensors))]
    (_, grads), (_, expected) = both(bundle, tensors, torch.float64, asked=asked)
    assert [grad is not None for grad in grads] == asked
    assert_same(grads, expected, 1e-12)


@torch.no_grad()
def test_what_it_cannot_run(monkeypatch):
    for net, shape in ((Blocks(), IMAGE), (Smooth(), (4, 4))):  # layers with groups; quadrature
        for bundle, tensors in bundles(converted(net, shape), torch.randn(shape), monkeypatch):
            assert not native_bundle.applies(bundle, torch.float32, tensors)
    (bundle, tensors), *_ = bundles(converted(Mixed(), IMAGE), torch.randn(IMAGE), monkeypatch)
    assert not native_bundle.applies(bundle, torch.float64, tensors)
    assert not native_bundle.applies(bundle, torch.float32, [tensor.bfloat16() for tensor in tensors])


@torch.no_grad()
def test_a_weight_with_gaps_later_on(monkeypatch):
    (bundle, tensors), *_ = bundles(converted(Mixed(), IMAGE), torch.randn(IMAGE), monkeypatch)
    (_, before), _ = both(bundle, tensors, torch.float64)
    gaps = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in tensors]
    (_, after), _ = both(bundle, gaps, torch.float64)
    assert_same(after, before, 1e-12)
