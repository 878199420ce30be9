"""Ghost norms of a converted model take the short way too. It equals the long way, with this machine's operations."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from kalmannorm import convert, fuse, rewire, to_batchnorm
from kalmannorm._ops.dispatch import row_kernels_for
from kalmannorm._ops.normalize.aten_rows import AtenRows
from kalmannorm._ops.plain import without_kernels
from kalmannorm._running.prior_bundles import PriorBundles
from support import short_way_cases
from support.converted_net import image, net, state
from support.converted_net import step as step_of_net
from support.short_way import count_short, the_long_way
from support.short_way_cases import *  # noqa: F403
from support.short_way_cases import Small, assert_same, converted, own_step, small, step


@pytest.fixture(autouse=True)
def _ghost(monkeypatch):
    monkeypatch.setattr(short_way_cases, "OPTIONS", {"to": "ghost"})


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("size", [None, 1, 3], ids=lambda size: f"m{size}")
def test_without_an_example(size, momentum, monkeypatch):
    """Whole batches as groups, groups of one example, and groups that do not divide the batch."""
    model = convert(Small(), to="ghost", statistics_batch_size=size, momentum=momentum)
    x = torch.randn(4, 2, 5, 5)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 3
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_fused(monkeypatch):
    model = fuse(net("ghost"), image())
    twin = copy.deepcopy(model)
    taken = count_short(monkeypatch)
    found = step_of_net(model)
    assert len(taken) == 2 * 7
    for one, other in zip(found, the_long_way(monkeypatch, step_of_net, twin), strict=True):
        assert_same(one, other)


def test_parts_of_the_model(monkeypatch):
    """A child that is called by itself takes the short way with its own norms."""
    model = net("ghost")
    x = torch.randn(4, 6, 5, 5)
    taken = count_short(monkeypatch)
    found = own_step(copy.deepcopy(model).block2, x)
    assert len(taken) == 2
    assert_same(found, the_long_way(monkeypatch, own_step, copy.deepcopy(model).block2, x))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies(copied, monkeypatch):
    """Before and after a forward. A copy has a relay of its own."""
    model, x = small()
    expected = step(model, x)
    for _ in range(2):
        twin = copied(model)
        assert twin.norm0.wire.relay is twin.norm2.wire.relay is not model.norm0.wire.relay
        taken = count_short(monkeypatch)
        assert_same(own_step(twin, x), expected)
        assert len(taken) == 3
        with torch.no_grad():
            model.eval()(x)
            model.train()


def test_a_shallow_copy_in_the_same_model_is_a_norm_of_its_own(monkeypatch):
    """Code that takes modules apart makes shallow copies, and gives them other parameters."""
    model, x = small()
    norm, other = model.norm0, copy.copy(model.norm0)
    assert type(other) is type(norm) and other.weight is norm.weight and norm.wire is not None
    other._parameters, other._buffers = dict(norm._parameters), {n: b.clone() for n, b in norm._buffers.items()}
    other.weight = nn.Parameter(torch.full_like(norm.weight, 3))
    model.norm1 = other
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 2  # not the copy
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_a_copy_of_a_part_has_nothing_of_the_rest():
    model = net("ghost")
    model(image())
    own, file = sum(p.numel() for p in model.block1.parameters()), io.BytesIO()
    torch.save(model.block1, file)
    alone = io.BytesIO()
    torch.save(convert(nn.Sequential(copy.deepcopy(to_batchnorm(model).block1)), to="ghost")[0], alone)
    assert own > 500 and file.tell() < 1.1 * alone.tell()


def test_inference_computes_no_bundle(monkeypatch):
    model, x = small()
    monkeypatch.setattr(PriorBundles, "fill", lambda *_: pytest.fail("a bundle was computed"))
    model.eval()(x)


def test_norms_without_parameters(monkeypatch):
    class Plain(Small):
        def __init__(self):
            super().__init__()
            for name, norm in list(self.named_children()):
                if isinstance(norm, nn.BatchNorm2d):
                    setattr(self, name, nn.BatchNorm2d(norm.num_features, affine=False))

    model, x = converted(Plain(), (4, 2, 5, 5)), torch.randn(4, 2, 5, 5)
    assert_same(step(model, x), the_long_way(monkeypatch, step, model, x))


class Heads(nn.Module):
    """Two heads on one input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)) for _ in range(2))

    def forward(self, x):
        return self.one(x), self.two(x)


def test_an_optimizer_between_the_backwards_of_two_heads(monkeypatch):
    """The second head's gradients depend on nothing that the optimizer of the first one changed."""
    model, x = converted(Heads(), (4, 2, 5, 5)), torch.randn(4, 2, 5, 5)

    def train(model):
        one, two = model(x)
        one.square().sum().backward()
        torch.optim.SGD(model.one.parameters(), 0.1).step()
        two.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    twin = copy.deepcopy(model)
    taken = count_short(monkeypatch)
    found = train(model)
    assert len(taken) == 2
    assert_same(found, the_long_way(monkeypatch, train, twin))


def test_beside_kalman_norms(monkeypatch):
    """`rewire` connects the Kalman norms of a model again, and leaves its ghost norms connected."""
    x = torch.randn(4, 2, 5, 5)
    model = nn.Sequential(convert(Small(), x, statistics_batch_size=2), convert(Small(), to="ghost"))
    model[1].conv0 = nn.Conv2d(8, 4, 1)
    rewire(model, x)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 6
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_back_to_batchnorm():
    model = net("ghost")
    plain = to_batchnorm(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in plain.modules())
    assert not any("wire" in vars(module) for module in plain.modules())
    torch.testing.assert_close(plain.eval()(image()), model.eval()(image()))


def test_nothing_is_left_behind():
    model = net("ghost")
    step_of_net(model)
    left = state(model)
    assert left.memo is None and left.short is None and left.depth == 0 and not left.posteriors


def test_what_was_prepared_without_kernels_is_not_used_with_them():
    """`fuse` runs the model without kernels, to look at it."""
    model, x = convert(Small(), to="ghost"), torch.randn(4, 2, 5, 5)  # on a GPU it is long without kernels
    with torch.no_grad(), without_kernels():
        model(x)
    own_step(model, x)
    (bundles,) = model.norm1.wire.relay.bundles.values()
    prepared = bundles.parts[0].short.places[1].kernels
    assert {key[5]: kernels.__class__ for key, kernels in prepared.items()} == {
        True: AtenRows, False: row_kernels_for(x, 2)
    }  # fmt: skip
