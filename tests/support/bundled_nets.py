"""Nets whose priors meet every kind of work a bundle does, and their bundles."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

from kalmannorm import convert
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._running.prior_bundles import PriorBundles


class Blocks(nn.Module):
    """Residual blocks: borders, groups, depthwise, a norm without γ and β, a difference."""

    def __init__(self, act=F.relu):
        super().__init__()
        self.act = act
        self.conv0, self.norm0 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.conv3, self.norm3 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.conv4, self.norm4 = nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5)

    def forward(self, x):
        x = self.act(self.norm0(self.conv0(x)))
        x = self.act(self.norm1(self.conv1(x)) + x)
        y = self.act(self.norm2(self.conv2(x)) + x)
        y = self.act(self.norm3(self.conv3(y))) - x
        return self.norm4(self.conv4(y))


class Branches(nn.Module):
    """Concatenated, parted and shuffled channels; a transposed convolution; a gate; an average."""

    def __init__(self, act=F.relu, gate=torch.sigmoid):
        super().__init__()
        self.act, self.gate = act, gate
        self.conv0, self.norm0 = nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6)
        self.conv1, self.norm1 = nn.Conv2d(3, 4, (1, 3), stride=2), nn.BatchNorm2d(4)
        self.up, self.norm2 = nn.ConvTranspose2d(10, 6, 2, stride=2, groups=2, bias=False), nn.BatchNorm2d(6)
        self.squeeze = nn.Conv2d(6, 6, 1)
        self.conv3, self.norm3 = nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5)

    def forward(self, x):
        a, b = self.act(self.norm0(self.conv0(x))), self.norm1(self.conv1(x)).clamp(max=1.5)
        both = torch.cat([a, b[..., :4, :4] * 0.5], 1)[:, [9, *range(9)]]
        y = self.act(self.norm2(self.up(both)))
        gate = self.gate(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        return self.norm3(self.conv3(y * gate))


class Pre(nn.Module):
    """Pre-activation: norms read sums of what layers gave; and linear layers, on vectors."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Linear(6, 7), nn.BatchNorm1d(7)
        self.one, self.norm1 = nn.Linear(7, 7), nn.BatchNorm1d(7)
        self.two, self.norm2 = nn.Linear(7, 7, bias=False), nn.BatchNorm1d(7)

    def forward(self, x):
        x = self.first(self.stem(x))
        x = x + self.one(F.leaky_relu(x, 0.2))
        x = x + self.two(self.norm1(x).relu())
        return self.norm2(x)


class Masked(nn.Module):
    """Frozen norms, gated linear units, masks, writes and channels chosen by an index."""

    def __init__(self):
        super().__init__()
        self.conv0, self.frozen = nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        self.conv3, self.norm3 = nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5)
        for tensor in (self.frozen.weight, self.frozen.bias):
            tensor.uniform_(0.5, 1.5)
        self.register_buffer("order", torch.tensor([5, 0, 2, 3, 4, 1]))

    def forward(self, x):
        padding = x[:, :1, 1:-1, 1:-1] > 1
        x = F.glu(self.frozen(self.conv0(x)), 1)
        x = self.norm1(self.conv1(x)).masked_fill(padding, 0.0)
        y = torch.zeros_like(x)
        y[:, :4, 1:] = x[:, :4, :-1]
        y[:, 4:] = x[:, 4:]
        x = torch.einsum("n c h w -> n h w c", self.norm2(self.conv2(y)))
        return self.norm3(self.conv3(torch.where(padding, 0.0, x.permute(0, 3, 1, 2)[:, self.order].relu())))


class FromInput(nn.Module):
    """A residual stream that begins at a layer of the input, and the input beside features."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(7)

    def forward(self, x):
        y = self.stem(x)
        y = y + self.conv1(self.norm0(y).relu())
        y = y + self.conv2(self.norm1(y).relu())
        return self.norm2(torch.cat([y, x], 1))


class Smooth(nn.Module):
    """Functions that are integrated by quadrature, side by side."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer, self.last = nn.Linear(16, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        x = self.norm(x)
        return self.last(self.layer(torch.cat([F.silu(x), F.gelu(x), torch.tanh(x), torch.sigmoid(x)], 1)))


class Twice(nn.Module):
    """No layer at all; two norms read one activation of one norm."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.BatchNorm1d(4) for _ in range(3))

    def forward(self, x):
        x = self.a(x)
        return self.b(x.relu()) + self.c(x.relu())


IMAGE, VECTOR = (2, 3, 9, 9), (4, 6)


def converted(net, shape, **options):
    """Converted, with β and γ that are not those of the start, one γ being zero."""
    torch.manual_seed(0)
    model = convert(net, torch.randn(shape), **{"statistics_batch_size": 2, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for norm in model.modules():
            if isinstance(norm, GroupedNorm) and norm.weight is not None:
                norm.weight[0] = 0
    return model


def bundles(model, x, monkeypatch):
    """The bundles that a forward runs, with their tensors."""
    found = []
    original = PriorBundles._outputs

    def outputs(self, number, tensors, groups, context, *more):
        found.append((self.parts[number].bundle, [tensor.detach().clone() for tensor in tensors]))
        return original(self, number, tensors, groups, context, *more)

    with monkeypatch.context() as patch:
        patch.setattr(PriorBundles, "_outputs", outputs)
        model(x)
    return found
