"""The input counts as N(0, 1) where it is mixed with the output of a norm, and only there."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm import moments


class Stream(nn.Module):
    """A residual stream that begins at a layer of the input, with norms before the layers."""

    def __init__(self, blocks=2):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(blocks + 1))
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(blocks))

    def forward(self, x):
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x).relu())
        return self.norms[-1](x)


def images(count=4):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_norms_in_a_stream_that_begins_at_the_input_have_a_prior():
    torch.manual_seed(0)
    net = Stream()
    report = kalmannorm.wiring(kalmannorm.convert(net, images()))
    assert [norm.reason for norm in report.norms] == ["no norm before it", None, None]
    assert report.norms[1].sources == ["norms.0"]


def test_the_prior_is_the_sum_of_the_two_beliefs():
    torch.manual_seed(0)
    net = Stream(1)
    converted = kalmannorm.convert(net, images())
    prior = converted.norms[1].wire.previous(0, images())
    options = {"input_size": (8, 8), "padding": 1}
    stem = moments.convolution(moments.belief(None, None, 3), net.stem.weight, net.stem.bias, **options)
    branch = moments.relu(moments.belief(net.norms[0].weight, net.norms[0].bias))
    branch = moments.convolution(branch, net.layers[0].weight, net.layers[0].bias, **options)
    expected = moments.add(stem, branch)
    torch.testing.assert_close(prior.mean, expected.mean)
    torch.testing.assert_close(prior.var, expected.var)


def test_the_prior_is_what_standardized_images_give():
    torch.manual_seed(0)
    net = Stream().train()
    converted = kalmannorm.convert(net, images())
    seen = []
    net.norms[-1].register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    with torch.no_grad():
        net(images(500))
    var, mean = torch.var_mean(seen[0], (0, 2, 3))
    prior = converted.norms[-1].wire.previous(0, images())
    assert (prior.mean[0] - mean).abs().max() < 0.3 * var.sqrt().mean()
    assert 0.5 < (prior.var[0] / var).median() < 2


class Two(nn.Module):
    def __init__(self, function, channels=3):
        super().__init__()
        self.function = function
        self.first, self.last = nn.BatchNorm2d(3), nn.BatchNorm2d(channels)

    def forward(self, x, *others):
        return self.last(self.function(self.first(x), x, *others))


def prior(function, *others, channels=3):
    net = Two(function, channels)
    with torch.no_grad():
        net.first.weight.uniform_(0.5, 1.5)
        net.first.bias.normal_()
    inputs = (images(), *others)
    converted = kalmannorm.convert(net, inputs)
    return net, kalmannorm.wiring(converted).norms[1], converted.last.wire.previous(0, images())


def test_the_input_itself_concatenated_and_repeated():
    net, _, found = prior(lambda y, x: torch.cat([y, x.repeat(1, 2, 1, 1)], 1), channels=9)
    torch.testing.assert_close(found.mean[0], torch.cat([net.first.bias, torch.zeros(6)]))
    torch.testing.assert_close(found.var[0], torch.cat([net.first.weight.square(), torch.ones(6)]))


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x, w: y * w,
        lambda y, x, w: y / (w + 2),
        lambda y, x, w: y * F.interpolate(w, 8),
        lambda y, x, w: y @ w,
    ],
    ids=["product", "quotient", "resized", "matrix product"],
)
def test_an_input_that_is_a_factor_is_no_feature(function):
    """It may be a mask or a weight."""
    _, row, found = prior(function, torch.rand(4, 1, 8, 8))
    assert found is None and row.sources == ["first"]
    assert row.reason.startswith("fed by the model's input")


def test_a_gate_that_a_layer_computes_from_the_input_is_known():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, y, x):
            return y * self.layer(x).sigmoid()

    assert prior(Gate())[1].wired


def test_integers_and_vectors_are_no_features():
    for other in (torch.ones(4, 3, 8, 8, dtype=torch.long), torch.rand(8)):
        _, row, _ = prior(lambda y, x, other: y + other, other)
        assert row.reason.startswith("fed by the model's input: add")


def test_a_layer_norm_of_the_input_is_still_one_of_its_own():
    """Its belief stays N(β, γ²), also where it multiplies features."""
    weight = torch.tensor([0.5, 2.0, 3.0])
    for function in (lambda y, x: y + F.group_norm(x, 1, weight), lambda y, x: y * F.group_norm(x, 1, weight)):
        assert prior(function)[1].wired
    net, _, found = prior(lambda y, x: y + F.group_norm(x, 1, torch.full((3,), 2.0)))
    torch.testing.assert_close(found.var[0], net.first.weight.square() + 4)


def test_learned_is_as_before():
    report = kalmannorm.wiring(kalmannorm.convert(Stream(), images(), transition="learned"))
    assert [norm.sources for norm in report.norms] == [[], ["norms.0"], ["norms.0", "norms.1"]]
    assert [norm.wired for norm in report.norms] == [False, True, True]
