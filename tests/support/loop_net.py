"""A net that runs its norms several times in one forward."""

from __future__ import annotations

from torch import nn


class Loop(nn.Module):
    """`times` views, each through both norms; then a norm that reads the last."""

    def __init__(self):
        super().__init__()
        self.conv, self.a = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.b = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv3, self.c = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, views):
        for x in views:
            y = self.b(self.conv2(self.a(self.conv(x)).relu())).relu()
        return self.c(self.conv3(y))
