"""Ghost batch norm is batch norm per group; Batch Renorm is Ioffe's equations, clips and schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kalmannorm import BatchRenorm1d, BatchRenorm2d, BatchRenorm3d, GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d

SHAPES = {
    GhostBatchNorm1d: (6, 4),
    GhostBatchNorm2d: (6, 4, 3, 5),
    GhostBatchNorm3d: (6, 4, 2, 3, 2),
    BatchRenorm1d: (6, 4),
    BatchRenorm2d: (6, 4, 3, 5),
    BatchRenorm3d: (6, 4, 2, 3, 2),
}


@pytest.mark.parametrize("kind", [GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d])
@pytest.mark.parametrize("m", [2, 4, None], ids=["m2", "m4-ragged", "mN"])
def test_ghost_equals_batch_norm_on_each_group(kind, m):
    layer = kind(4, statistics_batch_size=m, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    x = torch.randn(SHAPES[kind], dtype=torch.float64, requires_grad=True)
    y = layer(x)
    parts = [F.batch_norm(part, None, None, layer.weight, layer.bias, training=True) for part in x.split(m or 6)]
    expected = torch.cat(parts)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    g = torch.randn_like(y)
    leaves = (x, layer.weight, layer.bias)
    for a, e in zip(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


def test_ghost_has_three_ways_of_inference():
    layer = GhostBatchNorm2d(4, statistics_batch_size=2)
    x = torch.randn(6, 4, 3, 3) + torch.randn(6, 4, 1, 1)
    layer(x)
    layer.eval()
    outputs = {}
    for mode in ("population", "batch", "example"):
        layer.set_inference(mode)
        outputs[mode] = layer(x)
    torch.testing.assert_close(outputs["batch"], layer.train()(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs["population"], outputs["batch"])
    assert not torch.allclose(outputs["population"], outputs["example"])


def ioffe(x, weight, bias, mean, sigma, r_max, d_max, eps=1e-5):
    """One group by the paper's equations; returns the output and the group's own μ_B, σ_B."""
    over = [0, *range(2, x.dim())]
    shape = (1, -1) + (1,) * (x.dim() - 2)
    mu = x.mean(over)
    sigma_b = (x.var(over, correction=0) + eps).sqrt()
    r = (sigma_b / sigma).clamp(1 / r_max, r_max).detach()
    d = ((mu - mean) / sigma).clamp(-d_max, d_max).detach()
    hat = (x - mu.view(shape)) / sigma_b.view(shape) * r.view(shape) + d.view(shape)
    return hat * weight.view(shape) + bias.view(shape), mu.detach(), sigma_b.detach()


@pytest.mark.parametrize("kind", [BatchRenorm1d, BatchRenorm2d, BatchRenorm3d])
@pytest.mark.parametrize("m", [2, 4, None], ids=["m2", "m4-ragged", "mN"])
def test_renorm_equals_ioffe(kind, m):
    layer = kind(4, statistics_batch_size=m, warmup_steps=0, r_steps=2, d_steps=4, momentum=0.2, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    mean, sigma = torch.zeros(4).double(), torch.full((4,), 1 + 1e-5, dtype=torch.float64).sqrt()
    for step in range(4):
        x = (torch.randn(SHAPES[kind], dtype=torch.float64) * 2 + 1).requires_grad_()
        y = layer(x)
        r_max, d_max = 1 + 2 * min(step / 2, 1), 5 * min(step / 4, 1)
        parts = [ioffe(p, layer.weight, layer.bias, mean, sigma, r_max, d_max) for p in x.split(m or 6)]
        expected = torch.cat([p[0] for p in parts])
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        g = torch.randn_like(y)
        leaves = (x, layer.weight, layer.bias)
        for a, e in zip(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-8)
        share = torch.tensor([len(p) / 6 for p in x.split(m or 6)], dtype=torch.float64).unsqueeze(1)
        mean = mean + 0.2 * ((share * torch.stack([p[1] for p in parts])).sum(0) - mean)
        sigma = sigma + 0.2 * ((share * torch.stack([p[2] for p in parts])).sum(0) - sigma)
        torch.testing.assert_close(layer.running_mean, mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close((layer.running_var + layer.eps).sqrt(), sigma, rtol=1e-9, atol=1e-9)


def test_renorm_starts_as_batch_norm():
    layer = BatchRenorm2d(4, warmup_steps=10, r_steps=20, d_steps=20)
    x = torch.randn(6, 4, 3, 3) * 3 + 1
    for _ in range(10):
        torch.testing.assert_close(layer(x), F.batch_norm(x, None, None, training=True), rtol=1e-4, atol=1e-5)
    for _ in range(20):
        y = layer(x)
    assert not torch.allclose(y, F.batch_norm(x, None, None, training=True), atol=1e-2)


def test_renorm_schedule_ends_at_the_clips():
    layer = BatchRenorm2d(4, r_max=2.5, d_max=4.0)
    for step, r_max, d_max in (
        (0, 1, 0),
        (5_000, 1, 0),
        (25_000, 1 + 1.5 * 20 / 35, 4),
        (40_000, 2.5, 4),
        (10**6, 2.5, 4),
    ):
        layer.num_batches_tracked.fill_(step)
        r, d = layer.clips()
        assert r.item() == pytest.approx(r_max)
        assert d.item() == pytest.approx(d_max)


def test_renorm_batch_inference_equals_training():
    layer = BatchRenorm2d(4, statistics_batch_size=2, warmup_steps=0, r_steps=1, d_steps=1)
    for _ in range(5):
        layer(torch.randn(6, 4, 3, 3) * 2)
    x = torch.randn(5, 4, 3, 3, requires_grad=True)
    layer.eval().set_inference("batch")
    inference = layer(x)
    training = layer.train()(x)
    torch.testing.assert_close(inference, training, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(y.pow(3).sum(), x)[0] for y in (inference, training)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_renorm_refuses_what_it_cannot_do():
    with pytest.raises(
        ValueError, match="inference of BatchRenorm must be one of 'population', 'batch', got 'example'"
    ):
        BatchRenorm2d(4, statistics_batch_size=2, inference="example")
    with pytest.raises(ValueError, match="track_running_stats"):
        BatchRenorm2d(4, track_running_stats=False)
    with pytest.raises(ValueError, match="r_max"):
        BatchRenorm2d(4, r_max=0.5)
    with pytest.raises(ValueError, match="d_steps"):
        BatchRenorm2d(4, d_steps=10)
