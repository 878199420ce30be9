"""The smallest network that shows the effect: five convolutions for 8×8 digits."""

from __future__ import annotations

from torch import Tensor, nn

from kalmannorm.lab.models.parts import Unit, initialise, scaled

WIDTHS = (16, 16, 32, 32, 32)
STRIDES = (1, 1, 2, 1, 1)  # on 8×8 images a single example still has 16 values per channel for its statistics


class DigitsNet(nn.Module):
    """3×3 convolutions with norm and ReLU, the average over the map, a linear classifier."""

    def __init__(self, classes: int, channels: int = 1, width: float = 1.0) -> None:
        super().__init__()
        widths = [channels, *(scaled(each, width) for each in WIDTHS)]
        self.features = nn.Sequential(*(Unit(widths[i], widths[i + 1], 3, stride) for i, stride in enumerate(STRIDES)))
        self.classifier = nn.Linear(widths[-1], classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits
