"""The short way through a training step equals the long way, and is left where it could not compute the same."""

from __future__ import annotations

import copy

import pytest
import torch

from kalmannorm._model.settings import norms
from support.bundled_nets import IMAGE, Blocks, Branches, converted
from support.poisoned import DEVICE
from support.short_way import count_short, the_long_way, use_kernels_on_the_cpu

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    use_kernels_on_the_cpu(monkeypatch)


def prepared(make=Blocks, **options):
    model = converted(make(), IMAGE, **options).to(DEVICE)
    return model, torch.randn(4, *IMAGE[1:], device=DEVICE)


def step(model, x):
    """Output, gradients and statistics of one training step."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    y = model(x)
    (y.square().sum() + y.sum()).backward()
    found = {"y": y.detach(), "x": x.grad} | {f"d {name}": p.grad for name, p in model.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("make", [Blocks, Branches])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_equals_the_long_way(make, layout, monkeypatch):
    model, x = prepared(make)
    model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == sum(norm.prior_features is not None for _, norm in norms(model))
    assert_same(found, the_long_way(monkeypatch, step, model, x))
