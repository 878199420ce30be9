"""The short way of learned transitions with Triton's kernels: on a GPU, or in the interpreter.

What does not depend on the kernels is tested in `test_learned_way.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch

from support import short_way_cases
from support.poisoned import poison
from support.short_way import count_short, the_long_way, use_kernels_on_the_cpu
from support.short_way_cases import (  # noqa: F401
    assert_same,
    second_order,
    small,
    step,
    test_equals_the_long_way,
    test_residual_and_relu,
    test_several_steps,
    twice_backward,
)
from support.wide import narrow

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    use_kernels_on_the_cpu(monkeypatch)
    monkeypatch.setattr(short_way_cases, "OPTIONS", {"transition": "learned"})


OPTIONS = {
    "low rank": {"rank": 2},
    "gains": {"per_channel_gain": True},
    "one group": {"statistics_batch_size": None},
    "ragged last group": {"statistics_batch_size": 3},
}


@pytest.mark.parametrize("options", narrow(OPTIONS, ["low rank", "ragged last group"]))
def test_options(options, monkeypatch):
    model, x = small(**OPTIONS[options])
    taken = count_short(monkeypatch)
    poison(monkeypatch)
    found = step(model, x)
    assert len(taken) == 3
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_a_fixed_matrix(monkeypatch):
    """The kernel without a gradient of the matrix."""
    model, x = small()
    model.norm1.transition.matrix.requires_grad_(False)
    poison(monkeypatch)
    found = step(model, x)
    assert found["d norm1.transition.matrix"] is None
    assert_same(found, the_long_way(monkeypatch, step, model, x))


@pytest.mark.parametrize("work", narrow([twice_backward, second_order], [second_order]), ids=lambda work: work.__name__)
def test_unusual_backwards(work, monkeypatch):
    model, x = small()
    taken = count_short(monkeypatch)
    found = work(copy.deepcopy(model), x)
    assert len(taken) == 3
    assert_same(found, the_long_way(monkeypatch, work, model, x))


def test_bits_of_the_long_way(monkeypatch):
    """Kernels of a dense matrix are the same on both ways. Gradients of γ, β and gains are summed in another order."""
    model, x = small()
    found, expected = step(model, x), the_long_way(monkeypatch, step, model, x)
    different = [name for name, value in expected.items() if value is not None and not torch.equal(found[name], value)]
    assert all(name.endswith(("norm0.weight", "norm0.bias", "gain_logit")) for name in different), different
