"""Where fusing could be noticed, nothing is fused, and the report says why; where it cannot, it is."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kalmannorm
from kalmannorm.fused import is_fused
from kalmannorm.norm import BatchKalmanNorm2d

SHAPE = (4, 6, 5, 5)
PARTS = ("conv", "bn", "conv2", "bn2", "relu", "act")


class Net(nn.Module):
    """Two convolutions and norms, used as a function says."""

    def __init__(self, run):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.relu, self.act = nn.ReLU(inplace=True), nn.ReLU6()
        self.scale, self.mask = nn.Parameter(torch.ones(6, 1, 1)), None
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def converted(run, kind=Net, to="kalman"):
    torch.manual_seed(0)
    model = kind(run) if kind is Net else kind()
    return kalmannorm.convert(model.double(), torch.randn(SHAPE).double(), to=to, statistics_batch_size=2)


def results(model, x, training):
    model = copy.deepcopy(model).train(training)
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = model(x * 1)
    out = out if isinstance(out, torch.Tensor) else torch.cat([t.flatten() for t in out])
    learning = [x, *(p for p in model.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), learning, allow_unused=True
    )
    return [out, *(g for g in grads if g is not None), *model.buffers()]


def fused_of(model):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).double()
    fused = kalmannorm.fuse(model, x)
    for training in (True, False):
        for a, b in zip(results(fused, x, training), results(model, x, training), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return fused


def twice(net, x):
    y = net.bn(net.conv(x))
    return F.relu(y) + y


def sum_twice(net, x):
    y = net.bn(net.conv(x)) + x
    return F.relu(y) + y


def doubled(net, x):
    y = net.bn(net.conv(x))
    return F.relu(y + y)


def returned(net, x):
    y = net.bn(net.conv(x))
    return F.relu(y), y


def into_another(net, x):
    z = net.conv2(x) * 2
    z += net.bn(net.conv(x))
    return F.relu(z)


def into_a_view(net, x):
    y = net.conv2(x)
    part = y[:]
    part += net.bn(net.conv(x))
    return F.relu(part) + y


def written_between(net, x):
    z = net.conv2(x)
    y = net.bn(net.conv(x))
    z.mul_(2)
    return F.relu(y + z)


def activated_between(net, x):
    z = net.conv2(x)
    y = net.bn(net.conv(x))
    net.relu(z)
    return F.relu(y + z)


def after(net, x):
    y = net.bn(net.conv(x))
    return F.relu(y + net.conv2(x))


def weighted(net, x):
    return F.relu(torch.add(net.bn(net.conv(x)), x, alpha=2))


def broadcast(net, x):
    scale = net.scale * 2
    return F.relu(net.bn(net.conv(x)) + scale)


def grown(net, x):
    return F.relu(net.bn(net.conv(x[:, :, :1])) + x)


def number(net, x):
    return F.relu(net.bn(net.conv(x)) + 1)


def without_graph(net, x):
    with torch.no_grad():
        y = F.relu(net.bn(net.conv(x)))
    return y + net.conv2(x)


def under_autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.relu(net.bn(net.conv(x))).double()


def checkpointed(net, x):
    return checkpoint(lambda x: F.relu(net.bn(net.conv(x))), x, use_reentrant=False)


def made_inside(net, x):
    return F.relu(net.bn(net.conv(x))) * torch.linspace(0, 1, 5).double()


def by_chance(net, x):
    y = net.bn(net.conv(x))
    return F.relu(y) if random.random() < 2 else y


def assigned(net, x):
    net.mask = x
    return F.relu(net.bn(net.conv(x)))


def by_value(net, x):
    return F.relu(net.bn(net.conv(x))) if x.mean() > -9 else x


def deceitful(net, x):
    """Does something else when it is traced, which only the numbers can show."""
    return F.relu(net.bn(net.conv(x))) * (2 if isinstance(x, torch.Tensor) else 1)


def deceitful_in_training(net, x):
    return F.relu(net.bn(net.conv(x))) * (2 if isinstance(x, torch.Tensor) and net.training else 1)


LEFT = {
    twice: "used more than once",
    sum_twice: "used more than once",
    doubled: "used more than once",
    returned: "used more than once",
    into_another: "in place to something else",
    into_a_view: "in place to something else",
    written_between: "written to between",
    activated_between: "written to between",
    after: "computed after it",
    weighted: "followed by add",
    broadcast: "another shape or dtype",
    grown: "another shape or dtype",
    number: "followed by add",
    without_graph: "another grad mode",
    under_autocast: "another grad mode, autocast",
    checkpointed: "checkpoint",
    made_inside: "makes a tensor",
    by_chance: "random numbers",
    assigned: "assigns attributes",
    by_value: "cannot be traced",
    deceitful: "other numbers",
    deceitful_in_training: "in training would be other numbers",
    lambda net, x: net.act(net.bn(net.conv(x))): "followed by ReLU6",
    lambda net, x: F.gelu(net.bn(net.conv(x))): "followed by gelu",
    lambda net, x: net.bn(net.conv(x)).relu6(): "cannot be traced" if hasattr(torch.Tensor, "relu6") else "",
}
LEFT = {run: reason for run, reason in LEFT.items() if reason}


@pytest.mark.parametrize("run", LEFT, ids=lambda run: run.__name__)
def test_left_alone(run):
    fused = fused_of(converted(run))
    assert "bn" not in fused.fusion.fused
    assert LEFT[run] in fused.fusion.left["bn"]
    assert fused.fusion.left["bn2"] == "it did not run on the example input" or run is None
    assert not any(is_fused(module) for module in fused.modules())


def both_ways(net, x):
    """The same norm at two places, one with a ReLU."""
    return F.relu(net.bn(net.conv(x))) + net.bn(net.conv2(x))


def shared_relu(net, x):
    x = net.relu(net.bn(net.conv(x)))
    return net.relu(net.bn2(net.conv2(x)) + x)


def in_place_of_a_norm(net, x):
    y = net.bn(net.conv(x))
    y += net.bn2(net.conv2(x))
    return torch.relu_(y)


def chained(net, x):
    x = net.bn(net.conv(x)).relu_()
    return x.add(net.bn2(net.conv2(x))).relu()


def in_steps(net, x):
    y = F.dropout(F.relu(net.bn(net.conv(x)), inplace=True), 0.5, net.training)
    return F.relu(torch.add(y, net.bn2(net.conv2(y))))


FUSED = {
    both_ways: {"bn": "ReLU"},
    shared_relu: {"bn": "ReLU", "bn2": "sum and ReLU"},
    in_place_of_a_norm: {"bn2": "sum and ReLU"},
    chained: {"bn": "ReLU", "bn2": "sum and ReLU"},
    in_steps: {"bn": "ReLU", "bn2": "sum and ReLU"},
}


@pytest.mark.parametrize("run", FUSED, ids=lambda run: run.__name__)
@pytest.mark.parametrize("to", ["kalman", "ghost", "renorm"])
def test_fused(run, to):
    assert fused_of(converted(run, to=to)).fusion.fused == FUSED[run]


def test_hooks_see_what_they_saw():
    for part in ("bn", "relu"):
        model, seen = converted(shared_relu), []
        getattr(model, part).register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.clone()))
        fused = fused_of(model)
        assert "hook" in fused.fusion.left["bn"]
        x = torch.randn(SHAPE).double()
        seen.clear()
        model(x)
        before = list(seen)
        seen.clear()
        fused(x)
        assert len(seen) == len(before) > 0
        torch.testing.assert_close(seen, before)


class Shortcut(nn.Module):
    """A norm at the end of a child is added to."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.down = nn.Sequential(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)), nn.Identity())

    def forward(self, x, again=None, *, shift=0):
        y = self.main(x)
        y += self.down(x)
        return F.relu(y) if again is None else again


