"""What an example is fused with, by one kernel, against the separate operations in float64."""

from __future__ import annotations

import pytest
import torch

from kalmannorm import Moments
from kalmannorm._ops import dispatch
from kalmannorm._ops.expect import triton_expect, virtual_group
from support.poisoned import DEVICE, poison

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter


@pytest.mark.parametrize("size", [1, 2, 32])
@pytest.mark.parametrize("gains", [False, True], ids=["one gain", "a gain per channel"])
@pytest.mark.parametrize(("rows", "C"), [(1, 5), (3, 200), (1, 128)])
def test_matches_the_operations(rows, C, gains, size, monkeypatch):
    prior = Moments(torch.randn(rows, C, device=DEVICE), torch.rand(rows, C, device=DEVICE) + 0.1)
    average = Moments(torch.randn(C, device=DEVICE), torch.rand(C, device=DEVICE) + 0.1)
    gain = torch.rand(C, device=DEVICE) * 0.8 + 0.1 if gains else torch.tensor(0.3, device=DEVICE)
    doubles = [Moments(m.mean.double(), m.var.double()) for m in (prior, average)]
    expected, trust = virtual_group.expected_of_example(doubles[0], gain.double(), doubles[1], size)
    poison(monkeypatch)
    monkeypatch.setattr(virtual_group, "expecting_for", lambda *tensors: triton_expect)
    found, found_trust = virtual_group.expected_of_example(prior, gain, average, size)
    assert found_trust.shape == gain.shape
    pairs = (found.mean, expected.mean), (found.var, expected.var), (found_trust, trust)
    for a, b in pairs:
        torch.testing.assert_close(a, b.float(), rtol=2e-6, atol=2e-6)


def test_expanded_rows_are_read_as_they_are(monkeypatch):
    row = torch.randn(1, 7, device=DEVICE)
    prior = Moments(row.expand(3, 7), row.abs().expand(3, 7))
    average, gain = Moments(row[0] + 1, row[0].abs() + 1), torch.tensor(0.4, device=DEVICE)
    expected, _ = virtual_group.expected_of_example(prior, gain, average, 2)
    monkeypatch.setattr(virtual_group, "expecting_for", lambda *tensors: triton_expect)
    found, _ = virtual_group.expected_of_example(prior, gain, average, 2)
    torch.testing.assert_close(tuple(found[:2]), tuple(expected[:2]))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_where_it_is_used():
    tensors = [torch.rand(shape, device=DEVICE) for shape in ((1, 6), (1, 6), (), (6,), (6,))]
    assert dispatch.expecting_for(*tensors) is triton_expect
    assert dispatch.expecting_for(*(t.double() for t in tensors)) is None
    tensors[2].requires_grad_()
    assert dispatch.expecting_for(*tensors) is None
    with torch.no_grad():
        assert dispatch.expecting_for(*tensors) is triton_expect
