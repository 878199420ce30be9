"""Who feeds whom: sources against hand-written lists, for every way that features travel between norms."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import kalmannorm
from kalmannorm import convert, moments, rewire, wiring
from kalmannorm.moments import Moments


def global_hooks():
    """Of all modules, by kind; torch's own exporter leaves some behind when a model defeats it."""
    found = vars(torch.nn.modules.module).items()
    return {name: set(hooks) for name, hooks in found if name.startswith("_global_") and "hooks" in name}


def conv(inputs, outputs, size=3, **options):
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **options)


def sources(model, example, **options):
    return {norm.name: norm.sources for norm in wiring(convert(model, example, **options)).norms}


def image(channels=3, size=8, batch=2):
    return torch.randn(batch, channels, size, size)


class Unit(nn.Module):
    def __init__(self, inputs, outputs, size=1):
        super().__init__()
        self.conv, self.bn = conv(inputs, outputs, size, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Unit(3, 6)
        self.one, self.reduce, self.three, self.pool = Unit(6, 4), Unit(6, 3), Unit(3, 5, 3), Unit(6, 2)
        self.next = Unit(11, 4)

    def forward(self, x):
        x = self.stem(x)
        branches = [self.one(x), self.three(self.reduce(x)), self.pool(F.avg_pool2d(x, 3, 1, 1))]
        return self.next(torch.cat(branches, 1))


class Dense(nn.Module):
    """Pre-activation layers, each reading all features before it."""

    def __init__(self):
        super().__init__()
        self.stem = Unit(3, 4)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 2 * i) for i in range(3))
        self.convs = nn.ModuleList(conv(4 + 2 * i, 2) for i in range(3))
        self.last = nn.BatchNorm2d(10)

    def forward(self, x):
        features = [self.stem(x)]
        for norm, layer in zip(self.norms, self.convs, strict=True):
            features.append(layer(norm(torch.cat(features, 1)).relu()))
        return self.last(torch.cat(features, 1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Unit(3, 4)
        self.conv1, self.bn1 = conv(4, 6), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = conv(6, 6), nn.BatchNorm2d(6)
        self.project, self.bn3 = conv(4, 6, 1), nn.BatchNorm2d(6)
        self.conv4, self.bn4 = conv(6, 6), nn.BatchNorm2d(6)
        self.conv5, self.bn5 = conv(6, 3), nn.BatchNorm2d(3)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.bn2(self.conv2(self.bn1(self.conv1(x)).relu_())) + self.bn3(self.project(x)))
        x = x + self.bn4(self.conv4(x))
        return self.bn5(self.conv5(x.relu()))


HAND_WRITTEN = {
    Inception: {
        "stem.bn": [],
        "one.bn": ["stem.bn"],
        "reduce.bn": ["stem.bn"],
        "three.bn": ["reduce.bn"],
        "pool.bn": ["stem.bn"],
        "next.bn": ["one.bn", "three.bn", "pool.bn"],
    },
    Dense: {
        "stem.bn": [],
        "norms.0": ["stem.bn"],
        "norms.1": ["stem.bn", "norms.0"],
        "norms.2": ["stem.bn", "norms.0", "norms.1"],
        "last": ["stem.bn", "norms.0", "norms.1", "norms.2"],
    },
    Residual: {
        "stem.bn": [],
        "bn1": ["stem.bn"],
        "bn2": ["bn1"],
        "bn3": ["stem.bn"],
        "bn4": ["bn2", "bn3"],
        "bn5": ["bn2", "bn3", "bn4"],
    },
}


@pytest.mark.parametrize("transition", ["weights", "learned"])
@pytest.mark.parametrize("net", HAND_WRITTEN, ids=lambda net: net.__name__)
def test_sources_equal_the_hand_written_list(net, transition):
    expected = HAND_WRITTEN[net]
    found = sources(net(), image(), transition=transition)
    assert {name: set(s) for name, s in found.items()} == {name: set(s) for name, s in expected.items()}
    report = wiring(convert(net(), image(), transition=transition))
    assert {n.name for n in report.norms if n.wired} == {name for name, s in expected.items() if s}


class Path(nn.Module):
    """Two norms of 8 and `outputs` channels, with a function and a convolution between them."""

    def __init__(self, between, inputs=8, outputs=5, layer=None):
        super().__init__()
        self.stem, self.bn1 = conv(3, 8), nn.BatchNorm2d(8)
        self.between = between
        self.layer, self.bn2 = layer or conv(inputs, outputs), nn.BatchNorm2d(outputs)
        if isinstance(between, nn.Module):
            self.gate = between

    def forward(self, x):
        return self.bn2(self.layer(self.between(self.bn1(self.stem(x)))))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        return x * self.fc2(F.silu(self.fc1(s))).sigmoid()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().round().numpy() ** 3)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x * x * g


