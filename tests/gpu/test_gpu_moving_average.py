"""Moving Average Batch Norm on a CUDA device: kernels, and steps inside a CUDA graph. Skipped where there is none."""

from __future__ import annotations

import copy

import pytest
import torch

from kalmannorm import MovingAverageBatchNorm2d
from support.gpu_kernels import kernels_in
from support.op_arguments import channels_last, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*Profiler clears events")]

SHAPES = {"large": (128, 64, 32, 32), "one group": (2, 96, 16, 16), "one example": (1, 17, 7, 7)}


def norm_for(shape, m):
    torch.manual_seed(0)
    norm = MovingAverageBatchNorm2d(shape[1], statistics_batch_size=m, real_batch_size=8, warmup_steps=4)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    return norm.cuda()


def pair(shape, dtype, layout):
    made = (torch.randn(shape, device="cuda") for _ in range(2))
    return [(channels_last(each) if layout == "channels_last" else each).to(dtype) for each in made]


def step(norm, x, grad):
    x = x.detach().requires_grad_()
    y = norm(x)
    return y.detach(), *torch.autograd.grad(y, [x, norm.weight, norm.bias], grad)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_matches_pytorch_operations(shape, m, dtype, tolerance, layout):
    norm = norm_for(shape, m)
    twin = copy.deepcopy(norm).double()
    for number in range(12):
        x, grad = pair(shape, dtype, layout)
        x = (1 + number) * x
        expected = step(twin, x.double(), grad.double())
        for index, (a, e) in enumerate(zip(step(norm, x, grad), expected, strict=True)):
            assert relative_error(a, e) < tolerance, (number, index)
    for (name, buffer), other in zip(norm.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer.double(), other.double(), rtol=1e-3, atol=1e-4, msg=name)


def test_launches():
    """Nothing but kernels of this library: ten, where γ and β have to be summed over groups."""
    norm, (x, grad) = norm_for(SHAPES["large"], 2), pair(SHAPES["large"], torch.bfloat16, "channels_last")
    found = kernels_in(lambda: step(norm, x, grad))
    assert len(found) == 10, found


def test_steps_inside_a_graph():
    shape = SHAPES["one group"]
    norm = norm_for(shape, 2)
    x, grad = pair(shape, torch.bfloat16, "channels_last")
    twin = copy.deepcopy(norm)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # x and the copies of the norm are made there
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(norm, x, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step(norm, x, grad)
    for _ in range(3):
        step(twin, x, grad)
    for _ in range(6):
        x.mul_(1.5)
        graph.replay()
        for a, b in zip(found, step(twin, x, grad), strict=True):
            assert torch.equal(a, b)
    for (name, buffer), other in zip(norm.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, other), name
