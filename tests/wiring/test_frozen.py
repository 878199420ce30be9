"""Frozen batch norms are sources: the norms behind them get a prior from their γ and β."""

import copy

import pytest
import torch
from timm.layers.norm_act import FrozenBatchNormAct2d
from torch import nn
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

import kalmannorm
from kalmannorm import moments


class Functional(nn.Module):
    """A batch norm that was left in eval, of a class that is not a BatchNorm."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


def batch_norm_in_detr(channels):
    """As in the code of DETR: no attribute `eps`."""

    class FrozenBatchNorm2d(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                self.register_buffer(name, torch.full((channels,), value))

        def forward(self, x):
            names = ("weight", "bias", "running_mean", "running_var")
            w, b, mean, var = (getattr(self, name).view(1, -1, 1, 1) for name in names)
            scale = w * (var + 1e-5).rsqrt()
            return x * scale + (b - mean * scale)

    return FrozenBatchNorm2d()


class Net(nn.Module):
    """A frozen stem, as in a detector, and a head with its own norm."""

    def __init__(self, frozen, act=F.relu):
        super().__init__()
        self.stem, self.frozen, self.act = nn.Conv2d(3, 8, 3), frozen, act
        self.layer, self.norm = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        with torch.no_grad():
            for name, tensor in (*frozen.named_parameters(), *frozen.named_buffers()):
                if name != "num_batches_tracked":
                    tensor.uniform_(0.5, 1.5)

    def forward(self, x):
        return self.norm(self.layer(self.act(self.frozen(self.stem(x)))))


FROZEN = {
    "torchvision": lambda: Net(FrozenBatchNorm2d(8)),
    "timm": lambda: Net(FrozenBatchNormAct2d(8), act=nn.Identity()),
    "detr": lambda: Net(batch_norm_in_detr(8)),
    "functional": lambda: Net(Functional(8)),
}
x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", FROZEN)
def test_a_norm_behind_a_frozen_norm_has_a_prior(kind):
    net = FROZEN[kind]()
    converted = kalmannorm.convert(net, x)
    row = kalmannorm.wiring(converted).norms[0]
    assert row.wired and row.sources == [] and "batch_norm" in row.path
    believed = moments.relu(moments.belief(net.frozen.weight, net.frozen.bias))
    expected = moments.convolution(believed, net.layer.weight, net.layer.bias)
    prior = converted.norm.wire.previous(0, x)
    torch.testing.assert_close(prior.mean, expected.mean)
    torch.testing.assert_close(prior.var, expected.var)


@pytest.mark.parametrize("kind", FROZEN)
def test_the_frozen_norm_stays_as_it_is(kind):
    net = FROZEN[kind]().eval()
    before = copy.deepcopy(net.frozen.state_dict())
    converted = kalmannorm.convert(net, x).eval()
    assert type(converted.frozen) is type(net.frozen) and "forward" not in vars(converted.frozen)
    assert all(torch.equal(value, converted.frozen.state_dict()[name]) for name, value in before.items())
    torch.testing.assert_close(converted(x), net(x))


def test_a_frozen_norm_in_half_precision():
    net = Net(FrozenBatchNorm2d(8)).bfloat16()
    net.frozen.float()
    assert kalmannorm.wiring(kalmannorm.convert(net, x.bfloat16())).norms[0].wired


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_norms_before_a_frozen_norm_stay_sources_of_their_channels(transition):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.frozen = FrozenBatchNorm2d(6)

        def forward(self, x):
            return self.c(self.frozen(torch.cat([self.a(x), self.b(x)], 1))[:, 3:])

    converted = kalmannorm.convert(Parts(), x, transition=transition)
    row = kalmannorm.wiring(converted).norms[2]
    assert row.sources == ["b"] and row.wired


def test_a_class_that_only_has_the_name_is_recorded_as_it_is():
    class FrozenBatchNormOfMine(FrozenBatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.gate = nn.Conv2d(channels, channels, 1)

        def forward(self, x):
            return super().forward(x) * self.gate(x).sigmoid()

    report = kalmannorm.wiring(kalmannorm.convert(Net(FrozenBatchNormOfMine(8)), x))
    assert not report.norms[0].wired


def test_a_model_with_frozen_norms_only_is_refused_by_their_names():
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), FrozenBatchNorm2d(3)) for _ in range(5)))
    with pytest.raises(ValueError, match=r"FrozenBatchNorm2d: '0.1', '1.1', '2.1', … 5 in all"):
        kalmannorm.convert(net, x)