class Opaque(nn.Module):
    """An operator that the tracer does not see, only its result."""

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return x.sinh()


def shuffle(x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def in_place(x):
    x *= 2
    x += 1
    return F.relu_(x)


PATHS = {
    "relu": torch.relu,
    "in place": in_place,
    "gate": Gate(),
    "pooling": lambda x: F.max_pool2d(x, 2),
    "upsampling": lambda x: F.interpolate(x, scale_factor=2),
    "shuffle": shuffle,
    "layer norm, channels last": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2),
    "padding": lambda x: F.pad(x, (1, 2, 1, 2)),
    "spatial gate": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
    "dropout": lambda x: F.dropout(x, 0.5, training=True) if x.requires_grad else F.dropout(x, 0.5, training=False),
    "methods": lambda x: x.clamp(min=0).contiguous().to(torch.float32).mul(0.5).sub(0.1),
    "numbers": lambda x: 1 - x / 3,
    "shapes": lambda x: x.flatten(2).unflatten(2, (-1, 8)) if x.shape[-1] == 8 else x[:, :0],
}


@pytest.mark.parametrize("transition", ["weights", "learned"])
@pytest.mark.parametrize("between", PATHS.values(), ids=PATHS.keys())
def test_paths_are_followed(between, transition):
    report = wiring(convert(Path(between), image(), transition=transition))
    assert report.norms[1].sources == ["bn1"]
    assert report.norms[1].wired


SELECTIONS = {
    "slice": (lambda x: x[:, 2:6], [2, 3, 4, 5]),
    "chunk": (lambda x: x.chunk(2, 1)[1], [4, 5, 6, 7]),
    "shuffle": (shuffle, [0, 4, 1, 5, 2, 6, 3, 7]),
    "split and cat": (lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1), [3, 4, 5, 6, 7, 0, 1, 2]),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [c for c in range(8) for _ in range(4)]),
    "flip": (lambda x: x.flip(1), list(range(8))[::-1]),
    "index": (lambda x: x[:, [1, 1, 0]], [1, 1, 0]),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), list(range(8)) * 2),
}


@pytest.mark.parametrize("function", SELECTIONS, ids=SELECTIONS.keys())
def test_channels_are_followed(function):
    """The prior is that of the very channels that reach the norm, in their order."""
    select, channels = SELECTIONS[function]
    model = Path(select, layer=nn.Identity(), outputs=len(channels))
    nn.init.normal_(model.bn1.weight)
    nn.init.normal_(model.bn1.bias)
    model = convert(model, image())
    prior = model.bn2.wire.previous(0, image())
    torch.testing.assert_close(prior.mean[0], model.bn1.bias[channels])
    torch.testing.assert_close(prior.var[0], model.bn1.weight[channels].square())


def test_a_learned_prior_takes_the_channels_that_enter():
    model = convert(Path(lambda x: x[:, 2:6], inputs=4), image(), transition="learned")
    assert model.bn2.prior_features == 4
    assert wiring(model).norms[1].prior_features == 4


