"""`torch.compile(fullgraph=True)`, forward and backward, equals eager; statistics move the same; no graph break."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kalmannorm import (
    BatchKalmanNorm2d,
    BatchRenorm2d,
    GhostBatchNorm2d,
    MovingAverageBatchNorm2d,
    freeze_statistics,
    set_inference,
)
from support.wide import narrow, wide

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)
        self.norm1 = BatchKalmanNorm2d(6, statistics_batch_size=2, **options)
        self.norm2 = BatchKalmanNorm2d(4, 6, statistics_batch_size=2, **options)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        return self.norm2(self.conv2(x), self.norm1.posterior)


def compare(model, x, backend, steps=3):
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    for _ in range(steps):
        model.zero_grad()
        twin.zero_grad()
        expected, actual = model(x), compiled(x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        if model.training:
            expected.square().mean().backward()
            actual.square().mean().backward()
            for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5, msg=name)
        x = torch.randn_like(x)
    for (name, p), q in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(q[1], p, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("covariance", narrow(["diagonal", "full"], ["diagonal"]))
def test_training(backend, covariance):
    compare(Net(covariance=covariance), torch.randn(5, 3, 8, 8), backend)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, wide])])
def test_channels_last_and_cumulative_momentum(backend):
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    compare(Net(momentum=None).to(memory_format=torch.channels_last), x, backend)


@pytest.mark.parametrize("mode", ["population", "batch", "example"])
def test_inference(mode):
    model = Net()
    model(torch.randn(4, 3, 8, 8))
    set_inference(model, mode)
    compare(model.eval(), torch.randn(4, 3, 8, 8), "aot_eager")


def test_frozen():
    model = Net()
    model(torch.randn(4, 3, 8, 8))
    freeze_statistics(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(compiled(x), model.eval()(x))


@pytest.mark.parametrize("kind", [GhostBatchNorm2d, BatchRenorm2d])
def test_baselines(kind):
    compare(nn.Sequential(nn.Conv2d(3, 4, 3), kind(4, statistics_batch_size=2)), torch.randn(5, 3, 8, 8), "aot_eager")


def test_moving_average_corrects_by_statistics_of_before():
    """r is one of the values that a compiler computes again in the backward, from a buffer that the forward changes."""
    norm = MovingAverageBatchNorm2d(4, statistics_batch_size=2, real_batch_size=4, warmup_steps=2)
    compare(nn.Sequential(nn.Conv2d(3, 4, 3), norm).double(), torch.randn(4, 3, 8, 8).double(), "aot_eager", steps=4)


def test_dynamic_batch():
    """Another batch size, ragged or not, does not break the graph."""
    torch._dynamo.reset()
    model = Net()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for N in (4, 6, 7, 9):
        x = torch.randn(N, 3, 8, 8)
        twin = copy.deepcopy(model)
        torch.testing.assert_close(compiled(x), twin(x), rtol=1e-4, atol=1e-5)


def test_autocast():
    torch._dynamo.reset()
    model, x = Net(), torch.randn(4, 3, 8, 8)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), compiled(x)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert twin.norm2.posterior.mean.dtype == torch.float32
    torch.testing.assert_close(twin.norm2.posterior.var, model.norm2.posterior.var, rtol=1e-2, atol=1e-2)


def test_bad_batch_when_compiled_is_skipped_and_reported_later():
    torch._dynamo.reset()
    layer = BatchKalmanNorm2d(3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.full((2, 3, 4, 4), float("nan")))
    assert torch.equal(layer.running_mean, torch.zeros(3))
    assert layer.skipped_batches == 1
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        layer.eval()