def test_a_child_that_ends_in_a_norm():
    assert fused_of(converted(None, Shortcut)).fusion.fused == {"down.0.1": "sum and ReLU"}


def test_a_hook_on_the_child_keeps_it_whole():
    model, seen = converted(None, Shortcut), []
    model.down.register_forward_hook(lambda *_: seen.append(1))
    assert fused_of(model).fusion.fused == {} and seen


class Moody(nn.Module):
    """Its child asks for its own mode, which may be another than that of the module around it."""

    def __init__(self):
        super().__init__()
        self.child = Net(lambda net, x: net.bn(net.conv(F.dropout(x, 0.5, net.training))))

    def forward(self, x):
        return F.relu(self.child(x))


def test_a_child_that_asks_for_its_mode_stays_whole():
    fused = fused_of(converted(None, Moody))
    assert fused.fusion.fused == {} and fused.fusion.left["child.bn"] == "followed by the end of its forward"


def test_arguments_that_the_example_did_not_give():
    fused = fused_of(converted(None, Shortcut))
    x, other = torch.randn(2, *SHAPE).double()
    assert fused(x, other) is other and fused(x=x, again=other) is other
    torch.testing.assert_close(fused(x=x, shift=0), fused(x))


def test_changed_modules_run_unfused():
    x = torch.randn(SHAPE).double()
    fused = fused_of(converted(shared_relu))
    fused.mask, fused.training, fused.another = None, True, 3  # what it was, and what no forward has read
    assert is_fused(fused)
    with pytest.warns(UserWarning, match="'relu' of a fused Net was changed"):
        fused.relu = nn.ReLU6()
    assert not is_fused(fused) and float(fused(100 * x).detach().max()) <= 6
    for change in (lambda s: s.append(nn.Flatten()), lambda s: s.insert(0, nn.Flatten(0, 0)), lambda s: s.pop(2)):
        model = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU()).double()
        fused = kalmannorm.fuse(kalmannorm.convert(model, x, to="ghost"), x).eval()
        assert is_fused(fused)
        assert type(fused[:2]) is nn.Sequential and len(fused[:2](x)) == len(x)
        own = kalmannorm.convert(model, x, to="ghost").eval()
        change(own)
        with pytest.warns(UserWarning, match="call kalmannorm.fuse again"):
            change(fused)
        torch.testing.assert_close(fused(x), own(x))


