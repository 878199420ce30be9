"""Moments through layers in C: as in PyTorch operations, with any number of threads, and with memory that is reused."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kalmannorm
from kalmannorm._ops import native_library
from kalmannorm._ops.plain import without_kernels
from kalmannorm._ops.propagate import aten_layers, native_layers
from kalmannorm._ops.propagate.bundle import Layer
from kalmannorm.moments.windows import axes_of
from support.op_arguments import channels_last

LAYERS = {
    "3x3": ((7, 5, 3, 3), (8, 6), {"padding": 1}),
    "many": ((130, 70, 3, 3), (8, 6), {"padding": 1}),
    "valid": ((9, 40, 3, 3), (8, 6), {}),
    "stride": ((4, 6, 5, 3), (9, 9), {"stride": 2, "padding": 2}),
    "1x1": ((9, 37, 1, 1), (4, 4), {}),
    "line": ((5, 6, 5), (11,), {"padding": 4, "dilation": 2}),
    "volume": ((4, 3, 3, 3, 3), (4, 5, 6), {"padding": 1}),
    "linear": ((6, 33), (), {}),
}


@pytest.fixture(autouse=True)
def _needed():
    if not native_layers.fits(torch.zeros(1)):
        pytest.skip("no C compiler")


def both_ways(name, last, dtype, asked=True):
    """Mean and variance, then the gradients, of one layer."""
    shape, size, options = LAYERS[name]
    torch.manual_seed(1)
    weight = torch.randn(shape, dtype=dtype)
    if last:
        weight = channels_last(weight)
    options = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "output_padding": 0} | options
    axes = axes_of(shape[2:], size, **options) if size else ()
    layer = Layer(0, None, shape, 1, False, axes, torch.arange(shape[1]), 0, shape[0])
    seen = aten_layers.geometry(layer, dtype, torch.device("cpu"))
    given = torch.rand(3, shape[1] + 1, dtype=dtype)[::2, 1:]  # rows that are not adjacent
    out, grad = (torch.randn(2, shape[0], dtype=dtype) for _ in range(2))
    away = aten_layers.forward(layer, given, weight, seen, out)
    moments, d_weight = aten_layers.backward(layer, grad, given, weight, away, seen, asked, {})
    assert (d_weight is not None) == asked
    assert d_weight is None or d_weight.shape == weight.shape
    return out, moments, d_weight if asked else moments


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", LAYERS)
def test_as_pytorch_operations(name, last):
    if last and len(LAYERS[name][0]) < 4:
        pytest.skip("no channels_last")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        found = both_ways(name, last, dtype)
        with without_kernels():
            expected = both_ways(name, last, dtype)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= tolerance * other.abs().max()
    assert torch.equal(both_ways(name, last, torch.float32, asked=False)[1], found[1])


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_the_same_bits_with_any_number_of_threads(last, monkeypatch):
    monkeypatch.setattr(native_layers, "threads_for", lambda values: 1)
    alone = both_ways("many", last, torch.float32)
    for threads in (2, 3, 7):
        monkeypatch.setattr(native_layers, "threads_for", lambda values, threads=threads: threads)
        assert all(torch.equal(a, b) for a, b in zip(alone, both_ways("many", last, torch.float32), strict=True))


def test_memory_of_a_gradient_is_used_again_unless_somebody_has_it():
    weight, room = torch.randn(native_layers.LARGE), {}
    first = native_layers.gradient_like(weight, room, 0)
    address = first.data_ptr()
    second = native_layers.gradient_like(weight, room, 0)
    assert second.data_ptr() != address  # `first` is still there
    part = second.detach()[5:]
    address = second.data_ptr()
    del second
    assert native_layers.gradient_like(weight, room, 0).data_ptr() != address  # a view of it is
    free = native_layers.gradient_like(weight, room, 0).data_ptr()
    assert native_layers.gradient_like(weight, room, 0).data_ptr() == free
    assert native_layers.gradient_like(weight.double(), room, 0).dtype == torch.float64
    assert part.numel() == weight.numel() - 5


@pytest.mark.parametrize("how", ["storage", "shared", "freed"])
def test_memory_that_somebody_has_without_a_tensor_is_not_used_again(how):
    weight, room = torch.randn(native_layers.LARGE), {}
    given = native_layers.gradient_like(weight, room, 0)
    held = None
    if how == "storage":
        held = given.untyped_storage()
    elif how == "shared":
        given.share_memory_()  # as in a queue to another process
    else:
        given.untyped_storage().resize_(0)
    address = given.data_ptr()
    del given
    again = native_layers.gradient_like(weight, room, 0)
    assert again.data_ptr() not in (0, address)
    assert held is None or held.data_ptr() == address


def test_two_threads_never_get_the_same_memory():
    weight = torch.randn(native_layers.LARGE)

    class Room(dict):
        """Another thread asks as soon as the memory is there."""

        other = None

        def __setitem__(self, place, kept):
            super().__setitem__(place, kept)
            if self.other is None:
                self.other = weight
                self.other = native_layers.gradient_like(weight, self, place)

    known = {}
    native_layers.gradient_like(weight, known, 0)
    room = Room(known)
    assert native_layers.gradient_like(weight, room, 0).data_ptr() != room.other.data_ptr()


def test_a_gradient_can_be_detached_in_place():
    native_layers.gradient_like(torch.randn(native_layers.LARGE), {}, 0).detach_()


def net():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5).double()
    return kalmannorm.convert(model, torch.randn(4, 3, 32, 32).double(), statistics_batch_size=2)


def steps(model, how):
    """The losses and the last gradients of some steps. `how`: gradients are dropped, set to zero, or add up."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(4):
        if how != "add":
            optimizer.zero_grad(set_to_none=how == "drop")
        loss = model(torch.randn(4, 3, 32, 32).double()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("how", ["drop", "zero", "add"])
def test_a_model_trains_as_with_pytorch_operations(how):
    found = steps(net(), how)
    with without_kernels():
        expected = steps(net(), how)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-9 * other.norm()


class OnlyThePrior(nn.Module):
    """The second convolution gets no gradient but that of the prior behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)
        self.second, self.last = nn.Conv2d(64, 96, 3), nn.BatchNorm2d(96)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = self.second(x)
        return self.last(x.detach() if self.training else x)


def test_gradients_that_add_up_in_memory_that_autograd_took():
    model = kalmannorm.convert(OnlyThePrior(), torch.randn(4, 3, 8, 8), statistics_batch_size=2)
    x = torch.randn(4, 3, 8, 8)
    assert model.second.weight.numel() >= native_layers.LARGE

    def backward():
        model(x).square().mul(torch.arange(96.0).view(1, -1, 1, 1)).sum().backward()
        return model.second.weight.grad

    one = backward().clone()
    assert one.norm() > 0
    model.zero_grad()
    backward()
    assert (backward() - 2 * one).norm() <= 1e-5 * one.norm()


def small():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
    )
    return kalmannorm.convert(model, torch.randn(4, 3, 8, 8), statistics_batch_size=2)


def test_fake_tensors_have_no_memory():
    model, x = small(), torch.randn(4, 3, 8, 8)
    model(x).sum().backward()  # the bundles are there
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (4, 8, 8, 8)


def test_a_tracer_sees_the_computation_of_the_prior():
    model, x = small(), torch.randn(4, 3, 8, 8)
    kalmannorm.set_inference(model, "batch")
    model.eval()
    with torch.no_grad():
        model(x)
        model[3].weight.mul_(1.3)
        traced = make_fx(model)(x)
        torch.testing.assert_close(traced(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_model_under_another_default_device():
    model, x = small(), torch.randn(4, 3, 8, 8)
    kalmannorm.set_inference(model, "batch")
    model.eval()(x)  # now the bundles are there, but not for training
    model.train()
    with torch.device("meta"):
        model(x).sum().backward()
    assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())


SCARCE = """
#include <stdlib.h>
long left = 0;
void *scarce(size_t alignment, size_t bytes) { return left-- == 0 ? 0 : aligned_alloc(alignment, bytes); }
"""


@pytest.mark.parametrize("part", [0, 1, 2])
def test_missing_memory_of_any_part_is_reported(tmp_path, part):
    """Also if one thread works on several parts, and has memory for a later one."""
    compiler, source = native_library._compiler(), Path(native_layers.__file__).with_name("native.c")
    (tmp_path / "scarce.c").write_text(SCARCE)
    flags = ["-std=c11", "-fPIC", "-DREAL=float"]
    subprocess.run([*compiler, *flags, "-Daligned_alloc=scarce", "-c", source, "-o", tmp_path / "native.o"], check=True)
    subprocess.run(
        [*compiler, *flags, "-shared", tmp_path / "scarce.c", tmp_path / "native.o", "-lm", "-o", tmp_path / "all.so"],
        check=True,
    )
    found = ctypes.CDLL(str(tmp_path / "all.so"))
    for name in ("layer_forward", "layer_backward"):
        getattr(found, name).argtypes = [*[ctypes.c_void_p] * native_library.FUNCTIONS[name], ctypes.c_long]
    left, parts = ctypes.c_long.in_dll(found, "left"), 3
    weight, seen = torch.rand(6, 48, 3, 1), (torch.ones(1, 3), torch.ones(1), torch.ones(3))
    layer = native_layers.CLayer.of(weight, False, seen)
    moments, results = torch.rand(2, 48), torch.rand(2, 6)
    rows = *native_layers._rows(moments), *native_layers._rows(results)
    given = ctypes.byref(layer), weight.data_ptr(), *rows, None
    left.value = 2 * part  # two blocks of memory per part
    assert found.layer_forward(*given, parts) == 1
    gradients = torch.empty(2, 48)
    left.value = part
    assert found.layer_backward(*given, *native_layers._rows(gradients), None, parts) == 1
    left.value = -1
    assert found.layer_backward(*given, *native_layers._rows(gradients), None, parts) == 0
