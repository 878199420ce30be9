"""Hooks, children, arguments and changes after fusing: nobody notices, or what could be noticed stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm._norms.kalman import BatchKalmanNorm2d
from kalmannorm._support.fused_modules import is_fused
from support.fusion_checks import SHAPE, Net, converted, fused_of, shared_relu


def test_hooks_see_what_they_saw():
    for part, to in (("bn", "kalman"), ("relu", "ghost")):
        model, seen = converted(shared_relu, to=to), []
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
    with pytest.raises(ValueError, match=r"fuse: Sequential contains no norm of kalmannorm; convert it first"):
        kalmannorm.fuse(plain, x)
    model = kalmannorm.convert(plain, x, to="ghost")
    with pytest.raises(ValueError, match=r"example_input: Sequential does not run on it: RuntimeError"):
        kalmannorm.fuse(model, x[:, :3])
    with pytest.raises(TypeError, match=r"wrapped by torch\.compile: fuse first"):
        kalmannorm.fuse(torch.compile(model, backend="eager"), x)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        kalmannorm.fuse(x, x)
