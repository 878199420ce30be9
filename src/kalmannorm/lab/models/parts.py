"""Parts of the lab's own networks: convolution with batch norm and ReLU, scaled widths, initialisation."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Unit(nn.Module):
    """ReLU(norm(convolution(x))). The padding keeps the size of the map at stride 1."""

    def __init__(self, fan_in: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(fan_in, width, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


def scaled(channels: int, width: float) -> int:
    """The channel count in a network that is `width` times as wide."""
    return max(1, round(channels * width))


def initialise(net: nn.Module) -> None:
    """He's normal initialisation (fan out) of every convolution, for all norms.

    Norms keep γ = 1 and β = 0. Linear layers keep torch's own initialisation.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
