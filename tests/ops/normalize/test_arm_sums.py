"""Sums over rows by average pools: the same numbers, in memory of their own, and an op that is right with them."""

from __future__ import annotations

import math

import pytest
import torch

from kalmannorm._ops.normalize import arm_sums, aten, naive
from kalmannorm._ops.normalize.registered import batch_kalman_norm as op
from support.op_arguments import arguments, assert_same, channels_last, relative_error, run

ROWS = {
    "one": 1, "few": 5, "one-window": 49, "two-stages": 512, "three-stages": 2 * 112**2,
    "rows-left": 2 * 64, "prime": 1009, "twice-a-prime": 2018,
}  # fmt: skip


@pytest.fixture
def everywhere(monkeypatch):
    """On any machine, whatever the size."""
    monkeypatch.setattr(arm_sums, "ARM", True)
    monkeypatch.setattr(arm_sums, "NARROWEST", 2)
    monkeypatch.setattr(arm_sums, "SMALLEST", 0)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 49, 128, 129, 256, 392, 1009, 2018, 6272, 2 * 224**2])
def test_heights_divide_the_rows(rows):
    heights = arm_sums.heights(rows)
    assert rows % math.prod(heights) == 0
    assert all(arm_sums.LOWEST <= height <= arm_sums.HIGHEST for height in heights)
    left = rows // math.prod(heights)
    assert left < arm_sums.LOWEST or not any(
        left % height == 0 for height in range(arm_sums.LOWEST, arm_sums.HIGHEST + 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_mean_and_total(rows, dtype):
    """Right to a few roundings, also in a part that begins behind others."""
    values = (torch.randn(4, rows, 24, dtype=dtype) + 3)[1:]
    exact = values.double()
    few = 4 * torch.finfo(dtype).eps
    for found, expected in ((arm_sums.mean(values), exact.mean(1)), (arm_sums.total(values), exact.sum(1))):
        assert found.shape == (3, 24)
        assert found.dtype == dtype
        assert relative_error(found, expected) < few


@pytest.mark.parametrize("function", [arm_sums.mean, arm_sums.total])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_results_may_be_overwritten(rows, function):
    values = torch.randn(2, rows, 24)
    before = values.clone()
    function(values).zero_()
    assert torch.equal(values, before)


@pytest.mark.parametrize("mean", [0, 50], ids=["near", "far"])
@pytest.mark.parametrize("m", [1, 2, 5], ids=["m1", "m2-ragged", "mN"])
@pytest.mark.parametrize("side", [1, 7, 16, 19])
def test_op_with_them_equals_reference(everywhere, side, m, mean):
    """Output, moments and every gradient, in float64."""
    inputs = arguments((5, 6, side, side), m)
    inputs[0] = channels_last(inputs[0].detach() + mean).requires_grad_()
    assert aten.Slabs(inputs[0], m).pooled
    grads = [torch.randn_like(o) for o in op(*inputs, m, 1e-5)]
    for actual, expected in zip(*(run(f, inputs, m, grads) for f in (op, naive.batch_kalman_norm)), strict=True):
        assert_same(actual, expected, 1e-10)


def test_only_where_it_pays(monkeypatch):
    large, narrow, small = (torch.zeros(shape) for shape in ((2, 32, 64, 64), (8, 31, 64, 64), (2, 32, 16, 16)))
    monkeypatch.setattr(arm_sums, "ARM", True)
    assert [arm_sums.worthwhile(x) for x in (large, narrow, small, large.to("meta"))] == [True, False, False, False]
    assert not aten.Slabs(large, 2).pooled, "its channels do not lie last"
    monkeypatch.setattr(arm_sums, "ARM", False)
    assert not arm_sums.worthwhile(large)
