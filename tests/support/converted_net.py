"""A small net to convert, a training step, and what a step leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kalmannorm import convert

TRANSITIONS = ["weights", "learned"]
KINDS = [*TRANSITIONS, "ghost"]
"""Norms with priors of a transition, and norms without priors, of a model that was never traced."""


# What dynamo meets, and hides from users, when a compiled part gets a tensor from an eager one.
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + x)


class Net(nn.Module):
    """Residual blocks; `run` may wrap each of them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.block1, self.block2, self.block3 = Block(6, 6), Block(6, 6), Block(6, 6)
        self.head = nn.Linear(6, 4)

    @staticmethod
    def run(block, x):
        return block(x)

    def features(self, x):
        x = self.stem(x).relu()
        for block in (self.block1, self.block2, self.block3):
            x = self.run(block, x)
        return x

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def image(batch=4, seed=0):
    return torch.randn(batch, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


def net(kind, **options):
    torch.manual_seed(0)
    options = {"statistics_batch_size": 2, **options}
    ghost = kind == "ghost"
    model = convert(Net(), to=kind, **options) if ghost else convert(Net(), image(), transition=kind, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("matrix"):  # starts at zero, where a wrong prior would not show
            nn.init.normal_(parameter, std=0.3)
    return model


def state(model):
    return model.block1.bn1.wire.relay.state


def step(model, seeds=(0, 1)):
    """Several forwards, then one backward; gradients and buffers."""
    model.zero_grad()
    sum(model(image(seed=seed)).square().sum() for seed in seeds).backward()
    return {n: p.grad for n, p in model.named_parameters()}, {n: b.clone() for n, b in model.named_buffers()}


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] is not None and b[name] is not None, name
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
