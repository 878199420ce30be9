"""A max pool that keeps one byte per output has the bits of torch's, also in second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kalmannorm._ops.normalize.pooling import fits_bytes, max_pool
from kalmannorm._support.kept_tensors import kept_tensors

WINDOWS = {
    "stem of a ResNet": ((3, 3), (2, 2), (1, 1), (1, 1), False),
    "a last window that is cut": ((3, 3), (2, 2), (0, 0), (1, 1), True),
    "windows side by side": ((2, 2), (2, 2), (0, 0), (1, 1), False),
    "neither size nor stride is square": ((5, 3), (1, 2), (2, 1), (1, 1), False),
}


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
def test_has_the_bits_of_torchs(window, last):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 7).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    x[0, 0, 2, 2] = float("nan")
    results = []
    for pool in (max_pool, F.max_pool2d):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, *window)
        grad = torch.linspace(-1, 1, y.numel()).view_as(y)
        results.append((y, *torch.autograd.grad(y, leaf, grad)))
    for ours, torchs in zip(*results, strict=True):
        assert ours.stride() == torchs.stride()
        torch.testing.assert_close(ours, torchs, rtol=0, atol=0, equal_nan=True)


def test_second_derivatives():
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    window = WINDOWS["stem of a ResNet"]
    assert torch.autograd.gradcheck(lambda t: max_pool(t, *window), x)
    assert torch.autograd.gradgradcheck(lambda t: max_pool(t, *window), x)


def test_keeps_one_byte_per_output():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    y, kept = kept_tensors(lambda: max_pool(x * 1, *WINDOWS["stem of a ResNet"]))
    assert [(each.tensor.dtype, each.bytes) for each in kept] == [(torch.uint8, y.numel())]


def test_says_which_windows_do_not_fit():
    x = torch.zeros(1, 1, 40, 40)
    assert not fits_bytes(x, (3, 3), (1, 1), (0, 0), (2, 2), False)
    assert not fits_bytes(x, (17, 17), (1, 1), (0, 0), (1, 1), False)
    assert not fits_bytes(x[..., :2], (3, 3), (1, 1), (1, 1), (1, 1), False)
