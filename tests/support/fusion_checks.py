"""A small net that does with its norms what a function says, and the check that fusing it changes no number."""

from __future__ import annotations

import copy

import torch
from torch import nn

import kalmannorm

SHAPE = (4, 6, 5, 5)


class Net(nn.Module):
    """Two convolutions and norms, used as a function says."""

    def __init__(self, run):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.relu, self.act = nn.ReLU(inplace=True), nn.ReLU6()
        self.scale, self.mask = nn.Parameter(torch.ones(6, 1, 1)), None
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def shared_relu(net, x):
    x = net.relu(net.bn(net.conv(x)))
    return net.relu(net.bn2(net.conv2(x)) + x)


def converted(run, kind=Net, to="kalman"):
    torch.manual_seed(0)
    model = kind(run) if kind is Net else kind()
    return kalmannorm.convert(model.double(), torch.randn(SHAPE).double(), to=to, statistics_batch_size=2)


def results(model, x, training):
    model = copy.deepcopy(model).train(training)
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = model(x * 1)
    out = out if isinstance(out, torch.Tensor) else torch.cat([t.flatten() for t in out])
    learning = [x, *(p for p in model.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), learning, allow_unused=True
    )
    return [out, *(g for g in grads if g is not None), *model.buffers()]


def fused_of(model):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).double()
    fused = kalmannorm.fuse(model, x)
    for training in (True, False):
        for a, b in zip(results(fused, x, training), results(model, x, training), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return fused
