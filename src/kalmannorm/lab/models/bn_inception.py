"""BN-Inception, the paper's "Inceptionv2": the network of Ioffe and Szegedy, "Batch Normalization" (2015), figure 5.

Every convolution is followed by batch norm, then ReLU. It has 11.2 M parameters with 1,000 classes. The 7×7 convolution
is a plain one here (theirs is separable), and there are no auxiliary classifiers. It was designed for 224×224, but runs
on any size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kalmannorm.lab.models.parts import Unit, initialise, scaled

STEM = (64, 64, 192)


class Widths(NamedTuple):
    """A row of the table.

    In blocks of stride 2 two entries are 0: the 1×1 branch and the convolution after the pooling.
    """

    one: int
    three: tuple[int, int]
    double: tuple[int, int]
    pooled: int
    pool: str = "average"


BLOCKS = {
    "3a": Widths(64, (64, 64), (64, 96), 32),
    "3b": Widths(64, (64, 96), (64, 96), 64),
    "3c": Widths(0, (128, 160), (64, 96), 0, "max"),
    "4a": Widths(224, (64, 96), (96, 128), 128),
    "4b": Widths(192, (96, 128), (96, 128), 128),
    "4c": Widths(160, (128, 160), (128, 160), 96),
    "4d": Widths(96, (128, 192), (160, 192), 96),
    "4e": Widths(0, (128, 192), (192, 256), 0, "max"),
    "5a": Widths(352, (192, 320), (160, 224), 128),
    "5b": Widths(352, (192, 320), (192, 224), 128, "max"),
}


class Block(nn.Module):
    """Parallel branches: 1×1; 1×1 and 3×3; 1×1 and two 3×3; pooling and 1×1.

    At stride 2 the last one is pooling alone.
    """

    def __init__(self, fan_in: int, widths: Widths, width: float) -> None:
        super().__init__()
        stride = 1 if widths.one else 2
        three_in, three = (scaled(each, width) for each in widths.three)
        double_in, double = (scaled(each, width) for each in widths.double)
        self.three = nn.Sequential(Unit(fan_in, three_in, 1), Unit(three_in, three, 3, stride))
        self.double_three = nn.Sequential(
            Unit(fan_in, double_in, 1), Unit(double_in, double, 3), Unit(double, double, 3, stride)
        )
        self.pooled = nn.Sequential(_pooling(widths.pool, stride))
        self.out = three + double
        self.one: Unit | None = None
        if widths.one:
            one, pooled = scaled(widths.one, width), scaled(widths.pooled, width)
            self.one = Unit(fan_in, one, 1)
            self.pooled.append(Unit(fan_in, pooled, 1))
            self.out += one + pooled
        else:
            self.out += fan_in

    def forward(self, x: Tensor) -> Tensor:
        branches = [] if self.one is None else [self.one(x)]
        return torch.cat((*branches, self.three(x), self.double_three(x), self.pooled(x)), 1)


def _pooling(kind: str, stride: int) -> nn.Module:
    """Padding has no effect, neither on an average nor on a maximum."""
    if kind == "max":
        return nn.MaxPool2d(3, stride, padding=1)
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


class BNInception(nn.Module):
    def __init__(self, classes: int, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        first, reduced, fan_in = (scaled(each, width) for each in STEM)
        self.stem = nn.Sequential(
            Unit(channels, first, 7, stride=2),
            _pooling("max", 2),
            Unit(first, reduced, 1),
            Unit(reduced, fan_in, 3),
            _pooling("max", 2),
        )
        self.blocks = nn.Sequential()
        for name, widths in BLOCKS.items():
            block = Block(fan_in, widths, width)
            self.blocks.add_module(name, block)
            fan_in = block.out
        self.classifier = nn.Linear(fan_in, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
        return logits
