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
        self.register_buffer("order", torch.arange(CHANNELS).flip(0))
        self.register_buffer("even", torch.arange(CHANNELS) % 2 == 0)

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


def shifted(net, x):
    """Half of the channels move by one position. The first position gets zeros."""
    y = torch.zeros_like(x)
    y[:, :32, 1:] = x[:, :32, :-1]
    y[:, 32:] = x[:, 32:]
    return y


def written(net, x):
    y = x.clone()
    y[:, :, 0] = 2.0
    y[:, 5] = x[:, 6]
    return y


def overwritten(net, x):
    y = torch.empty_like(x)
    y[:] = 2 * x
    return torch.empty(y.shape).copy_(y)


ORDER = [(5 * i + 3) % CHANNELS for i in range(CHANNELS)]

RULES = {
    "glu": lambda net, x: F.glu(x, 1),
    "glu over positions": lambda net, x: F.glu(x, -1),
    "shift": shifted,
    "written": written,
    "overwritten": overwritten,
    "permutation by einsum": lambda net, x: torch.einsum("n h w c -> n c h w", x.permute(0, 2, 3, 1)),
    "channels by index": lambda net, x: x[:, ORDER[:40]].index_select(1, torch.tensor(ORDER[:40]).argsort()),
    "channels by a buffer": lambda net, x: x[:, net.order],
    "channels by a mask": lambda net, x: x[:, net.even],
    "channels by gather": lambda net, x: x.gather(1, torch.tensor(ORDER).view(1, -1, 1, 1).expand(x.shape)),
    "as tensor": lambda net, x: torch.as_tensor(2 * x),
    "a mask over channels": lambda net, x: net.layer(x.masked_fill((torch.arange(64) > 9).view(-1, 1, 1), 3.0)),
    "a mask over channels in a buffer": lambda net, x: net.layer(torch.where(net.even.view(-1, 1, 1), x, 3.0)),
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


def by_value(x):
    """A mask over positions that depends on the data."""
    return x[:, :1] > 0


def hidden_by_index(net, x):
    y = x.clone()
    y[~by_value(x).expand_as(x)] = 0
    return y


def hidden_sequence(net, x):
    y = x.permute(0, 2, 3, 1).contiguous()
    y[~by_value(x)[:, 0]] = 0
    return y.permute(0, 3, 1, 2)


MASKS = {
    "masked_fill": lambda net, x: x.masked_fill(~by_value(x), 0.0),
    "masked_fill in place": lambda net, x: x.clone().masked_fill_(by_value(x).logical_not(), -1.0),
    "where": lambda net, x: torch.where(by_value(x), x, 0.0),
    "where, the other way round": lambda net, x: torch.where(~by_value(x).expand(x.shape), torch.zeros(()), x),
    "where as a method": lambda net, x: x.where(by_value(x), torch.zeros_like(x)),
    "a repeated mask": lambda net, x: x.masked_fill(~by_value(x).repeat(1, CHANNELS, 1, 1), 0.0),
    "product": lambda net, x: x * by_value(x),
    "product with numbers": lambda net, x: by_value(x).to(x.dtype) * x,
    "index": hidden_by_index,
    "index of a sequence": hidden_sequence,
    "a fixed mask": lambda net, x: x.masked_fill(torch.eye(SIZE).bool(), 0.0),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_over_positions_leaves_the_belief_about_the_others(mask):
    net, prior = prior_of(MASKS[mask], torch.randn(2, CHANNELS, SIZE, SIZE))
    torch.testing.assert_close(prior.mean[0], net.first.bias)
    torch.testing.assert_close(prior.var[0], net.first.weight.square())


STOPS = {
    "where": lambda net, x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda net, x: x.masked_fill(x > 0, 0.0),
    "where of two": lambda net, x: torch.where(by_value(x), x, 2 * x),
    "getitem": lambda net, x: x[:, x.mean((0, 2, 3)).argsort()],
    "gt": lambda net, x: x * (x > 1),
}


@pytest.mark.parametrize("stop", STOPS)
def test_the_report_names_the_operation_that_stops_a_prior(stop):
    net = Net(STOPS[stop], CHANNELS)
    row = kalmannorm.wiring(kalmannorm.convert(net, torch.randn(2, CHANNELS, SIZE, SIZE))).norms[1]
    assert row.sources == ["first"] and not row.wired
    assert stop.split()[0] in row.reason


def test_the_report_names_the_operation_that_reads_the_input():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.last = nn.BatchNorm2d(4), nn.Softsign(), nn.BatchNorm2d(4)

        def forward(self, x, mask):
            return self.last(self.first(x) * self.gate(mask[0]))

    inputs = (torch.randn(2, 4, 3, 3), [torch.rand(2, 1, 3, 3)])
    row = kalmannorm.wiring(kalmannorm.convert(Gated(), inputs)).norms[1]
    assert row.reason == "fed by the model's input: mul"


@pytest.mark.parametrize("function", [torch.tensor, lambda x: x.new_tensor(x), torch.asarray])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_copy_without_gradient_keeps_the_belief(function):
    """`new_tensor` reads the values of its argument, so they are no constant."""
    net, prior = prior_of(lambda net, x: function(x), torch.randn(2, CHANNELS, SIZE, SIZE))
    torch.testing.assert_close(prior.mean[0], net.first.bias)
    torch.testing.assert_close(prior.var[0], net.first.weight.square())
    converted = kalmannorm.convert(net, torch.randn(2, CHANNELS, SIZE, SIZE))
    prior = converted.last.wire.previous(0, torch.randn(2, CHANNELS, SIZE, SIZE))
    assert not any(part.requires_grad for part in (prior.mean, prior.var))


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
