"""`fuse(…, save_memory=True)` with Triton's kernels, on a GPU or in the interpreter: no bit of a gradient changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kalmannorm
from support.poisoned import DEVICE
from support.short_way import use_kernels_on_the_cpu

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    use_kernels_on_the_cpu(monkeypatch)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


@pytest.mark.parametrize("computed", [False, True], ids=["plain filters", "computed filters"])
@pytest.mark.parametrize(("last", "to"), [(True, "kalman"), (False, "ghost")], ids=["NHWC", "NCHW, ghost"])
def test_no_bit_changes(last, to, computed):
    torch.manual_seed(0)
    x = torch.randn(3, 3, 6, 6, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    model = nn.Sequential(stem, Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).to(DEVICE)
    model = kalmannorm.convert(model, x, to=to, statistics_batch_size=2, weight_standardization=computed)
    results = []
    for fused in (kalmannorm.fuse(model, x), kalmannorm.fuse(model, x, save_memory=True)):
        fused(x).square().sum().backward()
        results.append([p.grad for p in fused.parameters()])
        assert len(fused.fusion.saved) in (0, 5)
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
