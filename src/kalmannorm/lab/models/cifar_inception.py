"""The paper's network for CIFAR-10/100 (its section 4.4): a stem of stride 2, three Inception blocks on 16×16 maps, and
the fully connected layer of 1,000 that its table omits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm.lab.models.parts import Unit, scaled

STEM, HIDDEN = 32, 1000


class Widths(NamedTuple):
    """A column of the paper's table."""

    one: int
    three: tuple[int, int]
    five: tuple[int, int]
    pooled: int


BLOCKS = (
    Widths(64, (96, 128), (16, 32), 32),
    Widths(128, (128, 192), (32, 96), 64),
    Widths(192, (96, 208), (16, 48), 64),
)


class Block(nn.Module):
    """Four parallel branches: 1×1; 1×1 and 3×3; 1×1 and 5×5; max pooling and 1×1."""

    def __init__(self, fan_in: int, widths: Widths, width: float) -> None:
        super().__init__()
        one, pooled = scaled(widths.one, width), scaled(widths.pooled, width)
        three_in, three = (scaled(each, width) for each in widths.three)
        five_in, five = (scaled(each, width) for each in widths.five)
        self.one = Unit(fan_in, one, 1)
        self.three = nn.Sequential(Unit(fan_in, three_in, 1), Unit(three_in, three, 3))
        self.five = nn.Sequential(Unit(fan_in, five_in, 1), Unit(five_in, five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), Unit(fan_in, pooled, 1))
        self.out = one + three + five + pooled

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pooled(x)), 1)


class CifarInception(nn.Module):
    def __init__(self, classes: int, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        fan_in = scaled(STEM, width)
        self.stem = Unit(channels, fan_in, 3, stride=2)
        self.blocks = nn.Sequential()
        for widths in BLOCKS:
            block = Block(fan_in, widths, width)
            self.blocks.append(block)
            fan_in = block.out
        self.hidden = nn.Linear(fan_in, scaled(HIDDEN, width))
        self.classifier = nn.Linear(self.hidden.out_features, classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.blocks(self.stem(x)).mean((2, 3))
        logits: Tensor = self.classifier(F.relu(self.hidden(pooled)))
        return logits
