"""Rules of `weights` against sampling: draw what the first norm is believed to give, and do what the model does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kalmannorm

CHANNELS, SIZE = 64, 4


class Net(nn.Module):
    def __init__(self, between, channels):
        super().__init__()
        self.between = between
        self.first, self.last = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(channels)
        self.layer = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


def halves(x):
    return x.chunk(2, 1)


def two_features(net, x):
    """Each position's products of 8 by 8 channels, summed over 4."""
    a, b = (half.unflatten(1, (4, 8)).permute(0, 3, 4, 2, 1) for half in halves(x))
    return (a @ b.transpose(-2, -1)).flatten(3).permute(0, 3, 1, 2)


def as_einsum(net, x):
    a, b = (half.unflatten(1, (4, 8)) for half in halves(x))
    return torch.einsum("n d i h w, n d j h w -> n i j h w", a, b).flatten(1, 2)


def same_max_pool(net, x):
    return F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-float("inf")), 2, 1)


def shuffled(net, x):
    x = x.view(x.shape[0], 2, -1, *x.shape[2:]).transpose(1, 2).contiguous().view(x.shape)
    return x.chunk(2, 1)[0].view(x.shape[0], 4, -1, *x.shape[2:]).flatten(1, 2)


RULES = {
    "gate around a residual": lambda net, x: x + 0.25 * (net.layer(x) - x),
    "the same twice": lambda net, x: 1.5 * x - x,
    "layer norm": lambda net, x: F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,)).permute(0, 3, 1, 2),
    "rms norm": lambda net, x: F.rms_norm(x.permute(0, 2, 3, 1), (CHANNELS,)).permute(0, 3, 1, 2),
    "group norm": lambda net, x: F.group_norm(x, 2),
    "normalize": lambda net, x: F.normalize(x, dim=1),
    "quotient": lambda net, x: halves(x)[0] / (halves(x)[1] + 12),
    "matrix product": two_features,
    "einsum": as_einsum,
    "mean over channels": lambda net, x: x.unflatten(1, (8, 8)).mean(2),
    "shuffle": shuffled,
}


def prior_of(between, example):
    torch.manual_seed(0)
    channels = between(Net(between, 1), example).shape[1]
    net = Net(between, channels)
    with torch.no_grad():
        net.first.weight.uniform_(0.5, 1.5)
        net.first.bias.normal_()
    converted = kalmannorm.convert(net, example)
    found = []
    hook = converted.last.register_forward_pre_hook(lambda norm, args: found.append(norm.wire.previous(0, args[0])))
    converted(example)
    hook.remove()
    return net, found[0]


@pytest.mark.parametrize("rule", RULES)
def test_the_prior_is_what_sampling_gives(rule):
    net, prior = prior_of(RULES[rule], torch.randn(2, CHANNELS, SIZE, SIZE))
    assert prior is not None
    shape = (1, CHANNELS, 1, 1)
    believed = torch.randn(4000, CHANNELS, SIZE, SIZE) * net.first.weight.view(shape) + net.first.bias.view(shape)
    with torch.no_grad():
        y = net.between(net, believed)
    var, mean = torch.var_mean(y, (0, 2, 3))
    assert (prior.mean[0] - mean).abs().max() < 0.05 * var.sqrt().max() + 0.01
    assert ((prior.var[0] - var).abs() / var).max() < 0.15


def test_a_border_of_minus_infinity_is_no_belief():
    net, prior = prior_of(same_max_pool, torch.randn(2, CHANNELS, SIZE, SIZE))
    torch.testing.assert_close(prior.mean[0], net.first.bias)
    torch.testing.assert_close(prior.var[0], net.first.weight.square())


def attention(net, x):
    q = x.flatten(2)
    weights = (q.transpose(1, 2) @ q).softmax(-1)
    return torch.einsum("n i j, n c j -> n c i", weights, q).view(x.shape)


def attention_of_torch(net, x):
    q = x.flatten(2).transpose(1, 2).contiguous()
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


AVERAGES = {
    "average pooling": (lambda net, x: F.avg_pool2d(x, 2), 4),
    "global average": (lambda net, x: F.adaptive_avg_pool2d(x, 1), SIZE**2),
    "mean over positions": (lambda net, x: x.mean((2, 3), keepdim=True), SIZE**2),
    "attention": (attention, SIZE**2),
    "attention of torch": (attention_of_torch, SIZE**2),
}


@pytest.mark.parametrize("average", AVERAGES)
def test_an_average_over_positions_is_halfway_between_alike_and_independent(average):
    between, positions = AVERAGES[average]
    net, prior = prior_of(between, torch.randn(2, CHANNELS, SIZE, SIZE))
    torch.testing.assert_close(prior.mean[0], net.first.bias)
    torch.testing.assert_close(prior.var[0], net.first.weight.square() / positions**0.5)


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_a_tensor_that_only_lends_its_shape_feeds_nothing(transition):
    class Shaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.BatchNorm1d(4) for _ in range(3))

        def forward(self, x):
            a = self.a(x)
            b = self.b(a.flatten(1)).reshape_as(a).type_as(a)
            return self.c(b + torch.zeros_like(a))

    converted = kalmannorm.convert(Shaped(), torch.randn(3, 4, 5)[:, :, 0], transition=transition)
    assert {norm.name: norm.sources for norm in kalmannorm.wiring(converted).norms} == {
        "a": [],
        "b": ["a"],
        "c": ["b"],
    }


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_sources_are_those_of_the_channels_that_are_read(transition):
    class Parted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.BatchNorm1d(4) for _ in range(4))

        def forward(self, x):
            both = torch.cat([self.a(x), self.b(x * x)], 1).relu()
            return self.c(both[:, :4]), self.d((both * 2)[:, 2:6])

    converted = kalmannorm.convert(Parted(), torch.randn(3, 4), transition=transition)
    found = {norm.name: norm.sources for norm in kalmannorm.wiring(converted).norms}
    assert (found["c"], found["d"]) == (["a"], ["a", "b"])