def test_the_prior_of_a_chain_is_the_moments_written_by_hand():
    model = Path(lambda x: F.leaky_relu(x, 0.2))
    nn.init.normal_(model.bn1.weight)
    model = convert(model, image())
    belief = moments.leaky_relu(moments.belief(model.bn1.weight, model.bn1.bias), 0.2)
    expected = moments.convolution(belief, model.layer.weight, model.layer.bias, padding=1, input_size=(8, 8))
    for found, wanted in zip(model.bn2.wire.previous(0, image())[:2], expected[:2], strict=True):
        torch.testing.assert_close(found, wanted)


def test_pixel_shuffle_mixes_channels():
    model = convert(Path(lambda x: F.pixel_shuffle(x, 2), layer=nn.Identity(), outputs=2), image())
    with torch.no_grad():
        model.bn1.bias.copy_(torch.arange(8.0))
    prior = model.bn2.wire.previous(0, image())
    torch.testing.assert_close(prior.mean[0], torch.tensor([1.5, 5.5]))
    torch.testing.assert_close(prior.var[0], torch.full((2,), 1 + 1.25))


def test_a_gate_written_as_a_product_is_its_activation():
    silu = convert(Path(lambda x: x * torch.sigmoid(x), layer=nn.Identity(), outputs=8), image())
    expected = moments.silu(moments.belief(silu.bn1.weight, silu.bn1.bias))
    torch.testing.assert_close(silu.bn2.wire.previous(0, image()).mean, expected.mean, rtol=1e-4, atol=1e-5)


class Standardized(nn.Conv2d):
    def forward(self, x):
        w = self.weight.flatten(1)
        w = (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)
        return F.conv2d(x, w.view_as(self.weight), self.bias, padding=1)


@pytest.mark.parametrize(
    "layer",
    [Standardized(8, 5, 3), parametrizations.weight_norm(conv(8, 5))],
    ids=["standardized", "parametrized"],
)
def test_derived_weights_are_made_again(layer):
    """A weight that is computed in the forward is computed again for the prior, with its gradient."""
    model = convert(Path(torch.relu, layer=copy.deepcopy(layer)), image())
    first = model.bn2.wire.previous(0, image())
    first.mean.sum().backward()
    raw = [p for name, p in model.layer.named_parameters() if "bias" not in name]
    assert all(p.grad is not None for p in raw)
    with torch.no_grad():
        raw[-1].copy_(torch.randn_like(raw[-1]))
    assert not torch.allclose(model.bn2.wire.previous(0, image()).mean, first.mean)


@pytest.mark.parametrize(
    ("between", "name"), [(lambda x: Cube.apply(x), "Cube"), (Opaque(), "Opaque")], ids=["function", "module"]
)
def test_a_custom_function_is_reported_and_still_a_source(between, name):
    report = wiring(convert(Path(between), image()))
    assert report.norms[1].sources == ["bn1"]
    assert f"no rule for {name}" in report.norms[1].reason
    assert "1 fed by norms but without a prior" in report.summary
    assert wiring(convert(Path(between), image(), transition="learned")).norms[1].wired


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.first = conv(3, 4), nn.BatchNorm2d(4)
        self.shared, self.norm = conv(4, 4), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.first(self.stem(x)).relu()
        for _ in range(3):
            x = self.norm(self.shared(x)).relu()
        return x


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_a_reused_norm_has_a_prior_in_every_call(transition):
    model = convert(Reused(), image(), transition=transition, statistics_batch_size=1)
    report = {n.name: n for n in wiring(model).norms}
    assert report["norm"].calls == 3
    assert report["norm"].sources == ["first", "norm"]
    given = []
    original = model.norm._forward
    model.norm._forward = lambda x, previous, *rest: given.append(previous) or original(x, previous, *rest)
    with torch.no_grad():
        model.first.bias.fill_(3.0)
    model(image())
    assert len(given) == 3
    assert all(isinstance(previous, Moments) for previous in given)
    assert not torch.equal(given[0].mean, given[1].mean)


