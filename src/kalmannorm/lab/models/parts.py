"""What the lab's own nets are made of: convolution, batch norm, ReLU; scaled widths; one initialisation."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Unit(nn.Module):
    """ReLU(norm(convolution(x))); the padding keeps the map's size at stride 1."""

    def __init__(self, fan_in: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(fan_in, width, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


def scaled(channels: int, width: float) -> int:
    """A channel count of a net that is `width` times as wide."""
    return max(1, round(channels * width))


def initialise(net: nn.Module) -> None:
    """He's normal initialisation (fan out) of every convolution, whatever norm the net gets later.

    Norms keep γ = 1 and β = 0, linear layers torch's own initialisation.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
