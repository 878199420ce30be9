"""A batch without examples, as in a detection head without proposals: an empty result, as of BatchNorm, and no harm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kalmannorm import BatchKalmanNorm2d, BatchRenorm2d, GhostBatchNorm1d, Moments, convert

LAYERS = {
    "kalman": lambda: BatchKalmanNorm2d(3, 3, statistics_batch_size=2),
    "first": lambda: BatchKalmanNorm2d(3, statistics_batch_size=2),
    "no statistics": lambda: BatchKalmanNorm2d(3, 3, statistics_batch_size=2, track_running_stats=False),
    "no affine": lambda: BatchKalmanNorm2d(3, 3, statistics_batch_size=2, affine=False),
    "ghost": lambda: GhostBatchNorm1d(3, statistics_batch_size=2),
    "renorm": lambda: BatchRenorm2d(3, statistics_batch_size=2),
}


@pytest.mark.parametrize("mode", ["train", "frozen", "population", "batch", "example"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_an_empty_batch(make, mode):
    layer = make()
    if mode in ("population", "batch", "example"):
        if mode == "example" and (isinstance(layer, BatchRenorm2d) or not layer.track_running_stats):
            return
        layer.eval().set_inference(mode)
    layer.frozen = mode == "frozen"
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    positions = (2,) if isinstance(layer, GhostBatchNorm1d) else (2, 2)
    x = torch.empty(0, 3, *positions, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
    assert layer(torch.empty(0, 3, *positions, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="num_features = 3 channels"):
        layer(torch.empty(0, 4, *positions))


def test_its_posterior_is_what_is_known_without_it():
    layer = BatchKalmanNorm2d(3, 3)
    layer(torch.randn(4, 3, 2, 2), Moments(torch.zeros(1, 3), torch.ones(1, 3)))
    layer(torch.empty(0, 3, 2, 2))
    torch.testing.assert_close(layer.posterior.mean[0], layer.running_mean)
    torch.testing.assert_close(layer.posterior.var[0], layer.running_var)


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_a_converted_model(transition):
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = convert(model, torch.randn(4, 3), transition=transition, statistics_batch_size=2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.empty(0, 3)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    for mode in ("population", "batch", "example"):
        for norm in (model[1], model[4]):
            norm.eval().set_inference(mode)
        assert model(torch.empty(0, 3)).shape == (0, 8)
    model.train()(torch.randn(4, 3)).sum().backward()
