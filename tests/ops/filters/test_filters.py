"""The filter of a convolution in few PyTorch operations: that of the definition, for every layout and derivative."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kalmannorm._ops.filters import aten, definition
from kalmannorm._ops.filters.together import filters_of

COMPUTATIONS = ["centred", "standardized", "scaled"]
F64 = torch.float64


def last(shape):
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    return torch.randn(shape, dtype=F64).contiguous(memory_format=layout)


def strided(shape, strides):
    """With the strides of channels_last where torch would take others, because dimensions have size 1."""
    return torch.randn(shape, dtype=F64).as_strided(shape, strides)


WEIGHTS = {
    "contiguous": lambda: torch.randn(4, 3, 3, 3, dtype=F64),
    "channels_last": lambda: last((4, 3, 3, 5)),
    "channels_last_3d": lambda: last((4, 3, 2, 3, 2)),
    "one tap": lambda: torch.randn(4, 6, 1, 1, dtype=F64),
    "one tap, channels_last": lambda: strided((4, 6, 1, 1), (6, 1, 6, 6)),
    "depthwise": lambda: torch.randn(4, 1, 3, 3, dtype=F64),
    "depthwise, channels_last": lambda: strided((4, 1, 3, 3), (9, 1, 3, 1)),
    "1d": lambda: torch.randn(4, 3, 5, dtype=F64),
    "one value": lambda: torch.randn(1, 1, 1, 1, dtype=F64),
    "gaps": lambda: torch.randn(4, 6, 3, 3, dtype=F64)[:, ::2],
    "large mean": lambda: torch.randn(4, 3, 3, 3, dtype=F64) + 1e3,
    "constant rows": lambda: torch.ones(4, 3, 3, 3, dtype=F64),
}


@pytest.mark.parametrize("computation", COMPUTATIONS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_is_that_of_the_definition(name, computation):
    weight = WEIGHTS[name]().requires_grad_()
    grad = torch.empty_like(weight).copy_(torch.randn(weight.shape, dtype=F64))
    found, expected = aten.computed(weight, computation), getattr(definition, computation)(weight)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert found.stride() == expected.stride() and (name == "gaps" or found.stride() == weight.stride())
    changes = [torch.autograd.grad(made, weight, grad)[0] for made in (found, expected)]
    torch.testing.assert_close(*changes, rtol=1e-10, atol=1e-10)


def test_a_scaled_filter_has_a_mean_of_0_and_a_norm_of_1():
    weight = torch.randn(4, 3, 3, 5, dtype=F64) * 10 + 1
    found = definition.scaled(weight)
    torch.testing.assert_close(found, definition.standardized(weight) / 45**0.5, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.mean((1, 2, 3)), torch.zeros(4, dtype=F64))
    torch.testing.assert_close(found.square().sum((1, 2, 3)), torch.ones(4, dtype=F64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("computation", COMPUTATIONS)
@pytest.mark.parametrize("name", ["contiguous", "channels_last", "gaps"])
def test_gradcheck(name, computation):
    weight = WEIGHTS[name]()[:, :2].requires_grad_()
    assert torch.autograd.gradcheck(lambda w: filters_of([w], computation)[0], weight)
    assert torch.autograd.gradgradcheck(lambda w: filters_of([w], computation)[0], weight)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_functional_derivatives(computation):
    weight, direction = torch.randn(2, 4, 3, 3, 3, dtype=F64)
    made, change = torch.func.jvp(lambda w: filters_of([w], computation)[0], (weight,), (direction,))
    step = 1e-6
    nearby = getattr(definition, computation)(weight + step * direction)
    torch.testing.assert_close(made, getattr(definition, computation)(weight))
    torch.testing.assert_close(change, (nearby - made) / step, rtol=1e-4, atol=1e-4)
    several = torch.func.vmap(lambda w: filters_of([w], computation)[0])(torch.stack([weight, direction]))
    torch.testing.assert_close(several[1], getattr(definition, computation)(direction))


@pytest.mark.parametrize("computation", COMPUTATIONS)
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_statistics_are_precise(dtype, gaps, computation):
    weight = (torch.randn(3, 200, 3, 3) * 0.1 + 1).to(dtype)
    weight = weight[:, ::2] if gaps else weight
    found = filters_of([weight], computation)[0]
    assert found.dtype == dtype
    exact = getattr(definition, computation)(weight.double())
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


class Counter(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("computation", ["standardized", "scaled"])
@pytest.mark.parametrize("name", ["contiguous", "channels_last", "one tap, channels_last"])
def test_a_standardized_filter_is_one_operation_in_each_direction(name, computation):
    """A scaled one also needs a constant for the inputs of one channel."""
    weight = WEIGHTS[name]().requires_grad_()
    grad = torch.zeros_like(weight)
    with Counter() as counter:
        torch.autograd.grad(filters_of([weight], computation), weight, grad)
    constant = ["new_full"] if computation == "scaled" else []
    assert counter.names == [*constant, "native_layer_norm", "native_layer_norm_backward"]
