"""A deleted model frees its memory at once: no cycle of references waits for the garbage collector."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch._dynamo  # which checkpointing imports, and whose import keeps the frames it is called from
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kalmannorm import convert, fold, freeze_priors, fuse, rewire, set_inference, to_batchnorm, wiring


class Block(nn.Module):
    """Two norms, a sum, and a convolution whose weight is the block's own."""

    def __init__(self, width=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 3, 3) * 0.1)
        self.norm1, self.conv2, self.norm2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)

    def forward(self, x):
        y = F.relu(self.norm1(F.conv2d(x, self.weight, padding=1)))
        return F.relu(self.norm2(self.conv2(y)) + x)


class Net(nn.Module):
    """A block runs twice, and the model itself owns a weight: priors read modules that hold the norms they are for."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.rand(6, 1, 1))
        self.head = nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        x = self.stem(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) * self.scale
        return self.head(x)


X = torch.randn(4, 3, 8, 8)


def trained(model):
    model(X).square().mean().backward()
    return model


def by_parts(model):
    with warnings.catch_warnings():  # the blocks are not called
        warnings.simplefilter("ignore")
        model.head(torch.zeros(4, 6, 6, 6) * model.stem(X).mean()).sum().backward()
    return model


def checkpointed(model):
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    return model


def inferred(model):
    set_inference(model.eval(), "example")
    model(X)
    return model


def failed(model):
    with pytest.raises(RuntimeError):
        model(X[:, :2])
    return model


def rewired(model):
    rewire(model, X[..., :7])
    return model


def fused(model):
    fuse(model, X, inplace=True)
    return trained(model)


USES = {
    "converted": lambda model: model,
    "trained": trained,
    "called by parts": by_parts,
    "checkpointed": checkpointed,
    "in example inference": inferred,
    "after a forward that failed": failed,
    "rewired": lambda model: trained(rewired(trained(model))),
    "fused": fused,
    "copied": lambda model: trained(copy.deepcopy(trained(model))),
    "pickled": lambda model: trained(pickle.loads(pickle.dumps(trained(model)))),
    "frozen": lambda model: inferred(freeze_priors(trained(model))),
    "folded": lambda model: fold(trained(model).eval()),
    "back to batch norm": lambda model: trained(to_batchnorm(trained(model))),
    "fused and copied": lambda model: trained(copy.deepcopy(fused(model))),
}


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def freed(model):
    """Weak references to all parameters and buffers."""
    return [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("transition", ["weights", "learned"])
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_deleted_models_free_their_parameters_at_once(use, transition, without_collector):
    source = convert(Net(), X, statistics_batch_size=2, transition=transition)
    model = use(source)
    references = freed(model) + freed(source)
    del model, source
    assert not any(reference() is not None for reference in references)


def test_baselines_too(without_collector):
    references = []
    for to in ("ghost", "renorm", "group"):
        model = trained(convert(Net(), to=to))
        references += freed(model)
        del model
    assert not any(reference() is not None for reference in references)


@pytest.mark.parametrize("taken", [lambda part: part, copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_part_keeps_the_layers_that_its_priors_read(taken):
    """It outlives its model."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), nn.BatchNorm2d(4),
    )  # fmt: skip
    model = convert(model, X, statistics_batch_size=2)
    tail, x = model[6], torch.randn(4, 6, 4, 4)
    expected = tail(x)
    tail = taken(tail)
    del model
    torch.testing.assert_close(tail(x), expected)
    assert wiring(tail).norms[0].sources == ["4"]


def alone(part, *given):
    """What a part gives by itself; other norms that feed it do not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return part(*given)


PARTS = {
    "head": lambda model: model.head,
    "copied head": lambda model: copy.deepcopy(model.head),
    "pickled head": lambda model: pickle.loads(pickle.dumps(model.head)),
    "all that runs last": lambda model: nn.Sequential(model.blocks[1], model.head),
    "a block's own norm": lambda model: model.blocks[1].norm1,
}


@pytest.mark.parametrize("take", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_a_part_reads_what_it_read_when_its_model_is_gone(transition, take):
    """Also a parameter of the model itself, or of a block that holds the norm."""
    torch.manual_seed(0)
    model = convert(Net(), X, transition=transition, statistics_batch_size=2)
    x = torch.randn(4, 6, 6, 6)
    expected = alone(take(model), x).detach()
    part = take(model)
    del model
    torch.testing.assert_close(alone(part, x).detach(), expected)
    part.double()
    assert alone(part, x.double()).dtype == torch.float64


def test_a_replaced_layer_leaves_the_other_priors_bundled():
    torch.manual_seed(0)
    model = convert(Net(), X, statistics_batch_size=2)
    for late in (False, True):  # replaced before the first forward, and after one
        if late:
            model.head = nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU())
        else:
            model.head[1] = nn.Identity()
        model(X)
        (together,) = model.stem[1].wire.relay.bundles.values()
        assert together.parts
