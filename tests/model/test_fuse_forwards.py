"""Which forwards are fused and which are left, with the reason: by what they do with a norm's result."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kalmannorm._support.fused_modules import is_fused
from support.fusion_checks import converted, fused_of, shared_relu


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
    into_another: "in place to another tensor",
    into_a_view: "in place to another tensor",
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
    made_inside: "creates a tensor",
    by_chance: "random numbers",
    assigned: "assigns attributes",
    by_value: "cannot be traced",
    deceitful: "would differ",
    deceitful_in_training: "in training would differ",
    lambda net, x: net.act(net.bn(net.conv(x))): "followed by ReLU6",
    lambda net, x: F.gelu(net.bn(net.conv(x))): "followed by gelu",
    lambda net, x: net.bn(net.conv(x)).relu6(): "cannot be traced" if hasattr(torch.Tensor, "relu6") else "",
}
LEFT = {run: reason for run, reason in LEFT.items() if reason}


@pytest.mark.parametrize("run", LEFT, ids=lambda run: run.__name__)
def test_left_alone(run):
    fused = fused_of(converted(run, to="ghost"))  # the reasons lie in the forward, not in the norm
    assert "bn" not in fused.fusion.fused
    assert LEFT[run] in fused.fusion.left["bn"]
    assert fused.fusion.left["bn2"] == "it did not run on the example input"
    assert not any(is_fused(module) for module in fused.modules())


def both_ways(net, x):
    """The same norm at two places, one with a ReLU."""
    return F.relu(net.bn(net.conv(x))) + net.bn(net.conv2(x))


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
