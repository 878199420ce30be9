"""What the trace may take for a constant, what it sees of writes, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import io
import sys
from collections import UserDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kalmannorm import convert, wiring
from support.listening import given

TRANSITIONS = ("weights", "learned")
GLOBAL = torch.rand(1, 8, 1, 1)


class Between(nn.Module):
    """Two norms with a function of the first one's output between."""

    def __init__(self, function, width=8):
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.function = function
        self.second, self.bn2 = nn.Conv2d(width, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.bn2(self.second(self.function(self.bn1(self.first(x)))))


def example():
    return torch.randn(4, 3, 6, 6)


def row(model, name="bn2"):
    return next(norm for norm in wiring(model).norms if norm.name == name)


def wired(function, width=8, transition="weights"):
    model = convert(Between(function, width), example(), transition=transition)
    model(example()).sum().backward()
    return row(model)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Silu(nn.Module):
    def forward(self, x):
        return scripted(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.from_numpy(y.detach().numpy() * 2),
        lambda y: torch.as_tensor(y.detach().numpy() * 2),
        lambda y: torch.vmap(torch.relu)(y),
        lambda y: y * torch.tensor(y.max().item()),
        lambda y: y * torch.full((1,), float(y.detach().max())),
        lambda y: y * torch.zeros(1).fill_(y.max().item()),
        lambda y: y * torch.tensor(y.amax((0, 2, 3)).tolist()).view(1, 8, 1, 1),
    ],
    ids=["from_numpy", "as_tensor", "vmap", "item", "full", "fill_", "tolist"],
)
def test_data_that_passes_unseen_is_no_constant(function):
    reason = wired(function).reason
    assert reason is not None
    assert "cannot record" in reason or "numbers that may depend on the data" in reason


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_scripted_function_is_one_operation(transition):
    found = wired(lambda y: scripted(y), transition=transition)
    assert found.sources == ["bn1"]
    assert transition == "learned" or "scripted" in found.reason


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_scripted_module_is_one_operation(transition):
    found = wired(torch.jit.script(Silu()), transition=transition)
    assert found.sources == ["bn1"]


