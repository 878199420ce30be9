"""Nets and inputs for tests of converted models on a GPU."""

from __future__ import annotations

import torch
from torch import nn

from kalmannorm import convert
from support.converted_net import Net

TRANSITIONS = ["weights", "learned"]


def image(batch=4, seed=0):
    return torch.randn(batch, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


class Shuffled(Net):
    """With a channel shuffle, whose index has to follow the model to its device."""

    def features(self, x):
        x = self.stem(x).relu()
        x = x.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2)
        for block in (self.block1, self.block2, self.block3):
            x = self.run(block, x)
        return x


def net(transition, device="cuda"):
    torch.manual_seed(0)
    x = image().to(device)
    model = convert(Shuffled().to(device), x, transition=transition, statistics_batch_size=2)
    for name, parameter in model.named_parameters():
        if name.endswith("matrix"):
            nn.init.constant_(parameter, 0.1)
    return model