class Several(nn.Module):
    """Two inputs, a dict and a tuple out, a branch by shape, a head in training only, and one that never runs."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.join = Unit(3, 4), Unit(2, 4), Unit(4, 4)
        self.large, self.small, self.aux, self.never = Unit(4, 4), Unit(4, 4), Unit(4, 2), Unit(4, 2)

    def forward(self, image, *, mask):
        x = self.join(self.left(image) - self.right(mask))
        x = self.large(x) if x.shape[-1] > 6 else self.small(x)
        return {"out": (x, [self.aux(x)])} if self.training else {"out": (x, [])}


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_inputs_outputs_control_flow_and_training_branches(transition):
    example = {"image": image(), "mask": image(2)}
    model = convert(Several(), example, transition=transition)
    report = {n.name: n for n in wiring(model).norms}
    assert set(report["join.bn"].sources) == {"left.bn", "right.bn"}
    assert report["large.bn"].sources == ["join.bn"]
    assert report["aux.bn"].sources == ["large.bn"] and report["aux.bn"].wired
    assert report["small.bn"].reason == report["never.bn"].reason == "did not run on the example input"
    model(**example)["out"][1][0].sum().backward()
    assert "2 did not run on the example input" in wiring(model).summary


def test_a_norm_never_seen_works_without_a_prior():
    example = {"image": image(), "mask": image(2)}
    model = convert(Several(), example, statistics_batch_size=1, transition="learned")
    small = {"image": image(size=5), "mask": image(2, size=5)}
    with pytest.warns(UserWarning, match="not the norms that feed it"):  # aux, fed by the branch that did not run
        model(**small)
    model.small.bn(image(4))


def test_rewire_for_another_size():
    model = convert(Path(torch.relu), image(size=8))
    with torch.no_grad():
        model.bn1.bias.fill_(1.0)
    small = model.bn2.wire.previous(0, image()).mean
    assert rewire(model, image(size=64)).summary == wiring(model).summary
    assert not torch.allclose(model.bn2.wire.previous(0, image()).mean, small, rtol=1e-3)
    with pytest.raises(ValueError, match="was not converted"):
        rewire(Path(torch.relu), image())


class Leaky(nn.Module):
    """A model whose forward changes everything it can."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = conv(3, 4), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = x
        self.extra = random.random() + float(np.random.rand())
        return self.frozen(self.drop(self.bn(self.conv(x))))


def test_the_trace_leaves_no_trace():
    model, example, hooks = Leaky(), image(), global_hooks()
    hook = model.bn.register_forward_hook(lambda *_: None)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    plan = kalmannorm._wiring.plan.make_plan(model, example, {"bn": (model.bn, ())}, "weights")
    assert plan.norms["bn"].calls
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == flags
    assert model.last is None and not hasattr(model, "extra")
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert "forward" not in model.bn.__dict__ and hook.id in model.bn._forward_hooks
    assert global_hooks() == hooks


def test_the_trace_leaves_no_trace_when_the_model_fails():
    model, hooks = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), conv(5, 5)), global_hooks()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"example_input: Sequential does not run on it.*RuntimeError"):
        convert(model, image(), inplace=True)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert type(model[1]) is nn.BatchNorm2d and "forward" not in model[1].__dict__
    assert global_hooks() == hooks


def test_a_model_that_needs_targets_in_training_converts_from_eval():
    class Detector(Path):
        def forward(self, x, targets=None):
            if self.training and targets is None:
                raise ValueError("targets should not be none in training")
            return super().forward(x)

    assert wiring(convert(Detector(torch.relu), image())).norms[1].wired


def test_the_report_prints_as_a_table_and_draws():
    report = wiring(convert(Residual(), image()))
    text = str(report)
    assert text.splitlines()[0].split() == ["norm", "channels", "sources", "path", "transition"]
    assert "add → relu → conv 3×3" in text and "no prior: no norm before it" in text
    assert text.splitlines()[-1] == "5 of 6 norms of Residual are wired (weights), 1 with no norm before"
    svg = report.svg()
    assert svg.startswith("<svg") and svg.count("<path d=") == 1 + sum(len(n.sources) for n in report.norms)
    for norm in report.norms:
        assert norm.name in svg


def test_wiring_of_a_model_that_was_not_converted():
    with pytest.raises(ValueError, match="contains no norm wired"):
        wiring(Residual())
