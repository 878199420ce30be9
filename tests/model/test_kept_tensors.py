"""Models that hold tensors with a graph: pruned weights, weight norm, and results that a forward keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import kalmannorm


def block(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def image():
    return torch.randn(4, 3, 8, 8)


def train(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(image()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_prune_convert_train_remove(transition):
    model = nn.Sequential(block(3, 4), block(4, 4))
    for part in model:
        prune.l1_unstructured(part[0], "weight", 0.5)
    masks = [part[0].weight_mask.clone() for part in model]
    model = kalmannorm.convert(model, image(), transition=transition)
    train(model)
    assert [torch.equal(part[0].weight_mask, mask) for part, mask in zip(model, masks, strict=True)] == [True, True]
    x = image()
    before = model(x)
    for part in model:
        prune.remove(part[0], "weight")
    torch.testing.assert_close(model(x), before)  # the prior is the same
    for part, mask in zip(model, masks, strict=True):
        assert not part[0].weight[mask == 0].any()
    train(model)
    model.eval()
    torch.testing.assert_close(kalmannorm.fold(model, x)(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm():
    model = nn.Sequential(block(3, 4), block(4, 4))
    model[1][0] = nn.utils.weight_norm(model[1][0])
    model(image())
    model = kalmannorm.convert(model, image())
    train(model)
    assert model[1][0].weight_g.grad.abs().sum() > 0
    nn.utils.remove_weight_norm(model[1][0])
    with pytest.raises(RuntimeError, match=r"of a Conv2d that has no 'weight_[gv]' any more; call kalmannorm.rewire"):
        model(image())
    kalmannorm.rewire(model, image())
    train(model)


class Keeps(nn.Module):
    """Keeps results of its forward, in an attribute, a list and a dict."""

    def __init__(self):
        super().__init__()
        self.a, self.b = block(3, 4), block(4, 4)
        self.last, self.heads, self.named = None, [torch.rand(1)], {"first": [torch.rand(1)]}

    def forward(self, x):
        self.last = self.heads[0] = self.a(x)
        self.named["first"][0] = self.named["new"] = self.last
        return self.b(self.last)


@pytest.mark.parametrize("deploy", [kalmannorm.fold, kalmannorm.to_batchnorm, kalmannorm.freeze_priors])
def test_deploying_after_a_training_forward(deploy):
    model, x = kalmannorm.convert(Keeps(), image()), image()
    model(x).sum().backward()
    assert model.heads[0].requires_grad
    deployed = deploy(model).eval()
    assert not deployed.heads[0].requires_grad
    torch.testing.assert_close(deployed(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def test_converting_after_a_forward_and_leaving_no_tensor():
    model = Keeps()
    model(image())
    train(kalmannorm.convert(model, image()))
    model = Keeps()
    before, first = model.heads[0], model.named["first"][0]
    kalmannorm.convert(model, image(), inplace=True)
    assert model.heads[0] is before and model.last is None
    assert model.named["first"][0] is first and list(model.named) == ["first"]


def test_learned_transitions_start_at_a_high_gain():
    gains = {t: kalmannorm.gains(kalmannorm.convert(nn.Sequential(block(3, 4), block(4, 4)), image(), transition=t))
             for t in ("weights", "learned")}  # fmt: skip
    assert gains["weights"]["1.1"] == pytest.approx(0.5) and gains["learned"]["1.1"] == pytest.approx(0.9)
