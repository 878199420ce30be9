"""The geometry behind convolutions: which taps meet the image, and a cache of it that serves every mode of torch."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kalmannorm.moments import Moments, convolution, gelu, hardswish, output_size
from kalmannorm.moments import windows as geometry

torch.set_num_threads(1)


def test_kinds_of_positions_are_those_of_the_layer():
    """Every small geometry, against a convolution that shows which taps it uses: one output channel for each tap."""
    checked = 0
    for kernel, size, stride, padding, dilation, transposed in itertools.product(
        (1, 2, 3, 5), (1, 2, 4, 7), (1, 2, 3), (0, 1, 3), (1, 2, 3), (False, True)
    ):
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        ones, taps = torch.ones(1, 1, size), torch.eye(kernel).view(kernel, 1, kernel)
        for extra in range(max(stride, dilation)) if transposed else (0,):
            arguments = {**options, "transposed": transposed, "output_padding": extra}
            try:
                if transposed:
                    shown = F.conv_transpose1d(ones, taps.transpose(0, 1), output_padding=extra, **options)
                else:
                    shown = F.conv1d(ones, taps, **options)
            except RuntimeError:
                with pytest.raises(ValueError, match="leaves no output"):
                    geometry.axes_of(kernel, size, **arguments)
                continue
            (axis,) = geometry.axes_of(kernel, size, **arguments)
            rows, shares = geometry.kinds(axis)
            expected = Counter(tuple(row) for row in shown[0].T.tolist())
            assert output_size(size, kernel, **arguments) == (shown.shape[-1],)
            assert {row: round(share * shown.shape[-1]) for row, share in zip(rows, shares, strict=True)} == expected
            assert sum(shares) == pytest.approx(1)
            checked += 1
    assert checked > 1000


def test_output_size_takes_one_kernel_for_all_axes():
    assert output_size((8, 9), 3, padding=1, stride=2) == (4, 5)


def test_a_symbolic_size_compiles():
    def sized(image: Tensor, weight: Tensor) -> Moments:
        return convolution(Moments(torch.ones(1, 4), torch.ones(1, 4)), weight, padding=1, input_size=image.shape[2:])

    compiled = torch.compile(sized, fullgraph=True, backend="aot_eager", dynamic=True)
    weight = torch.ones(2, 4, 3, 3)
    for size in (4, 7):
        image = torch.zeros(1, 4, size, size)
        torch.testing.assert_close(compiled(image, weight), sized(image, weight))


def padded(weight: Tensor) -> Tensor:
    m = Moments(torch.ones(1, 4), torch.ones(1, 4))
    return convolution(m, weight, padding=1, input_size=(8, 8)).var.sum()


def first_under_inference_mode() -> None:
    with torch.inference_mode():
        padded(torch.ones(6, 4, 3, 3))


def first_under_fake_tensors() -> None:
    with FakeTensorMode():
        padded(torch.ones(6, 4, 3, 3))


def first_under_a_transform() -> None:
    torch.func.grad(padded)(torch.ones(6, 4, 3, 3))


@pytest.mark.parametrize(
    "first", [first_under_inference_mode, first_under_fake_tensors, first_under_a_transform], ids=lambda f: f.__name__
)
def test_what_is_cached_serves_every_mode(first):
    def gradient() -> Tensor:
        weight = torch.ones(6, 4, 3, 3, requires_grad=True)
        padded(weight).backward()
        return weight.grad

    geometry._tensors.clear()
    expected = gradient()
    geometry._tensors.clear()
    first()
    torch.testing.assert_close(gradient(), expected)
    first()
    torch.testing.assert_close(gradient(), expected)


@pytest.mark.gpu
def test_a_cuda_graph_can_be_captured_once_the_geometry_is_there():
    """Nothing is copied from the host after the first call."""
    m = Moments(torch.ones(1, 4, device="cuda"), torch.ones(1, 4, device="cuda"))
    weight = torch.randn(6, 4, 3, 3, device="cuda")

    def layer() -> Moments:
        return hardswish(gelu(convolution(m, weight, padding=1, input_size=(8, 8))))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    weight.mul_(2)
    graph.replay()
    torch.testing.assert_close(captured, layer())
    on_cpu = convolution(m.to("cpu"), weight.cpu(), padding=1, input_size=(8, 8))
    torch.testing.assert_close(captured.to("cpu"), hardswish(gelu(on_cpu)), rtol=1e-4, atol=1e-4)
