"""The short way of learned transitions equals the long way, and is left where it could not compute the same."""

from __future__ import annotations

import copy
import types
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from kalmannorm import convert, fuse
from kalmannorm._model.settings import norms
from kalmannorm._ops.plain import without_kernels
from support import short_way_cases
from support.bundled_nets import IMAGE, Blocks, Branches, Twice
from support.short_way import count_repeated, count_short, the_long_way
from support.short_way_cases import *  # noqa: F403
from support.short_way_cases import (
    Segments,
    Small,
    assert_expires,
    assert_same,
    converted,
    in_a_checkpoint,
    in_a_reentrant_checkpoint,
    step,
)


@pytest.fixture(autouse=True)
def _learned(monkeypatch):
    monkeypatch.setattr(short_way_cases, "OPTIONS", {"transition": "learned"})


class Chain(nn.Module):
    """Residual blocks: sums of sums, each read by several norms."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(3))
        self.side, self.beside = nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5)

    def forward(self, x):
        x = self.first(self.stem(x)).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = (norm(conv(x)) + x).relu()
        return self.beside(self.side(x)).mean() + x


# A part's second run finds that the first has taken the posterior, and its recomputation finds it again: the long way
# fails too.
del test_the_first_run_is_long_in_a_part  # noqa: F821


@pytest.mark.parametrize("make", [Blocks, Branches, Chain])
@pytest.mark.parametrize("rank", [None, 2], ids=["dense", "low rank"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("examples", [4, 5], ids=["whole groups", "ragged last group"])
@pytest.mark.parametrize("kernels", [nullcontext, without_kernels], ids=["native", "aten"])
def test_bits_of_the_long_way(make, rank, dtype, examples, kernels, monkeypatch):
    """On a CPU the operations are the same, except those that sum the gradient of a gain."""
    with kernels():
        assert_same_bits(make, rank, dtype, examples, monkeypatch)


def assert_same_bits(make, rank, dtype, examples, monkeypatch):
    model = converted(make(), IMAGE, rank=rank).to(dtype)
    x = torch.randn(examples, *IMAGE[1:], dtype=dtype)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == len(list(norms(model)))
    expected = the_long_way(monkeypatch, step, model, x)
    assert_same(found, expected)
    different = [name for name, value in expected.items() if value is not None and not torch.equal(found[name], value)]
    assert all(name.endswith("gain_logit") for name in different), different


@pytest.mark.parametrize("options", [{"per_channel_gain": True}, {"noise": "per layer"}, {"affine": False}], ids=str)
def test_other_parameters(options, monkeypatch):
    """Gains for each channel, a noise for each channel, no γ and β."""
    model, x = small(**{name: value for name, value in options.items() if name == "per_channel_gain"})  # noqa: F405
    for norm in model.norm1, model.norm2:
        if "noise" in options:
            norm.transition._lender = []
            norm.transition.noise = nn.Parameter(torch.rand(norm.num_features) - 0.5)
        if "affine" in options:
            norm.weight = norm.bias = None
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 3
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def other_matrices(model):
    model.norm1.transition.matrix = nn.Parameter(model.norm1.transition.matrix.detach() + 1)
    model.norm2.transition.matrix.data = 2 * model.norm2.transition.matrix.data


def other_noise(model):
    owner = next(norm.transition for norm in (model.norm1, model.norm2) if not norm.transition._lender)
    owner.noise = nn.Parameter(-2 * owner.noise.detach())


def other_transition(model):
    """Of a low rank, and with a noise of its own."""
    model.norm2.transition = type(model.norm2.transition)(8, 4, rank=1)
    nn.init.ones_(model.norm2.transition.left)


def hooked_transition(model):
    model.norm1.transition.register_forward_hook(lambda module, args, prior: prior._replace(mean=prior.mean + 1))


def zeros(module, args):
    previous, *rest = args
    return previous._replace(mean=torch.zeros_like(previous.mean)), *rest


def own_step_of_transition(model):
    transition = model.norm1.transition
    transition.dense = types.MethodType(lambda self: 2 * self.matrix, transition)


class Doubled(nn.Module):
    def forward(self, matrix):
        return 2 * matrix


def fixed_matrix(model):
    model.norm1.transition.matrix.requires_grad_(False)


def transposed_matrix(model):
    """Equal values in another order in memory."""
    matrix = model.norm1.transition.matrix
    matrix.data = matrix.data.t().contiguous().t()


CHANGES = {
    "matrices": (other_matrices, 3),
    "noise": (other_noise, 3),
    "transition": (other_transition, 3),
    "hook on the transition": (hooked_transition, 2),
    "own method of the transition": (own_step_of_transition, 2),
    "parametrized": (lambda m: parametrize.register_parametrization(m.norm1.transition, "matrix", Doubled()), 2),
    "hook before the transition": (lambda m: m.norm1.transition.register_forward_pre_hook(zeros), 2),
    "fixed matrix": (fixed_matrix, 3),
    "transposed matrix": (transposed_matrix, 2),
    "full covariance": (lambda m: setattr(m.norm1, "covariance", "full"), 1),
    "closing phase": (lambda m: m.norm1.begin_closing(), 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_belongs_to_a_transition_expires(change, monkeypatch):
    assert_expires(*CHANGES[change], monkeypatch)


def test_evaluation_between_steps(monkeypatch):
    model, x = small()  # noqa: F405
    twin = copy.deepcopy(model)

    def train(model):
        found = {}
        for training in (True, False, True):
            model.train(training)
            found |= {f"{name} {training}": value for name, value in own_step(model, x).items()}  # noqa: F405
        return found

    taken = count_short(monkeypatch)
    found = train(model)
    assert len(taken) == 6
    assert_same(found, the_long_way(monkeypatch, train, twin))


@pytest.mark.parametrize("save_memory", [False, True])
def test_fused(save_memory, monkeypatch):
    """With a residual and a ReLU in the pass. Some outputs are computed again in the backward."""
    model = converted(Blocks(nn.ReLU()), IMAGE)
    x = torch.randn(4, *IMAGE[1:])
    model = fuse(model, x, save_memory=save_memory)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == len(list(norms(model)))
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_a_posterior_whose_output_nobody_reads(monkeypatch):
    """No gradient arrives at y, but one at the posterior."""

    class Unread(Small):
        def forward(self, x):
            self.norm0(self.conv0(x))
            return self.norm1(self.conv1(self.conv0(x)))

    model, x = small()  # noqa: F405
    model.__class__ = Unread
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 2
    assert_same(found, the_long_way(monkeypatch, step, model, x))


class TwoInOne(Segments):
    """One segment has two norms, and the second reads the posterior of the first."""

    def forward(self, x):
        return self.run(self.middle, self.norm0(self.conv0(x)).relu())

    def middle(self, x):
        return self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))


@pytest.mark.parametrize("run", [Segments.run, in_a_checkpoint], ids=["plain", "checkpoint"])
def test_a_forward_without_a_backward_is_freed(run, monkeypatch):
    """What a segment keeps for its recomputation holds no graph that holds the segment."""
    monkeypatch.setattr(Segments, "run", staticmethod(run))
    model, x = small()  # noqa: F405
    model.__class__ = TwoInOne
    x = x.clone().requires_grad_()
    taken = count_short(monkeypatch)
    y = model(x)
    assert len(taken) == 3
    reference = weakref.ref(x)
    del x, y
    assert reference() is None


def test_two_norms_in_one_segment(monkeypatch):
    model, x = small()  # noqa: F405
    model.__class__ = TwoInOne
    expected = step(model, x)
    monkeypatch.setattr(Segments, "run", staticmethod(in_a_checkpoint))
    again = count_repeated(monkeypatch)
    assert_same(step(model, x), expected)
    assert len(again) == 2


@pytest.mark.filterwarnings("ignore:kalmannorm.* a re-entrant checkpoint cuts the gradient")
def test_every_norm_in_a_reentrant_checkpoint(monkeypatch):
    """The forward has no gradients at all. Its recomputation needs the posteriors that entered each segment."""

    class Everywhere(Segments):
        def forward(self, x):
            x = self.run(lambda x: self.norm0(self.conv0(x)).relu(), x)
            x = self.run(self.middle, x)
            return self.run(lambda x: self.norm2(self.conv2(x)), x)

    monkeypatch.setattr(Segments, "run", staticmethod(in_a_reentrant_checkpoint))
    model, x = small()  # noqa: F405
    model.__class__ = Everywhere
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert not taken
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_two_norms_read_one_posterior(monkeypatch):
    model = convert(Twice(), torch.randn(6, 4), statistics_batch_size=3, transition="learned")
    for norm in (model.b, model.c):
        nn.init.normal_(norm.transition.matrix)
    x = torch.randn(6, 4)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 3
    assert_same(found, the_long_way(monkeypatch, step, model, x))
