"""CIFAR ResNets with pre-activation (He et al. 2016, "Identity Mappings in Deep Residual Networks"), as the authors of
the paper trained them: three stages of n blocks, 6n + 2 layers, 16, 32 and 64 channels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm.lab.models.parts import Unit, initialise, scaled

DEPTHS = (20, 32, 56, 110)
WIDTHS = (16, 32, 64)


class Block(nn.Module):
    """x + convolution(ReLU(norm(convolution(ReLU(norm(x)))))).

    If the map size is halved, the shortcut is averaged over 2×2 and padded with zero channels. The first block of a
    network gets the activated output of the stem, so it has no first norm.
    """

    def __init__(self, fan_in: int, width: int, stride: int, activated: bool) -> None:
        super().__init__()
        self.norm1 = None if activated else nn.BatchNorm2d(fan_in)
        self.convolution1 = nn.Conv2d(fan_in, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.stride = stride
        self.padding = ((width - fan_in) // 2, width - fan_in - (width - fan_in) // 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.norm1 is None else F.relu(self.norm1(x))
        y = F.relu(self.norm2(self.convolution1(y)))
        return self.convolution2(y) + self.shortcut(x)  # type: ignore[no-any-return]

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)  # the size of the convolution's output, also for odd sizes
        return F.pad(x, (0, 0, 0, 0, *self.padding)) if any(self.padding) else x


class CifarResNet(nn.Module):
    def __init__(self, depth: int, classes: int, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        fan_in = scaled(WIDTHS[0], width)
        self.stem = Unit(channels, fan_in, 3)
        self.blocks = nn.Sequential()
        for stage, channels_out in enumerate(scaled(each, width) for each in WIDTHS):
            for number in range((depth - 2) // 6):
                first = number == 0
                self.blocks.append(Block(fan_in, channels_out, 2 if stage and first else 1, not stage and first))
                fan_in = channels_out
        self.norm = nn.BatchNorm2d(fan_in)
        self.classifier = nn.Linear(fan_in, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits
