"""Small nets of every kind that `fuse` meets, each beside itself fused, and what it means that two train alike."""

from __future__ import annotations

import copy
import functools

import timm
import torch
from timm.models.regnet import RegNet, RegNetCfg
from torch import nn
from torch.nn import functional as F
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

import kalmannorm
from kalmannorm.lab import models

SHAPE = (4, 3, 24, 24)


def stem():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))


def block(kind, inputs, planes, stride=1):
    """One of torchvision's, whose shortcut ends in a norm where it is a projection."""
    outputs = planes * kind.expansion
    projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
    return kind(inputs, planes, stride, projection if inputs != outputs else None)


class Residual(nn.Module):
    """torchvision's ResNet with fewer blocks and channels."""

    def __init__(self, kind):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        wide = 8 * kind.expansion
        self.layer1 = nn.Sequential(block(kind, 8, 8), block(kind, wide, 8))
        self.layer2 = nn.Sequential(block(kind, wide, 16, 2), block(kind, 2 * wide, 16))
        self.fc = nn.Linear(2 * wide, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class Gated(nn.Module):
    """Control flow on values at the top; the blocks inside can be traced."""

    def __init__(self):
        super().__init__()
        self.stem = stem()
        self.block = BasicBlock(8, 8)
        self.other = BasicBlock(8, 8)
        self.norm = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.block(x) if x.mean() > 0 else self.other(x)
        return self.classifier(F.relu(self.norm(x)).mean((2, 3)))


NETS = {
    # shortcuts that are norms, and the ReLU of a block shared by all its sums and norms
    "basic": lambda: Residual(BasicBlock),
    "bottleneck": lambda: Residual(Bottleneck),
    "torchvision": lambda: ResNet(Bottleneck, (1, 1, 1, 1), 5, width_per_group=4),
    # pre-activation: functions, a list of tensors as argument, a norm at the end of a child
    "densenet": lambda: DenseNet(8, (2, 2), 16, num_classes=5),
    "cifar-resnet": lambda: models.build("cifar-resnet-20", classes=5, shape=(3, 16, 16), width=0.5),
    "bn-inception": lambda: models.build("bn-inception", classes=5, shape=SHAPE[1:], width=0.125),
    # timm: BatchNormAct2d with its own ReLU; without, in a sum; identities in between
    "regnet": lambda: RegNet(RegNetCfg(stem_width=8, depth=5, w0=8, wa=8.0, wm=1.5, group_size=4), 3, 5),
    "timm-resnet": lambda: timm.models.resnet.ResNet(
        timm.models.resnet.BasicBlock, (1, 1, 1, 2), 5, channels=(64, 8, 8, 8)
    ),
    "gated": Gated,
}
# Norms fused with ReLU, with sum and ReLU, and left.
COUNTS = {
    "basic": (5, 4, 1),
    "bottleneck": (9, 4, 2),
    "torchvision": (9, 4, 4),
    "densenet": (11, 0, 0),
    "cifar-resnet": (19, 0, 0),
    "bn-inception": (69, 0, 0),
    "regnet": (11, 5, 4),
    "timm-resnet": (6, 5, 3),
    "gated": (2, 1, 3),
}


def converted(name="basic", to="kalman", **options):
    torch.manual_seed(0)
    model = NETS[name]().double()
    return kalmannorm.convert(model, torch.randn(SHAPE).double(), to=to, statistics_batch_size=2, **options)


def images():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).double()


@functools.cache
def _pair(name):
    model = converted(name)
    return model, kalmannorm.fuse(model, images())


def pair(name="basic"):
    """A model and the same one fused."""
    return copy.deepcopy(_pair(name))


def trained(model, x, steps=3, mode=True):
    """Outputs, gradients and buffers of a few steps of training."""
    model.train(mode)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, torch.arange(len(x)) % 5).backward()
        optimizer.step()
        seen.append(out.detach())
    grads = [p.grad for p in model.parameters()]
    return seen, grads, list(model.buffers()), list(model.parameters())


def assert_same(actual, expected, tolerance=1e-10):
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, list):
            assert_same(a, b, tolerance)
        elif a is None or b is None:
            assert a is b
        else:
            scale = float(b.detach().abs().max()) if b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * (scale + 1e-3))


def counts(model):
    kinds = list(model.fusion.fused.values())
    return kinds.count("ReLU"), kinds.count("sum and ReLU"), len(model.fusion.left)
