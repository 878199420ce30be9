"""Models with several paths: a norm uses the prior of the path that ran, or none, and says so."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kalmannorm

MISSED = r"layer 'out.1', ran, but not the norms that feed it.*more_examples"


def block(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class Experts(nn.Module):
    """One of two experts runs, or both. Then a block that they share."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.a, self.b, self.out = block(3, 4), block(3, 4), block(4, 4)
        self.checkpointed = checkpointed
        with torch.no_grad():  # the prior of b is far from that of a
            self.b[1].weight.fill_(3.0)
            self.b[1].bias.fill_(1.0)

    def forward(self, x, which="a"):
        h = sum(getattr(self, name)(x) for name in which)
        return checkpoint(self.out, h, use_reentrant=False) if self.checkpointed else self.out(h)


class Stem(Experts):
    def __init__(self):
        super().__init__()
        self.stem = block(3, 3)

    def forward(self, x, which="a"):
        return super().forward(self.stem(x), which)


def image():
    return torch.randn(4, 3, 8, 8, dtype=torch.float64)


def trained(model, *args):
    """The output and all gradients of a step."""
    model.zero_grad()
    y = model(*args)
    y.pow(3).sum().backward()
    return [y, *(p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_each_path_has_its_prior(transition, checkpointed):
    net, x = Experts().double(), image()
    options = {"transition": transition, "statistics_batch_size": 2}
    alone = {which: kalmannorm.convert(net, (x, which), **options) for which in ("a", "b", "ab")}
    net.checkpointed = checkpointed
    model = kalmannorm.convert(net, x, more_examples=[(x, "b"), {"x": x, "which": "ab"}], **options)
    assert [n.transition for n in kalmannorm.wiring(model).norms if n.name == "out.1"] == [f"{transition}, 3 paths"]
    for which in ("b", "a", "ab", "b"):
        torch.testing.assert_close(trained(model, x, which), trained(alone[which], x, which))
    copied = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(trained(copied, x, "b"), trained(alone["b"], x, "b"))
    assert not kalmannorm.wiring(model).notes


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_an_unknown_path_uses_the_batch_alone_and_warns_once(transition, checkpointed):
    net, x = Experts().double(), image()
    plain = copy.deepcopy(net)
    net.checkpointed = checkpointed
    model = kalmannorm.convert(net, x, transition=transition)
    with pytest.warns(UserWarning, match=MISSED):
        y = model(x, "b")
    torch.testing.assert_close(y, plain(x, "b"))  # without a prior it is a batch norm
    y.sum().backward()
    model(x, "b")  # a second warning would be an error
    assert kalmannorm.wiring(model).notes == ["'out.1' once ran without 'a.1' and used the batch alone"]
    assert not torch.allclose(model(x), plain(x))


def test_an_exported_inference_of_both_paths():
    x = image().float()
    model = kalmannorm.convert(Experts(), x, more_examples=[(x, "b")], statistics_batch_size=2).eval()
    kalmannorm.set_inference(model, "batch")
    frozen = kalmannorm.freeze_priors(model)
    for which in ("a", "b"):
        torch.testing.assert_close(frozen(x, which), model(x, which))


def test_compiled():
    """A graph knows what ran from the first norm on, which is the same on both paths."""
    net, x = Stem().double(), image()
    model = kalmannorm.convert(net, x, more_examples=[(x, "b")])
    other = copy.deepcopy(model)
    run = torch.compile(model, backend="eager", fullgraph=True)
    for which in ("a", "b"):
        torch.testing.assert_close(trained(run, x, which)[0], trained(other, x, which)[0])
        for name, parameter in other.named_parameters():  # where eager code has no gradient, compiled code may have 0
            torch.testing.assert_close(_grad(model.get_parameter(name)), _grad(parameter))


def _grad(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Loop(nn.Module):
    """A shared norm in a loop. Its first call reads the input of the model."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x, times=5):
        for _ in range(times):
            x = self.norm(self.conv(x)).relu()
        return x


def test_a_shared_norm_in_a_loop():
    x = image()
    model = kalmannorm.convert(Loop().double(), x)
    report = kalmannorm.wiring(model)
    assert report.norms[0].transition == "weights, 4 of 5 calls" and report.norms[0].calls == 5
    model(x).sum().backward()  # that the first call has no prior is no surprise, and warns nobody
    model(x, 3)
    model(x, 7)
    assert model.norm.gain_logit.grad.abs().sum() > 0


def net():
    return nn.Sequential(block(3, 4), block(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double()


def test_a_replaced_convolution_warns_and_a_replaced_classifier_does_not():
    x = image()
    model = kalmannorm.convert(net(), x)
    model[4] = nn.Linear(4, 7).double()
    model(x)
    assert not kalmannorm.wiring(model).notes
    model[1][0] = nn.Conv2d(4, 4, 3, padding=1).double()
    with pytest.warns(UserWarning, match="'1.0' was replaced after conversion, and priors still read the old weights"):
        model(x)
    model(x)  # once
    assert "'1.0' was replaced" in kalmannorm.wiring(model).summary
    kalmannorm.rewire(model, x)
    assert not kalmannorm.wiring(model).notes
    before = model(x)
    with torch.no_grad():
        model[1][0].weight.mul_(2)
    assert not torch.allclose(model(x), before)  # the prior reads the new layer


def test_a_replaced_norm_is_no_longer_waited_for():
    x = image()
    model = kalmannorm.convert(net(), x)
    expected = model(x)
    frozen = nn.BatchNorm2d(4).double()
    model[0][1] = frozen
    torch.testing.assert_close(model(x), expected)
    assert not kalmannorm.wiring(model).notes


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(block(3, 4), block(4, 4), block(4, 4)).double()

    def forward(self, x):
        for each in self.blocks:
            x = each(x) if x.shape[1] == 3 else each(x) + x
        return x


@pytest.mark.parametrize("how", ["deleted", "an identity instead"])
def test_a_removed_norm_warns(how):
    """The prior of the last block also contains the belief about the norm of the block before it."""
    x = image()
    model = kalmannorm.convert(Chain(), x)
    if how == "deleted":
        del model.blocks[1]
    else:
        model.blocks[1] = nn.Identity()
    with pytest.warns(UserWarning, match="'blocks.1.1' was replaced after conversion, and priors still read the old"):
        model(x)
    model(x)  # once
    assert "'blocks.1.1' was replaced" in kalmannorm.wiring(model).summary
    kalmannorm.rewire(model, x)
    model(x)
    assert not kalmannorm.wiring(model).notes
    del model.blocks[-1]  # no prior reads its norm, and warnings are errors
    model(x)
