"""Models that hold tensors with a graph: pruned weights, weight norm, and results that a forward keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import kalmannorm
from support.converted_net import NON_LEAF
from support.wide import narrow


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


def hooked(model, how):
    """Let a hook of torch compute weights of a converted model: of two convolutions, and of a norm."""
    for part in model:
        if how == "prune":
            prune.l1_unstructured(part[0], "weight", 0.5)
        elif how == "prune twice":
            prune.l1_unstructured(part[0], "weight", 0.3)
            prune.random_structured(part[0], "weight", 1, dim=0)
        elif how == "prune a norm":
            prune.l1_unstructured(part[1], "weight", 0.5)
        elif how == "weight norm":
            nn.utils.weight_norm(part[0])


HOW = ["prune", "prune twice", "prune a norm", "weight norm"]
CASES = [*HOW, *[f"{how}, compiled" for how in HOW]]


@NON_LEAF
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("case", narrow(CASES, kept=CASES[:5]))
def test_convert_prune_train(case):
    """Priors read the weights of this step, as after `rewire`. The attribute is still that of the last one."""
    how, _, compiled = case.partition(", ")
    torch.manual_seed(0)
    model = nn.Sequential(block(3, 4), block(4, 4), block(4, 4)).double()
    model = kalmannorm.convert(model, image().double(), statistics_batch_size=2)
    results = []
    for rewired in (False, True):
        twin = copy.deepcopy(model)
        torch.manual_seed(1)
        hooked(twin, how)
        if rewired:
            kalmannorm.rewire(twin, image().double())
        torch.manual_seed(2)
        run = torch.compile(twin, backend="aot_eager") if compiled else twin
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(run(image().double()).square().mean())
            losses[-1].backward()
            optimizer.step()
        results.append([losses, [p.grad for p in twin.parameters()], list(twin.buffers())])
    torch.testing.assert_close(results[0], results[1])


def test_convert_prune_remove_and_copy():
    model = kalmannorm.convert(nn.Sequential(block(3, 4), block(4, 4)), image(), statistics_batch_size=2)
    for part in model:
        prune.l1_unstructured(part[0], "weight", 0.5)
    train(model)
    x = image()
    kalmannorm.set_inference(model.eval(), "batch")
    with torch.no_grad():
        y = model(x)
        torch.testing.assert_close(copy.deepcopy(model)(x), y)  # torch copies no weight that has a graph
    other = kalmannorm.convert(nn.Sequential(block(3, 4), block(4, 4)), image(), statistics_batch_size=2)
    for part in other:
        prune.identity(part[0], "weight")
    other.load_state_dict(model.state_dict())
    kalmannorm.set_inference(other.eval(), "batch")
    torch.testing.assert_close(other(x), y)
    kalmannorm.set_inference(model, "population")
    with pytest.raises(ValueError, match=r"the weights of 2 layers are computed.*prune\.remove"):
        kalmannorm.fold(model, x)
    prune.remove(model[0][0], "weight")
    folded = kalmannorm.fold(model, x)  # the other norm stays
    assert sum(isinstance(module, nn.BatchNorm2d) for module in folded.modules()) == 1
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    prune.remove(model[1][0], "weight")
    kalmannorm.set_inference(model, "batch")
    torch.testing.assert_close(model(x), y)
    kalmannorm.set_inference(model, "population")
    folded = kalmannorm.fold(model, x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    train(model.train())


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


def test_convert_with_standardized_filters_and_prune():
    """Priors read the filter of the masked weight of this step, and pruning can be made permanent."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)]
    x = torch.randn(4, 3, 8, 8)
    model = kalmannorm.convert(nn.Sequential(*layers), x, statistics_batch_size=2, weight_standardization=True)
    convolutions = model[0], model[3]
    for each in convolutions:
        prune.l1_unstructured(each, "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(3).mean().backward()
        optimizer.step()
    with torch.no_grad():
        masked = model(x)  # its priors read the weights after the last step
        for each in convolutions:
            prune.remove(each, "weight")
        torch.testing.assert_close(model(x), masked)
