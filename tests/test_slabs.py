"""Sums over large groups on a CPU, in channels_last, by PyTorch's own batch norm, one group after the other."""

from __future__ import annotations

import pytest
import torch

from kalmannorm.kernels import slabs
from kalmannorm.moments import Moments
from kalmannorm.op import batch_kalman_norm as op
from kalmannorm.op import observe
from test_op import TOLERANCE, arguments, assert_matches_reference, channels_last, relative_error


@pytest.fixture
def by_group(monkeypatch):
    """However small a group is; a long one has more than 7 positions."""
    monkeypatch.setattr(slabs, "ENOUGH", 0)
    monkeypatch.setattr(slabs, "ENOUGH_OF_FEW", 0)
    monkeypatch.setattr(slabs, "LONG", 7)


SHAPES = [(6, 3, 4, 5), (7, 2), (5, 4, 3, 3), (4, 2, 2, 3, 2), (2, 5, 1, 1), (1, 3, 7, 5)]


@pytest.mark.usefixtures("by_group")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, m, dtype):
    inputs = arguments(shape, m, dtype)
    inputs[0] = channels_last(inputs[0].detach()).requires_grad_()
    assert_matches_reference(inputs, m)


@pytest.mark.usefixtures("by_group")
@pytest.mark.parametrize("m", [2, 3, 16])
def test_far_from_zero(m):
    inputs = arguments((5, 4, 3, 3), m)
    inputs[0] = channels_last(inputs[0].detach() + 1000).requires_grad_()
    assert_matches_reference(inputs, m)


@pytest.mark.usefixtures("by_group")
@pytest.mark.parametrize("m", [1, 2, 16])
def test_observing_alone(m):
    x = channels_last(torch.randn(5, 3, 4, 4, dtype=torch.float64))
    for actual, expected in zip(observe(x, m), op(x, None, None, None, None, None, m, 1e-5)[3:], strict=True):
        assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize(
    ("shape", "m", "expected"),
    [
        ((8, 64, 24, 24), 2, True),
        ((8, 64, 16, 16), 2, False),  # 32,768 values
        ((8, 32, 24, 24), 8, False),  # few channels
        ((8, 32, 64, 64), 4, True),
        ((512, 128), 512, True),
        ((9, 64, 24, 24), 2, True),  # whose last group is half as large
    ],
    ids=str,
)
def test_large_groups_are_taken_one_by_one(shape, m, expected):
    assert slabs.Slabs(channels_last(torch.empty(shape)), m).by_group is expected
    if len(shape) > 2:
        assert not slabs.Slabs(torch.empty(shape), m).by_group


def test_sums_of_long_groups_keep_their_digits():
    """One after the other, 100,003 values near 5 lose eight times as many."""
    x = torch.randn(1, 100_003, 64, generator=torch.Generator().manual_seed(0)) + 5
    actual = slabs.moments_by_group(x)
    expected = Moments(x.double().mean(1), x.double().var(1, correction=0))
    assert (actual.mean - expected.mean).abs().max() < 1e-5
    assert (actual.var / expected.var - 1).abs().max() < 3e-6