def test_a_scripted_module_is_left_as_it_was():
    part = torch.jit.script(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))
    model = convert(Between(part), example(), inplace=True)
    assert model.function is part
    assert part.training
    assert torch.equal(getattr(part, "1").running_mean, torch.zeros(8))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y * GLOBAL,
        lambda y: y + torch.arange(8.0).view(1, 8, 1, 1),
        lambda y: y * torch.tensor(2.0),
        lambda y: y if y.mean() > 100 else y * torch.tensor(2.0),
    ],
    ids=["global", "arange", "tensor", "control flow"],
)
def test_constants_of_the_code_are_constants(function, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", GLOBAL.clone())  # made since objects were frozen
    assert wired(function).reason is None


def test_a_tensor_attribute_is_a_constant():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = {"a": [torch.rand(1, 8, 1, 1)]}

        def forward(self, y):
            return y * self.scales["a"][0]

    assert wired(Scaled()).reason is None


class Bag:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class FromBag(Between):
    def forward(self, bag):
        return super().forward(bag.x if isinstance(bag, Bag) else bag["x"])


@pytest.mark.parametrize("container", [Bag, lambda x: UserDict(x=x)], ids=["slots", "UserDict"])
def test_inputs_are_found_in_any_container(container):
    model = convert(FromBag(torch.relu), container(example()))
    assert row(model, "bn1").reason == "no norm before it"
    assert row(model).sources == ["bn1"]
    assert row(model).reason is None


def test_an_input_without_a_tensor_is_refused():
    with pytest.raises(ValueError, match="no tensor found in a ndarray"):
        convert(Between(torch.relu), np.zeros((2, 3, 4, 4)))


def test_constants_are_those_of_their_moment():
    def function(y):
        scale = torch.ones(1, 8, 1, 1)
        y = y * scale
        scale.fill_(1000.0)
        return y

    model = convert(Between(function), example())
    seen = given(model, "bn2")
    model(example())
    assert seen[0].var.max() < 100


def view_before_write(y):
    view = y.view(y.shape[0], -1)
    y.relu_()
    return view.view(y.shape)


def relu_on_slice(y):
    F.relu(y[:, :4], inplace=True)
    return y


def module_on_slice(y):
    nn.ReLU(inplace=True)(y.narrow(1, 4, 4))
    return y


def permuted_before_fill(y):
    out = torch.zeros_like(y)
    view = out.permute(0, 1, 3, 2)
    out[:] = y
    return view


@pytest.mark.parametrize("function", [view_before_write, relu_on_slice, module_on_slice, permuted_before_fill])
def test_writes_through_a_view_are_seen(function):
    found = wired(function)
    assert found.sources == ["bn1"]
    assert "a write through a view" in found.reason


def data_written(y):
    y.data.mul_(3)
    return y


def data_replaced(y):
    y.data = y.data * 3
    return y


def written_by_out(y):
    torch.mul(y, 3, out=y)
    return y


@pytest.mark.parametrize("function", [data_written, data_replaced, written_by_out])
def test_writes_of_a_whole_tensor_are_followed(function):
    torch.manual_seed(0)
    variances = []
    for step in (function, lambda y: y * 3):
        torch.manual_seed(0)
        model = convert(Between(step), example())
        assert row(model).sources == ["bn1"]
        seen = given(model, "bn2")
        with torch.no_grad():
            model(example())
        variances.append(seen[0].var)
    torch.testing.assert_close(*variances)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_a_chunk_that_is_written_leaves_the_others_alone(axis):
    def function(y):
        half = y.shape[axis] // 2
        a, b = y.narrow(axis, 0, half), y.narrow(axis, half, half)
        return torch.cat([F.relu(a, inplace=True), b], axis)

    assert wired(function).reason is None


@pytest.mark.parametrize("attribute", ["T", "mT", "data"])
def test_weights_read_through_a_getter_are_copied_and_saved(attribute):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.linear, self.bn2 = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return self.bn2(F.linear(self.bn1(x), getattr(self.linear.weight, attribute)))

    x = torch.randn(4, 8)
    model = convert(Net(), x)
    assert row(model).reason is None
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    torch.save(model.state_dict(), io.BytesIO())
    torch.optim.swa_utils.AveragedModel(model)(x)


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize(
    ("function", "width"),
    [
        (lambda y: torch.cat(dim=1, tensors=[y, y]), 16),
        (lambda y: torch.permute(dims=(0, 1, 3, 2), input=y), 8),
        (lambda y: torch.cat([torch.empty(0), y], 1), 8),
        (lambda y: torch.mean(y, axis=(2, 3), keepdims=True), 8),
    ],
    ids=["cat", "permute", "empty", "keepdims"],
)
def test_arguments_may_be_given_by_name_in_any_order(transition, function, width):
    found = wired(function, width, transition)
    assert found.sources == ["bn1"]
    assert found.reason is None


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize(
    "function",
    [lambda y: torch.max(y, torch.zeros(1)), lambda y: torch.max(y, y), lambda y: y / y.norm(dim=1, keepdim=True)],
    ids=["max", "max of two", "norm"],
)
def test_calls_without_a_rule_stop_nothing(transition, function):
    assert wired(function, transition=transition).sources == ["bn1"]


def test_the_input_is_left_as_it_was():
    class Writes(Between):
        def forward(self, x):
            return super().forward(x.mul_(2))

    x = example()
    before = x.clone()
    convert(Writes(torch.relu), x)
    assert torch.equal(x, before)
    bag = Bag(x)

    class WritesBag(Between):
        def forward(self, bag):
            return super().forward(bag.x.mul_(2))

    convert(WritesBag(torch.relu), bag)
    assert torch.equal(x, before)


@pytest.mark.parametrize("how", ["in place", "data", "lerp"])
def test_parameters_that_the_forward_moves_return(how):
    class Momentum(Between):
        def forward(self, x):
            with torch.no_grad():
                if how == "in place":
                    self.second.weight.mul_(2)
                elif how == "data":
                    self.second.weight.data = self.second.weight.data * 2
                else:
                    self.second.weight.data.lerp_(torch.zeros(()), 0.5)
            return super().forward(x)

    model = Momentum(torch.relu)
    before, weight = model.second.weight.detach().clone(), model.second.weight
    place = weight.data_ptr()
    convert(model, example(), inplace=True)
    assert model.second.weight is weight
    assert weight.data_ptr() == place
    assert torch.equal(weight, before)


def test_submodules_built_in_the_forward_go_again():
    class Late(Between):
        def forward(self, x):
            if not hasattr(self, "late"):
                self.late = nn.Conv2d(3, 3, 1)
            return super().forward(self.late(x))

    assert not hasattr(convert(Late(torch.relu), example(), inplace=True), "late")


def test_spectral_norm_is_not_stepped_by_a_prior():
    for wrap in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = Between(torch.relu)
        wrap(model.second)
        model = convert(model, example()).train()
        vectors = {name: b for name, b in model.named_buffers() if name.endswith(("_u", "weight_u"))}
        assert vectors
        reference = copy.deepcopy(model)
        x = example()
        torch.testing.assert_close(model(x), reference(x))


def test_nothing_of_the_run_is_kept_alive():
    x = example()
    convert(Between(torch.relu), x)
    gc.collect()
    shapes = [tuple(o.shape) for o in gc.get_objects() if type(o) is torch.Tensor and o is not x and o.dim() == 4]
    assert (4, 8, 6, 6) not in shapes


class Stopped(nn.Module):
    """A backbone whose features are stopped before the head, in one of the usual ways."""

    def __init__(self, how):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.how = how

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                y = self.bn1(self.conv1(x)).relu()
        else:
            y = self.bn1(self.conv1(x)).relu()
            y = y.detach() if self.how == "detach" else y.data
        return self.bn2(self.conv2(y))


@pytest.mark.parametrize("transition", ["weights", "learned"])
@pytest.mark.parametrize("how", ["detach", "no_grad", "data"])
def test_a_stopped_gradient_stays_stopped(how, transition):
    """SimSiam, BYOL, frozen extractors: the prior brings no gradient to what the model cut off."""
    x = torch.randn(4, 3, 8, 8)
    model = convert(Stopped(how), x, transition=transition, statistics_batch_size=2)
    report = wiring(model).norms[1]
    assert report.wired and report.sources == []
    if transition == "learned":
        nn.init.normal_(model.bn2.transition.matrix)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        stopped = name.startswith(("conv1", "bn1"))
        assert (parameter.grad is None or not parameter.grad.any()) == stopped, name
    assert all(p.requires_grad for p in model.parameters())


class Checkpointed(nn.Module):
    """Three norms. The second is in an activation checkpoint, or in two, one inside the other."""

    def __init__(self, how):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.how = how

    def forward(self, x):
        y = self.stem(x)
        run = partial(checkpoint, use_reentrant=True)
        if self.how == "reentrant":
            y = run(self.block, y)
        elif self.how == "nested":
            y = run(run, self.block, y)
        elif self.how == "stopped":
            with torch.no_grad():
                y = run(self.block, y)
        else:
            y = self.block(y)
        return self.head(y)


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("how", ["reentrant", "nested"])
def test_a_reentrant_checkpoint_is_seen_through(how, transition):
    """Its forward runs without gradients. The priors still have theirs, as if there were no checkpoint."""
    x, original = example().double(), Checkpointed(how).double()
    model = convert(original, x, transition=transition, statistics_batch_size=2)
    original.how = "plain"
    plain = convert(original, x, transition=transition, statistics_batch_size=2)
    assert str(wiring(model)) == str(wiring(plain))
    steps = [[type(step) for step in each.head[1].wire.relay.program.steps] for each in (model, plain)]
    assert steps[0] == steps[1]
    if transition == "weights":  # posteriors cannot bring a gradient out of a re-entrant segment, and a warning says so
        for each in (model, plain):
            each(x).square().sum().backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, msg=lambda m, n=name: f"{n}: {m}")
        assert model.stem[1].weight.grad.any()


def test_a_checkpoint_under_no_grad_stays_stopped():
    x = example()
    model = convert(Checkpointed("stopped"), x, statistics_batch_size=2)
    report = row(model, "head.1")
    assert report.wired and report.sources == []
    model(x).square().sum().backward()
    assert model.block[1].weight.grad is None
