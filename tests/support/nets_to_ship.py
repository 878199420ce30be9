"""Models for `test_deploy.py` and `test_export.py`: one to ship, and one for each reason why a norm must not fold."""

from __future__ import annotations

import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

from kalmannorm import convert


def randomised(model):
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
    return model.eval()


class Net(nn.Module):
    """A residual, a concatenation, a depthwise and a pre-activation norm, and a linear layer with its norm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, groups=6), BatchNormAct2d(6)
        self.norm3, self.conv3 = nn.BatchNorm2d(12), nn.Conv2d(12, 4, 1)
        self.head, self.norm4 = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x):
        a = self.norm1(self.conv1(x)).relu()
        b = a + self.norm2(self.conv2(a))
        c = self.conv3(F.silu(self.norm3(torch.cat([a, b], 1))))
        return self.norm4(self.head(c.mean((2, 3))))


def net_and_input(N=4, **options):
    model, x = randomised(Net()), torch.randn(N, 3, 8, 7)
    return model, x, convert(model, x, statistics_batch_size=2, **options)


def pair(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)


class Case(nn.Module):
    """A pair that must stay apart, `conv` and `norm`, before one that folds."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = pair(3, 4)
        self.conv2, self.norm2 = pair(4, 4)

    def between(self, x):
        raise NotImplementedError

    def forward(self, x):
        return self.norm2(self.conv2(self.between(x)))


class TwoReaders(Case):
    def between(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class InPlaceAfter(Case):
    def between(self, x):
        y = self.conv(x)
        z = self.norm(y)
        y.mul_(2)
        return z + y


class InPlaceBefore(Case):
    def between(self, x):
        y = self.conv(x)
        y.add_(1)
        return self.norm(y)


class InPlaceThroughView(Case):
    def between(self, x):
        y = self.conv(x)
        F.relu(y[:, :2], inplace=True)
        return self.norm(y)


class ReusedNorm(Case):
    def between(self, x):
        return self.norm(self.conv(x)) + self.norm(x.mean(1, keepdim=True).expand(-1, 4, -1, -1))


class ReusedLayer(Case):
    def between(self, x):
        return self.norm(self.conv(x)) + self.conv(x.flip(0))


class Regularized(Case):
    def between(self, x):
        return self.norm(self.conv(x)) * self.conv.weight.square().mean()


class BiasElsewhere(Case):
    def between(self, x):
        return self.norm(self.conv(x)) * self.conv.bias.mean()


class GammaElsewhere(Case):
    def between(self, x):
        return self.norm(self.conv(x)) * self.norm.weight.mean()


class WeightOfAnother(Case):
    """Calls the function itself, and would not take a bias."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)

    def between(self, x):
        return self.norm(F.conv2d(x, self.conv.weight, padding=1))


class NoBias(Case):
    """A subclass that would not take a bias."""

    class Conv(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight, None, self.stride, self.padding)

    def __init__(self):
        super().__init__()
        self.conv = self.Conv(3, 4, 3, padding=1, bias=False)

    def between(self, x):
        return self.norm(self.conv(x))


class ComputedWeight(NoBias):
    class Conv(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight.tanh(), self.bias, self.stride, self.padding)

    def __init__(self):
        super().__init__()
        self.conv = self.Conv(3, 4, 3, padding=1)


class ComputedBias(ComputedWeight):
    class Conv(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight, self.bias * 2, self.stride, self.padding)


class Parametrized(NoBias):
    def __init__(self):
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))


class Tied(NoBias):
    """The other holder of the weight does not even run."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3)
        self.other.weight = self.conv.weight


class TiedToFirst(NoBias):
    """The holder that comes first in the model does not run."""

    def __init__(self):
        super().__init__()
        self.aaa = nn.Conv2d(3, 4, 3)
        self.conv, self.norm = pair(3, 4)
        self.aaa.weight = self.conv.weight
        self._modules = dict(sorted(self._modules.items()))


class BatchStatistics(NoBias):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False)


class LinearOnSequences(Case):
    """(N, L, C): the norm's channels are the linear layer's positions."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Linear(8, 3), nn.BatchNorm1d(3)

    def between(self, x):
        return self.norm(self.conv(x[:, :, 0])).unsqueeze(1).repeat(1, 4, 1, 1)


class Unbatched(Case):
    """(C, L) is (N, C) to the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8)

    def between(self, x):
        return x.repeat(1, 2, 1, 1)[:, :4] * self.norm(self.conv(x[0, :, 0])).mean()


class OnlyTrainingReads(Case):
    """In training the norm alone reads the layer; in eval it does not run, and the layer feeds something else."""

    def between(self, x):
        y = self.conv(x)
        return self.norm(y) if self.training else y


class Returned(Case):
    def forward(self, x):
        y = self.conv(x)
        return self.norm2(self.conv2(self.norm(y))), y


CASES = [TwoReaders, InPlaceAfter, InPlaceBefore, InPlaceThroughView, ReusedNorm, ReusedLayer, Regularized,
         BiasElsewhere, GammaElsewhere, WeightOfAnother, NoBias, ComputedWeight, ComputedBias, Parametrized, Tied,
         TiedToFirst, BatchStatistics, LinearOnSequences, Unbatched, OnlyTrainingReads, Returned]  # fmt: skip