def test_a_norm_with_its_own_forward_is_left():
    class Loud(BatchKalmanNorm2d):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(nn.Conv2d(6, 6, 1), Loud(6), nn.ReLU()).double()
    assert "a forward of its own" in fused_of(model).fusion.left["1"]


def test_a_norm_given_previous_by_hand_is_left():
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = BatchKalmanNorm2d(6), BatchKalmanNorm2d(6, 6)

        def forward(self, x):
            y, posterior = self.one(x, return_posterior=True)
            return F.relu(self.two(F.relu(y), posterior))

    assert fused_of(ByHand().double()).fusion.left == dict.fromkeys(("one", "two"), "it is called with more than x")


def test_mistakes_are_named():
    x = torch.randn(SHAPE)
    plain = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU())
    with pytest.raises(ValueError, match=r"fuse: Sequential holds no norm of kalmannorm; convert it first"):
        kalmannorm.fuse(plain, x)
    model = kalmannorm.convert(plain, x, to="ghost")
    with pytest.raises(ValueError, match=r"example_input: Sequential does not run on it: RuntimeError"):
        kalmannorm.fuse(model, x[:, :3])
    with pytest.raises(TypeError, match=r"wrapped by torch\.compile: fuse first"):
        kalmannorm.fuse(torch.compile(model, backend="eager"), x)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        kalmannorm.fuse(x, x)
